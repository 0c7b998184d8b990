"""What the loader yields: this data-parallel rank's share of one global batch, as micro-batches.

Shape suffixes: B sequences of the micro-batch, L positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Stacked samples.

    inputs, targets  the objective's arrays, stacked along B ([B] for scalars). `documents` is absent from `inputs` when no position needs a mask.
    count_B          the divisor of each sample's loss, int64.
    t_B              diffusion times (nan where the objective has none), float32.
    sample_ids       global sample indices, for messages and audits.
    """

    inputs: dict[str, Tensor]
    targets: dict[str, Tensor]
    count_B: Tensor
    t_B: Tensor
    sample_ids: tuple[int, ...]

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch on another device (asynchronously from pinned memory)."""
        def move(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {key: value.to(device, non_blocking=True) for key, value in tensors.items()}

        return MicroBatch(
            move(self.inputs), move(self.targets), self.count_B.to(device, non_blocking=True), self.t_B.to(device, non_blocking=True), self.sample_ids
        )


@dataclass(frozen=True)
class BatchShard:
    """One optimizer step's data for this data-parallel rank."""

    step: int
    micro_batches: tuple[MicroBatch, ...]
