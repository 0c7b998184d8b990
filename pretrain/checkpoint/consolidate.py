"""Full fp32 weights out of a checkpoint of any layout, from its master weights, one tensor at a time on one CPU process."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from pretrain.checkpoint.files import complaint, inspect, remedy
from pretrain.checkpoint.logical import WeightSource
from pretrain.checkpoint.peers import disk_trouble
from pretrain.checkpoint.zero_reader import MASTER, ZeroCheckpoint
from pretrain.errors import UserError


def open_checkpoint(folder: Path) -> ZeroCheckpoint:
    """Open a checkpoint folder after verifying every checksum in it. Raises UserError naming the damaged file."""
    damages = inspect(folder)
    if damages:
        raise UserError(f"{complaint(folder, damages)}; use another of this run's checkpoints")
    return ZeroCheckpoint(folder)


def stream(source: WeightSource, key: str = MASTER) -> Iterator[tuple[str, Tensor]]:
    """(logical name, full fp32 tensor), in the table's order. key: fp32, ema, or a moment."""
    for name in source.table:
        yield name, source.tensor(name, key)


def consolidate(folder: Path, key: str = MASTER) -> dict[str, Tensor]:
    """Logical name -> full fp32 tensor (padded vocabulary rows included) of a checkpoint folder. Raises UserError if it is damaged."""
    source = open_checkpoint(folder)
    _check_key(source, key)
    return dict(stream(source, key))


def write_consolidated(folder: Path, out: Path, key: str = MASTER) -> None:
    """Write a checkpoint's weights as one safetensors file, streaming: peak memory is about twice the largest tensor.

    The file appears under its name only when it is whole. Raises UserError if the checkpoint is damaged or `out` cannot be written.
    """
    source = open_checkpoint(folder)
    _check_key(source, key)
    partial = out.with_name(out.name + ".partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(_header(source, key))
            for _, tensor in stream(source, key):
                file.write(tensor.contiguous().view(-1).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        trouble = str(disk_trouble(error))
        raise UserError(f"{out} could not be written: {trouble}; {remedy(trouble, out.parent)}, or choose another place") from None


def _header(source: ZeroCheckpoint, key: str) -> bytes:
    """The head of a safetensors file: its length as a little-endian 64-bit integer, then JSON padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(source.state.step), "weights": key}}
    offset = 0
    for name, spec in source.table.items():
        end = offset + 4 * spec.size
        entries[name] = {"dtype": "F32", "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _check_key(source: ZeroCheckpoint, key: str) -> None:
    if key not in source.keys:
        raise UserError(f"{source.folder} holds no {key} of the weights, only {', '.join(source.keys)}; choose one of those")
