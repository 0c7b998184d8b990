"""Corpora of any size that take almost no disk: .bin files that are holes (id 0), and one .idx that all shards share."""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.files import file_hash, sampled_hash

HEADER = struct.Struct("<9sQBQQ")
CODES = {"uint16": 8, "int32": 4}


def manifest_of(folder: Path, *, ids: int, known_hash: str | None = None, tokenizer_hash: str = "0" * 64, eos_id: int = 0) -> dict[str, Any]:
    """manifest.json of the shards in a folder, in format version 1; known_hash: the .bin's in place of reading them."""
    shards = []
    for idx in sorted(folder.glob("*.idx")):
        path = idx.with_suffix(".bin")
        _, _, code, documents, _ = HEADER.unpack(idx.read_bytes()[: HEADER.size])
        itemsize = 2 if code == CODES["uint16"] else 4
        shards.append({
            "file": idx.stem, "tokens": path.stat().st_size // itemsize, "documents": documents, "bin_bytes": path.stat().st_size,
            "idx_bytes": idx.stat().st_size, "bin_hash": known_hash or file_hash(path), "idx_hash": "", "sample": sampled_hash(path),
        })  # fmt: skip
        same = len(shards) > 1 and os.path.samefile(idx, folder / f"{shards[-2]['file']}.idx")
        shards[-1]["idx_hash"] = shards[-2]["idx_hash"] if same else file_hash(idx)
    documents = sum(shard["documents"] for shard in shards)
    return {
        "format_version": 1,
        "tokenizer": {"name": "tokenizer.json", "hash": tokenizer_hash, "size": ids, "eos_id": eos_id},
        "dtype": "uint16" if shards[0]["bin_bytes"] == 2 * shards[0]["tokens"] else "int32",
        "tokens": sum(shard["tokens"] for shard in shards),
        "documents": documents,
        "shards": shards,
        "request": {
            "format_version": 1, "tokenizer": tokenizer_hash, "text_key": "text", "shard_bytes": 1 << 30,
            "inputs": [{"name": "text.jsonl", "bytes": 1, "sample": hashlib.blake2b(digest_size=16).hexdigest()}],
        },
        "counts": {"documents": documents, "empty": 0, "bad": 0},
    }  # fmt: skip


def write_index(path: Path, tokens: int, documents: int, dtype: str) -> None:
    """A valid .idx of documents of equal length, the last one longer."""
    lengths = np.full(documents, tokens // documents, np.int32)
    lengths[-1] += tokens - int(lengths.astype(np.int64).sum())
    offsets = np.zeros(documents, np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    with path.open("wb") as stream:
        stream.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, CODES[dtype], documents, documents + 1))
        for array in (lengths, offsets * np.dtype(dtype).itemsize, np.arange(documents + 1, dtype=np.int64)):
            stream.write(array.tobytes())


def write_sparse(folder: Path, *, shards: int, tokens: int, documents: int, ids: int, tokenizer_hash: str, eos_id: int = 0) -> None:
    """A corpus of `shards` shards of `tokens` tokens each. Every .idx is a name of the same file: give `documents` per shard freely."""
    dtype = "uint16" if ids <= 1 << 16 else "int32"
    folder.mkdir(parents=True)
    first = folder / "shard_00000.idx"
    write_index(first, tokens, documents, dtype)
    for number in range(shards):
        path = folder / f"shard_{number:05d}.bin"
        with path.open("wb") as stream:
            stream.truncate(tokens * np.dtype(dtype).itemsize)
        if number:
            os.link(first, path.with_suffix(".idx"))
    manifest = manifest_of(folder, ids=ids, known_hash="0" * 64, tokenizer_hash=tokenizer_hash, eos_id=eos_id)
    (folder / "manifest.json").write_text(json.dumps(manifest))
