"""Safetensors files written one tensor at a time: the plan of all shards first, then every tensor once, in the planned order.

The library's own writer takes a dictionary of all tensors of a file. Here a header is made from shapes, and a tensor is in memory only
while it is written.
"""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


@dataclass(frozen=True)
class Planned:
    """A tensor to come."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def plan_shards(tensors: Iterable[Planned], max_bytes: int) -> list[list[Planned]]:
    """Consecutive tensors in files of at most `max_bytes`, or of one tensor that is larger."""
    shards: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.bytes
    return shards


def write_shards(folder: Path, shards: list[list[Planned]], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the planned files and, where there are several, their index. Raises ValueError for a tensor that is not the planned one."""
    names = [_file_name(number, len(shards)) for number in range(len(shards))]
    arriving = iter(tensors)
    for file_name, shard in zip(names, shards, strict=True):
        with (folder / file_name).open("wb") as file:
            file.write(_header(shard))
            for planned in shard:
                name, tensor = next(arriving)
                if (name, tuple(tensor.shape), tensor.dtype) != (planned.name, planned.shape, planned.dtype):
                    raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} came where {planned} was to be written")
                # bf16 has no NumPy type: its bytes pass as 16-bit integers.
                data = tensor.contiguous().view(-1)
                file.write((data.view(torch.int16) if data.dtype is torch.bfloat16 else data).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        places = {planned.name: file_name for file_name, shard in zip(names, shards, strict=True) for planned in shard}
        index: dict[str, Any] = {"metadata": {"total_size": sum(p.bytes for shard in shards for p in shard)}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _file_name(number: int, shards: int) -> str:
    return "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"


def _header(shard: list[Planned]) -> bytes:
    """The head of a file: its length as a little-endian 64-bit integer, then JSON padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for planned in shard:
        entries[planned.name] = {"dtype": DTYPES[planned.dtype], "shape": list(planned.shape), "data_offsets": [offset, offset + planned.bytes]}
        offset += planned.bytes
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8)
