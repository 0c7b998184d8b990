"""The loader: which samples this data-parallel rank handles, made ahead of time and moved to its device.

numbers of the step -> read and noised in threads (samples.py) -> stacked (arrays.py) -> DALI or plain copies -> BatchShard.
Everything is a function of (seed, step), so starting at another step, or on another number of ranks, needs no state, and it does not
matter which thread makes what: batches and errors come in the order of the steps.
"""

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from pretrain.data.arrays import Arrays, stack, to_micro_batch
from pretrain.data.batch import BatchShard, MicroBatch
from pretrain.data.config import DataConfig
from pretrain.data.dali import DaliBatches
from pretrain.data.prefetch import Prefetcher
from pretrain.data.samples import BatchSizes, HeldOutSamples, Samples, TrainingStream, positions

T = TypeVar("T")


class Loader:
    """An iterator of BatchShards. `close` it, or use it in a `with` block, to stop its threads at once.

    Errors met while reading ahead, such as a UserError about a damaged shard, are raised by `next` as they are.
    """

    def __init__(
        self, samples: Samples, config: DataConfig, batch: BatchSizes, *, dp_rank: int, dp_size: int, steps: Iterator[int],
        device: torch.device | str, data_step: Callable[[int], int] = lambda step: step,
    ) -> None:  # fmt: skip
        """data_step: which step of the samples each of `steps` reads."""
        self._device = torch.device(device)
        self._workers = ThreadPoolExecutor(config.workers, "data worker")
        steps_of_numbers = _numbers(batch, dp_rank, dp_size, steps, data_step)
        make: Callable[[range], Any] = functools.partial(_stacked, samples)
        if config.loader == "plain":  # copying into pinned memory is work for the threads as well
            make = functools.partial(_in_host_memory, samples, pin=self._device.type == "cuda")
        made = _in_order(steps_of_numbers, make, self._workers, ahead=2 * config.workers)
        self._prefetcher: Prefetcher[tuple[int, list[Any]]] = Prefetcher(made, config.prefetch, "data loader")
        if config.loader == "dali":
            self._batches: Iterator[BatchShard] = DaliBatches(self._prefetcher, self._device, config.prefetch)
        else:
            self._batches = _plain(self._prefetcher, self._device)
        # DALI's pipeline and its Python source hold each other through C++, where the garbage collector cannot see: end both from here.
        self._finalizer = weakref.finalize(self, _release, self._prefetcher, self._batches, self._workers)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> BatchShard:
        return next(self._batches)

    def ready(self, timeout: float) -> bool:
        """Whether `next` has something to go on with, after waiting for it for at most `timeout` seconds."""
        return self._prefetcher.ready(timeout)

    def close(self) -> None:
        """Stop reading ahead, and release the threads and DALI's pipeline."""
        self._finalizer()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(prefetcher: Prefetcher[tuple[int, list[Any]]], batches: Iterator[BatchShard], workers: ThreadPoolExecutor) -> None:
    prefetcher.close()
    workers.shutdown(wait=True, cancel_futures=True)
    if isinstance(batches, DaliBatches):
        batches.close()


def build_loader(
    samples: TrainingStream,
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
    samples: HeldOutSamples, config: DataConfig, batch: BatchSizes, *, dp_rank: int, dp_size: int, device: torch.device | str = "cpu"
) -> Loader:
    """One pass over the whole held-out set; the last global batch is filled up with empty samples (count 0, sample id -1).

    Every rank yields the same number of steps.
    """
    steps = -(-len(samples) // batch.global_sequences)
    return Loader(samples, config, batch, dp_rank=dp_rank, dp_size=dp_size, steps=iter(range(steps)), device=device)


def _numbers(
    batch: BatchSizes, dp_rank: int, dp_size: int, steps: Iterator[int], data_step: Callable[[int], int]
) -> Iterator[tuple[int, range, bool]]:
    """(step, sample numbers, whether it is the step's last) of every micro-batch of this rank."""
    sizes = {"global_sequences": batch.global_sequences, "micro_sequences": batch.micro_sequences}
    for step in steps:
        micro_batches = list(
            positions(data_step(step), **sizes, dp_rank=dp_rank, dp_size=dp_size)
        )
        yield from ((step, numbers, place == len(micro_batches)) for place, numbers in enumerate(micro_batches, start=1))


def _stacked(samples: Samples, numbers: range) -> Arrays:
    return stack(samples.sample(number) for number in numbers)


def _in_host_memory(samples: Samples, numbers: range, *, pin: bool) -> MicroBatch:
    return to_micro_batch(_stacked(samples, numbers), pin=pin)


def _in_order(
    micro_batches: Iterator[tuple[int, range, bool]], make: Callable[[range], T], workers: ThreadPoolExecutor, ahead: int
) -> Iterator[tuple[int, list[T]]]:
    """(step, its micro-batches), in their order, while up to `ahead` of them are being made, also of the steps to come."""
    begun: deque[tuple[int, Future[T], bool]] = deque()
    made: list[T] = []
    while True:
        begun.extend((step, workers.submit(make, numbers), last) for step, numbers, last in itertools.islice(micro_batches, ahead - len(begun)))
        if not begun:
            return
        step, future, last = begun.popleft()
        made.append(future.result())
        if last:
            yield step, made
            made = []


def _plain(source: Iterator[tuple[int, list[MicroBatch]]], device: torch.device) -> Iterator[BatchShard]:
    on_gpu = device.type == "cuda"
    for step, micro_batches in source:
        yield BatchShard(step, tuple(micro.to(device) if on_gpu else micro for micro in micro_batches))
