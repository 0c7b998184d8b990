"""manifest.json: what a prepared corpus holds, by whom it was tokenised, and how to tell that it has not changed since.

`verify` looks at sizes, headers and three blocks of every shard, in seconds; `audit` reads and hashes everything.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pretrain.data.files import atomic_writer, file_hash, sampled_hash
from pretrain.data.indexed import IndexedShard
from pretrain.errors import UserError

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """One shard: `file`.bin and `file`.idx. Hashes are BLAKE2b; `sample` covers the size and three blocks of the .bin."""

    file: str
    tokens: int
    documents: int
    bin_bytes: int
    idx_bytes: int
    bin_hash: str
    idx_hash: str
    sample: str


@dataclass(frozen=True, kw_only=True)
class TokenizerRecord:
    """The tokenizer that made the ids: file name, BLAKE2b of its bytes, ids that it can emit, and the end-of-document id."""

    name: str
    hash: str
    size: int
    eos_id: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A prepared corpus.

    dtype      uint16 or int32: the smaller one that holds every id and the mask id.
    request    what was asked for (inputs with sizes and sampled hashes, text key): decides whether a re-run has anything to do.
    counts     documents read, empty ones dropped, bad lines quarantined.
    """

    format_version: int
    tokenizer: TokenizerRecord
    dtype: str
    tokens: int
    documents: int
    shards: tuple[ShardRecord, ...]
    request: dict[str, Any]
    counts: dict[str, int]

    def write(self, folder: Path) -> None:
        """Write manifest.json atomically; it goes last, so its presence means that the corpus is complete."""
        with atomic_writer(folder / FILE_NAME) as stream:
            stream.write(json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read manifest.json. UserError where the folder was never prepared, is incomplete, or has another format."""
        path = folder / FILE_NAME
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"no prepared corpus in {folder} ({FILE_NAME} is missing); prepare it with: "
                f"python launchers/prepare_data.py tokenize input=TEXT tokenizer=TOKENIZER output={folder}"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); prepare the corpus again") from error
        return cls._parse(raw, path)

    @classmethod
    def _parse(cls, raw: Any, path: Path) -> "Manifest":
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if version != FORMAT_VERSION:
            raise UserError(f"{path} has format version {version}, this code reads version {FORMAT_VERSION}; prepare the corpus again")
        try:
            shards = tuple(ShardRecord(**shard) for shard in raw["shards"])
            tokenizer = TokenizerRecord(**raw["tokenizer"])
            plain = {field.name: raw[field.name] for field in fields(cls) if field.name not in ("shards", "tokenizer")}
            return cls(shards=shards, tokenizer=tokenizer, **plain)
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} does not have the fields of a manifest ({error}); prepare the corpus again") from error


WHOLE_INDEX_BYTES = 64 << 20
"""Indexes up to this size are hashed whole at every start (a tenth of a second); larger ones by the audit only."""


def verify(folder: Path, manifest: Manifest) -> None:
    """Sizes, headers, sampled blocks and indexes of every shard against the manifest. UserError names the first shard that differs."""
    for record in manifest.shards:
        shard = IndexedShard(folder / record.file)
        found = (shard.tokens, shard.documents, str(shard.dtype))
        if found != (record.tokens, record.documents, manifest.dtype):
            raise UserError(
                f"{shard.idx_path} holds {found[0]} tokens, {found[1]} documents of {found[2]}, but the manifest says "
                f"{record.tokens}, {record.documents}, {manifest.dtype}; the shard changed after preparation: prepare the corpus again"
            )
        if sampled_hash(shard.bin_path) != record.sample:
            raise UserError(f"{shard.bin_path} changed after preparation (sampled blocks differ from the manifest); prepare the corpus again")
        if record.idx_bytes <= WHOLE_INDEX_BYTES and file_hash(shard.idx_path) != record.idx_hash:
            raise UserError(f"{shard.idx_path} changed after preparation (its hash differs from the manifest); prepare the corpus again")
        shard.check_ids(manifest.tokenizer.size)


def audit(folder: Path, manifest: Manifest, on_shard: Callable[[ShardRecord], None] = lambda record: None) -> None:
    """`verify`, then the full hash of every file. UserError names the first one that differs."""
    verify(folder, manifest)
    for record in manifest.shards:
        for suffix, expected in ((".bin", record.bin_hash), (".idx", record.idx_hash)):
            path = folder / (record.file + suffix)
            if file_hash(path) != expected:
                raise UserError(f"{path} changed after preparation (its hash differs from the manifest); prepare the corpus again")
        on_shard(record)


def shard_record(prefix: Path) -> ShardRecord:
    """Describe a shard that was just written."""
    shard = IndexedShard(prefix)
    return ShardRecord(
        file=prefix.name,
        tokens=shard.tokens,
        documents=shard.documents,
        bin_bytes=shard.bin_path.stat().st_size,
        idx_bytes=shard.idx_path.stat().st_size,
        bin_hash=file_hash(shard.bin_path),
        idx_hash=file_hash(shard.idx_path),
        sample=sampled_hash(shard.bin_path),
    )
