"""Which rank holds the others up: each rank's own time per step, compared once per record.

A step takes equally long on every rank, since they wait for each other in it. What differs is how much of it is waiting: a rank's own time is
the step minus the time that it was blocked in collectives (telemetry.collectives), and the slowest rank is the one that waits least.
On CUDA only the last step before a record is measured, by events on the compute stream.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from pretrain.telemetry.collectives import Collectives, recorded


class Heartbeat:
    """Times this rank's steps. exchange: every rank's list of two numbers, in rank order (a collective of all ranks)."""

    def __init__(
        self, exchange: Callable[[list[float]], list[list[float]]], *, sampled: bool, record: Collectives | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._exchange, self._sampled, self._clock = exchange, sampled, clock
        self._record = record or recorded()
        self._own: list[float] = []
        self._waits: list[float] = []
        self._measuring = False

    def begin(self, *, last: bool) -> None:
        """A step begins; `last` before the next record."""
        self._measuring = last or not self._sampled
        if self._measuring:
            self._record.sample(True)
            self._waited, self._start = self._record.read(), self._clock()

    def end(self) -> None:
        """It is done, agreement with the other ranks included."""
        if self._measuring:
            waited = self._record.read() - self._waited
            self._record.sample(False)
            self._own.append(self._clock() - self._start - waited)
            self._waits.append(waited)

    def read(self) -> dict[str, float | int]:
        """slowest_rank, slowest_rank_seconds (its median own time per step), median_rank_seconds and waiting_share (the share of their steps that
        the other ranks waited); starts again. Collective."""
        own = [statistics.median(self._own) if self._own else 0.0, statistics.median(self._waits) if self._waits else 0.0]
        self._own, self._waits = [], []
        return compare(self._exchange(own))


def gather_values(values: list[float], device: torch.device) -> list[list[float]]:
    """Every rank's values, in rank order."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return [row.tolist() for row in rows]


def compare(ranks: Sequence[Sequence[float]]) -> dict[str, float | int]:
    """The figures of a record from every rank's (own seconds, waiting seconds)."""
    if len(ranks) == 1:
        return {}
    own = [rank[0] for rank in ranks]
    slowest = max(range(len(ranks)), key=lambda rank: own[rank])
    shares = [waits / max(busy + waits, 1e-12) for rank, (busy, waits) in enumerate(ranks) if rank != slowest]
    return {
        "slowest_rank": slowest,
        "slowest_rank_seconds": own[slowest],
        "median_rank_seconds": statistics.median(own),
        "waiting_share": statistics.fmean(shares),
    }
