"""Whether copies of a parameter are equal to the last bit, by hashes that ranks exchange.

A parameter's hash is the sum over its entries, modulo 2^64, of (the entry's bits) x (an odd weight that a mixing function makes from the entry's
position). One entry that differs always changes it: a non-zero difference times an odd number is not 0 modulo 2^64. Several that differ cancel
only if their weighted differences add up to 0, which for weights like random ones has a chance of about 2^-63. Integer sums do not depend on
the order in which a device adds, so equal bits give equal hashes everywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.backbones.megatron import Stage
from pretrain.parallel.groups import Groups

_PIECE = 1 << 18
"""Entries hashed at once: the weights of a whole large parameter would take four times its memory."""
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # the constants of splitmix64, as signed numbers
_ABSENT = -(1 << 63)
"""Stands for a parameter that a rank does not hold."""


@dataclass(frozen=True)
class Mismatch:
    """Copies of one parameter that differ: the ranks in groups of equal copies, the largest group first."""

    name: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        first, *others = self.ranks
        if len(others) == 1 and len(others[0]) == len(first):  # of two, nobody knows which is right
            return f"{self.name} (rank {_listed(first)} against {_listed(others[0])})"
        return f"{self.name} (rank {_listed(tuple(rank for group in others for rank in group))} against {_listed(first)})"


class ReplicaCheck:
    """Compares what several ranks of an engine hold. Copies are on data-parallel ranks; on tensor-parallel ranks, of what is not cut; on pipeline
    stages, of the time embedding; on all ranks, of the objective's parameters and buffers.

    Under ZeRO 3 a parameter is in pieces between passes: then the pieces of what is not cut are compared over tensor-parallel ranks.
    """

    def __init__(self, stage: Stage, objective: nn.ModuleDict, groups: Groups, device: torch.device) -> None:
        self._stage, self._objective, self._groups, self._device = stage, objective, groups, device
        own = sorted(name for name, _ in _state(objective))
        self._names = [*stage.table, *own]
        self._weights_P = _weights(device)

    @torch.no_grad()
    def compare(self) -> list[Mismatch]:
        """What differs, in the order of the network; the same on every rank. One collective."""
        held = dict(self._held())
        absent = torch.tensor(_ABSENT, device=self._device)
        mine_N = torch.stack([held.get(name, absent) for name in self._names])
        # Where each rank's copy belongs: copies are compared within equal (tensor, piece).
        tensor, piece = self._groups.tensor.rank, self._groups.data.rank
        row = torch.cat([torch.tensor([tensor, piece], device=self._device), mine_N])
        rows = [torch.empty_like(row) for _ in range(self._groups.world_size)]
        dist.all_gather(rows, row)
        table = torch.stack(rows).cpu()
        places, hashes_RN = table[:, :2].tolist(), table[:, 2:]
        partitioned = self._partitioned()
        found = []
        for i, name in enumerate(self._names):
            values = hashes_RN[:, i].tolist()
            cut = name in self._stage.table and self._stage.spec(name).axis is not None
            groups: dict[tuple[int, int], dict[int, list[int]]] = {}
            for rank, value in enumerate(values):
                if value != _ABSENT:
                    place = (places[rank][0] if cut else 0, places[rank][1] if name in partitioned else 0)
                    groups.setdefault(place, {}).setdefault(value, []).append(rank)
            for copies in groups.values():
                if len(copies) > 1:
                    found.append(Mismatch(name, tuple(sorted((tuple(ranks) for ranks in copies.values()), key=lambda ranks: (-len(ranks), ranks)))))
        return found

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._stage.named_parameters():
            yield name, self._hash(_present(parameter))
        for name, value in _state(self._objective):
            yield name, self._hash(value)

    def _partitioned(self) -> set[str]:
        """Parameters of which every rank has a piece only. There is one pipeline stage then, so this rank's are all."""
        return {name for name, parameter in self._stage.named_parameters() if parameter.numel() == 0}

    def _hash(self, value: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.int64, device=value.device)
        for i, piece in enumerate(_bits(value).split(_PIECE)):
            # Another factor for each piece: two pieces that change places are noticed.
            total += (piece.long() * self._weights_P[: piece.numel()]).sum() * (2 * i + 1)
        return torch.where(total == _ABSENT, total + 1, total).to(self._device)


def _present(parameter: nn.Parameter) -> Tensor:
    piece = getattr(parameter, "ds_tensor", None)
    return piece if parameter.numel() == 0 and piece is not None else parameter


def _state(objective: nn.ModuleDict) -> Iterator[tuple[str, Tensor]]:
    for name, value in [*objective.named_parameters(), *objective.named_buffers()]:
        yield f"objective.{name}", value


def _bits(value: Tensor) -> Tensor:
    """The entries' bits as integers, in one dimension."""
    flat = value.detach().contiguous().flatten()
    if flat.dtype is torch.bool:
        return flat.to(torch.uint8)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def _weights(device: torch.device) -> Tensor:
    """weights_P, odd: splitmix64 of the position."""
    x = torch.arange(1, _PIECE + 1, dtype=torch.int64, device=device).mul_(_MIX[0])
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX[1])
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX[2])
    return x.bitwise_xor_(_shift(x, 31)).bitwise_or_(1)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right, which torch has for unsigned numbers only."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
