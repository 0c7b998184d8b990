"""What a step reports: sums over the global batch, brought to every rank by one collective."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from pretrain.data.batch import MicroBatch
from pretrain.engine.loss import SampleSums
from pretrain.parallel.groups import Groups

TIME_BINS = 10
"""Equal parts of t in [0, 1]: a spike that comes from rare small t looks different from one that comes from every t."""

_COLUMNS = 5  # samples, tokens, loss, likelihood term, squared gradient norm


@dataclass(frozen=True)
class StepResult:
    """One optimizer step over the global batch.

    loss, nelbo    nats per token.
    gradient_norm  of the whole model, before clipping.
    tokens         what the loss was divided by.
    updated        whether the weights were updated by it.
    time_sums      [bins, 5] samples, tokens, loss, likelihood term and squared gradient norm at the logits by diffusion time; additive over steps.
    """

    loss: float
    nelbo: float
    gradient_norm: float
    tokens: int
    time_sums: np.ndarray
    updated: bool = True

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are numbers."""
        # DeepSpeed's helpers answer -1 for a norm that is not finite.
        return math.isfinite(self.loss) and math.isfinite(self.nelbo) and math.isfinite(self.gradient_norm) and self.gradient_norm >= 0


class StepStatistics:
    """Accumulates micro-batches on the ranks that see losses."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups = groups
        # One row per time bin, and a last row for samples without a time.
        self._sums = torch.zeros(TIME_BINS + 1, _COLUMNS, dtype=torch.float64, device=device)

    def add(self, batch: MicroBatch, sums: SampleSums) -> None:
        """Add a micro-batch. Gradient norms are summed over tensor-parallel shards by the later reduction."""
        t_B = batch.t_B.to(self._sums.device)
        row_B = torch.where(t_B.isnan(), TIME_BINS, (t_B * TIME_BINS).nan_to_num().long().clamp(0, TIME_BINS - 1))
        one = 1.0 if self._groups.tensor.rank == 0 else 0.0
        columns = [torch.ones_like(t_B) * one, batch.count_B.to(t_B.device) * one, sums.loss_B * one, sums.nelbo_B * one, sums.squared_gradient_B]
        self._sums.index_add_(0, row_B, torch.stack([c.double() for c in columns], dim=1))

    def result(self, gradient_norm: float, divisor: int) -> StepResult:
        """Collective over all ranks."""
        dist.all_reduce(self._sums)
        sums = self._sums.cpu()
        total = sums.sum(0).tolist()
        timed = sums[:TIME_BINS].numpy()
        return StepResult(loss=total[2] / divisor, nelbo=total[3] / divisor, gradient_norm=gradient_norm, tokens=divisor, time_sums=timed)


def time_records(time_sums: np.ndarray) -> list[dict[str, float]]:
    """Per bin that saw a sample: bounds, samples, loss and likelihood term in nats per token, and the root mean square over samples of the
    gradient norm at the logits (of the summed loss)."""
    width = 1 / len(time_sums)
    return [
        {
            "low": i * width,
            "high": (i + 1) * width,
            "samples": int(samples),
            "loss": float(loss / max(tokens, 1)),
            "nelbo": float(nelbo / max(tokens, 1)),
            "logit_gradient_norm": float(np.sqrt(squared / samples)),
        }
        for i, (samples, tokens, loss, nelbo, squared) in enumerate(time_sums)
        if samples
    ]


def global_count(batches: tuple[MicroBatch, ...], groups: Groups, device: torch.device) -> int:
    """Tokens that the global batch's loss is divided by. Collective over all ranks."""
    return agree(batches, (), groups, device)[0]


def agree(batches: tuple[MicroBatch, ...], votes: Sequence[int], groups: Groups, device: torch.device) -> tuple[int, list[int]]:
    """`global_count`, and the ranks' sum of `votes`, by one collective over all ranks."""
    own = sum(int(batch.count_B.sum()) for batch in batches) if groups.reports_loss else 0
    if groups.world_size == 1:
        return own, list(votes)
    numbers = torch.tensor([own, *votes], dtype=torch.int64, device=device)
    dist.all_reduce(numbers)
    count, *found = numbers.tolist()
    return count, found
