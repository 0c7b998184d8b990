"""The loader: which samples this data-parallel rank handles, made ahead of time and moved to its device.

numbers of the step -> read and noised in a thread (samples.py) -> stacked (arrays.py) -> DALI or plain copies -> BatchShard.
Everything is a function of (seed, step), so starting at another step, or on another number of ranks, needs no state.
"""

import weakref
from collections.abc import Callable, Iterator

import torch

from pretrain.data.arrays import Arrays, stack, to_micro_batch
from pretrain.data.batch import BatchShard
from pretrain.data.config import DataConfig
from pretrain.data.dali import DaliBatches
from pretrain.data.prefetch import Prefetcher
from pretrain.data.samples import BatchSizes, Samples, TrainingSamples, ValidationSamples, positions


class Loader:
    """An iterator of BatchShards. `close` it, or use it in a `with` block, to stop its thread at once.

    Errors met while reading ahead, such as a UserError about a damaged shard, are raised by `next` as they are.
    """

    def __init__(
        self, samples: Samples, config: DataConfig, batch: BatchSizes, *, dp_rank: int, dp_size: int, steps: Iterator[int],
        device: torch.device | str, data_step: Callable[[int], int] = lambda step: step,
    ) -> None:  # fmt: skip
        """data_step: which step of the samples each of `steps` reads."""
        self._device = torch.device(device)
        arrays = _arrays(samples, batch, dp_rank, dp_size, steps, data_step)
        self._prefetcher: Prefetcher[tuple[int, list[Arrays]]] = Prefetcher(arrays, config.prefetch, "data loader")
        if config.loader == "dali":
            self._batches: Iterator[BatchShard] = DaliBatches(self._prefetcher, self._device, config.prefetch)
        else:
            self._batches = _plain(self._prefetcher, self._device)
        # DALI's pipeline and its Python source hold each other through C++, where the garbage collector cannot see: end both from here.
        self._finalizer = weakref.finalize(self, _release, self._prefetcher, self._batches)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> BatchShard:
        return next(self._batches)

    def ready(self, timeout: float) -> bool:
        """Whether `next` has something to go on with, after waiting for it for at most `timeout` seconds."""
        return self._prefetcher.ready(timeout)

    def close(self) -> None:
        """Stop reading ahead, and release the thread and DALI's pipeline."""
        self._finalizer()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(prefetcher: Prefetcher[tuple[int, list[Arrays]]], batches: Iterator[BatchShard]) -> None:
    prefetcher.close()
    if isinstance(batches, DaliBatches):
        batches.close()


def build_loader(
    samples: TrainingSamples,
    config: DataConfig,
    batch: BatchSizes,
    *,
    dp_rank: int,
    dp_size: int,
    start_step: int = 0,
    device: torch.device | str = "cpu",
) -> Loader:
    """The endless training loader of this data-parallel rank, from optimizer step `start_step` on."""
    def steps() -> Iterator[int]:
        step = start_step
        while True:
            yield step
            step += 1

    return Loader(
        samples, config, batch, dp_rank=dp_rank, dp_size=dp_size, steps=steps(), device=device, data_step=samples.skips.data_step
    )


def build_validation_loader(
    samples: ValidationSamples, config: DataConfig, batch: BatchSizes, *, dp_rank: int, dp_size: int, device: torch.device | str = "cpu"
) -> Loader:
    """One pass over the whole held-out set; the last global batch is filled up with empty samples (count 0, sample id -1).

    Every rank yields the same number of steps.
    """
    steps = -(-len(samples) // batch.global_sequences)
    return Loader(samples, config, batch, dp_rank=dp_rank, dp_size=dp_size, steps=iter(range(steps)), device=device)


def _arrays(
    samples: Samples, batch: BatchSizes, dp_rank: int, dp_size: int, steps: Iterator[int], data_step: Callable[[int], int]
) -> Iterator[tuple[int, list[Arrays]]]:
    for step in steps:
        micro_batches = positions(
            data_step(step), global_sequences=batch.global_sequences, micro_sequences=batch.micro_sequences, dp_rank=dp_rank, dp_size=dp_size
        )
        yield step, [stack(samples.sample(number) for number in numbers) for numbers in micro_batches]


def _plain(source: Iterator[tuple[int, list[Arrays]]], device: torch.device) -> Iterator[BatchShard]:
    on_gpu = device.type == "cuda"
    for step, arrays in source:
        shard = BatchShard(step, tuple(to_micro_batch(micro, pin=on_gpu) for micro in arrays))
        yield BatchShard(step, tuple(micro.to(device) for micro in shard.micro_batches)) if on_gpu else shard
