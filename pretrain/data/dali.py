"""Batches through NVIDIA DALI: pinned staging and asynchronous copies to the device. Order and noise are decided before it.

DALI calls a non-parallel external source inside `run`, so the arrays come from a Prefetcher's thread and `run` only copies them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from pretrain.data.arrays import Arrays, micro_batch, needs_documents
from pretrain.data.batch import BatchShard
from pretrain.errors import UserError


class DaliBatches:
    """Turns (step, arrays of every micro-batch) into BatchShards on `device`; where the arrays' names, types or numbers of axes change (a
    curriculum ends), the pipeline is built anew."""

    def __init__(self, source: Iterator[tuple[int, list[Arrays]]], device: torch.device, depth: int) -> None:
        self._source, self._device = source, device
        self._labels: list[tuple[int, list[tuple[bool, np.ndarray]]]] = []
        self._pipeline: Any = None
        self._depth = depth
        self._names: list[str] = []
        self._signature: list[tuple[str, str, int]] = []
        self._pending: tuple[int, list[Arrays]] | None = None
        self._error: Exception | None = None

    def __iter__(self) -> "DaliBatches":
        return self

    def close(self) -> None:
        """Release the pipeline; later calls of `next` end as the source does."""
        self._pipeline = None

    def __next__(self) -> BatchShard:
        if self._pipeline is None:
            self._start(next(self._source))
        try:
            outputs = self._pipeline.run()
        except StopIteration:
            if self._error is not None:
                raise self._error from None
            if self._pending is None:
                raise
            self._start(self._pending)
            outputs = self._pipeline.run()
        step, labels = self._labels.pop(0)
        columns = {name: _tensors(output, len(labels), self._device) for name, output in zip(self._names, outputs, strict=True)}
        batches = [
            micro_batch({name: column[m] for name, column in columns.items()}, documents=documents, numbers=numbers)
            for m, (documents, numbers) in enumerate(labels)
        ]
        return BatchShard(step, tuple(batches))

    def _start(self, pending: tuple[int, list[Arrays]]) -> None:
        """A pipeline for steps like this one, which it will yield first."""
        self._pending = pending
        self._names = list(pending[1][0])
        self._signature = _signature(pending[1])
        self._pipeline = self._build(pending[1])

    def _build(self, first: list[Arrays]) -> Any:
        fn, types, pipeline_class = _import_dali()
        on_gpu = self._device.type == "cuda"
        device_id = (self._device.index if self._device.index is not None else torch.cuda.current_device()) if on_gpu else None
        pipeline = pipeline_class(batch_size=len(first), num_threads=1, device_id=device_id, prefetch_queue_depth=max(self._depth, 1))
        with pipeline:
            outputs = fn.external_source(
                source=self._callback(),
                num_outputs=len(self._names),
                batch=True,
                dtype=[_dali_type(types, first[0][name].dtype) for name in self._names],
                ndim=[first[0][name].ndim for name in self._names],
            )
            pipeline.set_outputs(*(output.gpu() if on_gpu else output for output in outputs))
        pipeline.build()
        return pipeline

    def _callback(self) -> Callable[[], list[list[np.ndarray]]]:
        def next_arrays() -> list[list[np.ndarray]]:
            try:
                step, arrays = self._pending or next(self._source)
            except StopIteration:
                raise
            except Exception as error:  # DALI asks ahead: the batches before this one come first
                self._error = error
                raise StopIteration from error
            self._pending = None
            if _signature(arrays) != self._signature:
                self._pending = (step, arrays)
                raise StopIteration
            self._labels.append((step, [(needs_documents(micro["inputs/documents"]), micro["number"]) for micro in arrays]))
            return [[micro[name] for micro in arrays] for name in self._names]

        return next_arrays


def _signature(arrays: list[Arrays]) -> list[tuple[str, str, int]]:
    """What a pipeline is built for: names, types and numbers of axes."""
    return [(name, array.dtype.name, array.ndim) for name, array in arrays[0].items()]


def _tensors(output: Any, count: int, device: torch.device) -> list[Tensor]:
    """Copies of DALI's buffers, which it takes back at the next run."""
    if device.type == "cpu":
        return [torch.from_numpy(np.array(output.at(m))) for m in range(count)]
    # DLPack hands over on torch's current stream, so the clone waits for DALI's copy
    return [torch.utils.dlpack.from_dlpack(output[m]).clone() for m in range(count)]


def _dali_type(types: Any, dtype: np.dtype) -> Any:
    return types.to_dali_type(dtype.name)


def _import_dali() -> tuple[Any, Any, Any]:
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
    except ImportError as error:
        raise UserError(
            f"data.loader=dali needs NVIDIA DALI, which cannot be imported ({error}); "
            "install nvidia-dali-cuda120 (or -cuda130), or set data.loader=plain"
        ) from error
    return fn, types, Pipeline
