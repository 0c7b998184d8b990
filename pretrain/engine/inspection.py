"""What a self-test looks at inside an engine: which parameters have had a gradient, and whether copies of a parameter are equal."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.backbones.megatron import Stage
from pretrain.parallel.groups import Axis, Groups

VOCABULARY = ("embedding.", "head.")
"""Parameters with a row per id: one rank's rows may all be ids that a batch does not hold, or padding."""

_PIECE = 1 << 24
"""Entries compared at once, so that a large parameter needs no second copy of itself."""


@dataclass(frozen=True)
class GradientFindings:
    """Names of parameters, the same on every rank: all of them, and those whose gradient is not finite, or is zero wherever it should not be."""

    names: list[str]
    not_finite: list[str]
    zero: list[str]


class GradientWatch:
    """The largest entry of every gradient that reaches this rank's parameters, from now until `close`.

    Hooks see each micro-batch's own gradient, under every ZeRO stage and in every precision, before ranks add theirs up.
    """

    def __init__(self, stage: Stage, objective: nn.ModuleDict, groups: Groups, device: torch.device) -> None:
        own = {f"objective.{name}": parameter for name, parameter in objective.named_parameters() if parameter.requires_grad}
        self._groups, self._device = groups, device
        self._names = [*stage.table, *own]
        self._held = dict(stage.named_parameters()) | own
        self._largest: dict[str, Tensor] = {}
        self._handles = [parameter.register_hook(self._hook(name)) for name, parameter in self._held.items()]

    def findings(self) -> GradientFindings:
        """What the ranks have seen together. A data-parallel replica sees its own sequences only; otherwise every rank that holds a
        parameter, or its part of one, must have seen a gradient. Collective."""
        seen_N = torch.full((len(self._names),), -1.0, device=self._device)  # -1: on another stage
        for i, name in enumerate(self._names):
            if name in self._held:
                largest = self._largest.get(name)
                seen_N[i] = 0.0 if largest is None else torch.nan_to_num(largest.float(), nan=torch.inf)
        dist.all_reduce(seen_N, op=dist.ReduceOp.MAX, group=self._groups.data.group)
        anywhere_N = seen_N.clone()
        dist.all_reduce(anywhere_N, op=dist.ReduceOp.MAX)
        pooled = torch.tensor([name.startswith((*VOCABULARY, "objective.")) for name in self._names], device=self._device)
        zero_N = torch.where(pooled, anywhere_N, seen_N) == 0
        dist.all_reduce(problem_2N := torch.stack((anywhere_N == torch.inf, zero_N)).int(), op=dist.ReduceOp.MAX)
        not_finite, zero = ([name for name, bad in zip(self._names, row, strict=True) if bad] for row in problem_2N.tolist())
        return GradientFindings(self._names, not_finite, zero)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            largest, before = gradient.detach().abs().max(), self._largest.get(name)
            self._largest[name] = largest if before is None else torch.maximum(before, largest)

        return look


@torch.no_grad()
def replica_difference(stage: Stage, objective: nn.ModuleDict, groups: Groups) -> tuple[int, float]:
    """How many of this rank's parameters other ranks hold as well, and the largest difference between any two copies. Collective.

    Copies are on data-parallel ranks; on tensor-parallel ranks, of what is not cut; on stages, of the time embedding; on all ranks, of the
    objective's own. Under ZeRO 3 most parameters exist once, in pieces, between passes, and are not compared.
    """
    compared, largest = 0, 0.0
    for name, parameter in stage.named_parameters():
        if parameter.numel() == 0:
            continue
        whole = stage.spec(name).axis is None
        axes = [groups.data, *([groups.tensor] if whole else []), *([groups.pipeline] if name.startswith("time.") else [])]
        found = _differences(parameter, axes)
        compared += bool(found)
        largest = max([largest, *found])
    for value in (*objective.parameters(), *objective.buffers()):
        found = _differences(value, [groups.data, groups.tensor, groups.pipeline])
        compared += bool(found)
        largest = max([largest, *found])
    worst = torch.tensor(largest, dtype=torch.float64, device=next(stage.parameters()).device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return compared, float(worst)


def _differences(value: Tensor, axes: Iterable[Axis]) -> list[float]:
    """Along each axis that has several ranks: the largest minus the smallest of each entry's copies, at the entry where that is most."""
    exact = torch.float32 if value.dtype in (torch.float32, torch.bfloat16) else torch.float64
    found = []
    for axis in axes:
        if axis.size == 1:
            continue
        most = 0.0
        for piece in value.detach().flatten().split(_PIECE):
            high = torch.nan_to_num(piece.to(exact), nan=torch.inf)
            low = high.clone()
            dist.all_reduce(high, op=dist.ReduceOp.MAX, group=axis.group)
            dist.all_reduce(low, op=dist.ReduceOp.MIN, group=axis.group)
            most = max(most, float(torch.where(high == low, 0.0, high - low).max()))
        found.append(most)
    return found
