"""One step's samples as named NumPy arrays, and back into micro-batches of tensors.

In between the arrays pass through DALI or a queue, so they carry flat names: "inputs/ids", "targets/masked", "count", "t", "number".
Shape suffixes: B sequences of a micro-batch, L positions.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from pretrain.data.batch import MicroBatch
from pretrain.data.samples import NumberedSample

Arrays = dict[str, np.ndarray]
"""Flat name -> array of one micro-batch."""

_DOCUMENTS = "inputs/documents"


def stack(samples: Iterable[NumberedSample]) -> Arrays:
    """Arrays of one micro-batch; every sample must have the same names and shapes."""
    rows: list[Arrays] = []
    for sample in samples:
        noised = sample.corrupted
        row = {f"inputs/{key}": np.asarray(value) for key, value in noised.inputs.items()}
        row |= {f"targets/{key}": np.asarray(value) for key, value in noised.targets.items()}
        row["count"] = np.asarray(noised.count if sample.number >= 0 else 0, np.int64)
        row["t"] = np.asarray(np.nan if noised.t is None else noised.t, np.float32)
        row["number"] = np.asarray(sample.number, np.int64)
        rows.append(row)
    # np.stack keeps the axis order of its parts in memory; DALI and torch want the last axis densest.
    return {key: np.ascontiguousarray(np.stack([row[key] for row in rows])) for key in rows[0]}


def needs_documents(documents_BL: np.ndarray) -> bool:
    """Whether some sequence has more than one document, or padding beside text: only then does attention need a mask."""
    return bool((documents_BL != documents_BL[:, :1]).any())


def micro_batch(tensors: Mapping[str, Tensor], *, documents: bool, numbers: Iterable[int]) -> MicroBatch:
    """The micro-batch of these tensors; `documents` as `needs_documents` found it."""
    def group(name: str) -> dict[str, Tensor]:
        found = {key.removeprefix(name): value for key, value in tensors.items() if key.startswith(name)}
        return {key: value for key, value in found.items() if documents or name + key != _DOCUMENTS}

    return MicroBatch(group("inputs/"), group("targets/"), tensors["count"], tensors["t"], tuple(int(number) for number in numbers))


def to_micro_batch(arrays: Arrays, *, pin: bool) -> MicroBatch:
    """Tensors of a micro-batch in host memory, page-locked if they go on to a GPU."""
    tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
    if pin:
        tensors = {key: value.pin_memory() for key, value in tensors.items()}
    return micro_batch(tensors, documents=needs_documents(arrays[_DOCUMENTS]), numbers=arrays["number"])
