"""In which order Eso-LM reveals tokens, and which of them together. All of it is drawn before the network is asked anything.

The network does not see time, so a step of the schedule that reveals nothing is left out: sequences of a batch take turns of their own,
numbered without gaps. Given tokens (a prompt, or the surroundings of a gap) come before everything, from left to right or shuffled: the
diffusion loss trains on shuffled ones.

Shape suffixes: B sequences, L positions, S steps of a schedule, T turns of the longest sequence and one.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .sampling_network import Request, blanks
from .sampling_noise import uniforms

GivenOrder = Literal["natural", "shuffled"]
"""Given tokens from left to right, or in random order."""

BlockOrder = Literal["natural", "shuffled_steps", "shuffled"]
"""A block sampler's steps from left to right; its steps in random order; its steps, and the positions inside each, in random order."""

_POSITIONS, _STEPS = 0, 1
"""Steps of the noise: what belongs to a position, and the order of steps."""


@dataclass(frozen=True)
class Reveals:
    """The plan of a batch.

    order_BL  positions in the order of generation, given ones first.
    known_BT  tokens known before turn 0, before turn 1, ..., and at the end; on the CPU, so that no turn waits for a device.
    """

    order_BL: Tensor
    known_BT: Tensor

    @property
    def turns_B(self) -> Tensor:
        """Turns of each sequence, one network evaluation each; on the CPU."""
        return (self.known_BT < self.order_BL.shape[1]).sum(1)


def ancestral_reveals(ids_BL: Tensor, steps: int, request: Request, *, alpha_0: float, given: GivenOrder = "natural") -> Reveals:
    """Diffusion on the grid t = 1, 1 - 1/steps, ..., 0, then one by one from left to right.

    A mask is revealed by time s with probability alpha_s = alpha_0 (1 - s), independently of all others: given what a reverse step starts
    from, the number that it reveals is binomial. Within a step the order is random, as in training.
    """
    _at_least_one(steps=steps)
    if not 0 <= alpha_0 <= 1:
        raise ValueError(f"an expected share of diffusion needs 0 <= alpha_0 <= 1, got {alpha_0}")
    moment_BL, _ = position_noise(ids_BL, request)  # below alpha_s for who is revealed by time s
    step_BL = (moment_BL * steps / alpha_0).clamp(max=steps - 1).long()
    position_BL = _positions(ids_BL)
    left_over_BL = moment_BL >= alpha_0
    turn_BL = torch.where(left_over_BL, steps + position_BL, step_BL)
    return _plan(ids_BL, request, turn_BL, torch.where(left_over_BL, position_BL.double(), moment_BL), given)


def block_reveals(
    ids_BL: Tensor,
    steps: int,
    request: Request,
    *,
    order: BlockOrder = "natural",
    segments: int = 1,
    anchors: bool = False,
    given: GivenOrder = "natural",
) -> Reveals:
    """`steps` steps that each reveal masks far apart: of M masks, numbers s, s + steps, s + 2 steps, ... in step s.

    segments  the masks in as many runs of neighbours, each with steps of its own, from left to right.
    anchors   each segment's first step goes from left to right instead, one mask per turn.
    """
    _at_least_one(steps=steps, segments=segments)
    _one_of(order, BlockOrder)
    length = ids_BL.shape[1]
    steps = min(steps, length)  # more would each reveal one mask or none, as `length` do
    masked_BL, (moment_BL, _) = blanks(ids_BL, request.law), position_noise(ids_BL, request)
    number_BL, count_B1 = masked_BL.cumsum(1) - 1, masked_BL.sum(1, keepdim=True).clamp(min=1)
    segment_BL = number_BL.clamp(min=0) * segments // count_B1
    inside_BL = number_BL - -(-segment_BL * count_B1 // segments)  # the first of segment g is number ceil(g M / segments)
    step_BL = inside_BL % steps
    if order != "natural":
        key_BS, _ = uniforms(request.seed, request.sequences_B.to(ids_BL.device), _STEPS, torch.arange(steps, device=ids_BL.device))
        step_BL = key_BS.argsort(1).gather(1, step_BL)
    turn_BL = torch.where(step_BL == 0, inside_BL // steps, length + step_BL) if anchors else step_BL
    key_BL = moment_BL if order == "shuffled" else _positions(ids_BL).double()
    return _plan(ids_BL, request, segment_BL * (length + steps) + turn_BL, key_BL, given)


def left_to_right_reveals(ids_BL: Tensor, request: Request, *, given: GivenOrder = "natural") -> Reveals:
    """One mask per turn, in natural order."""
    position_BL = _positions(ids_BL)
    return _plan(ids_BL, request, position_BL, position_BL.double(), given)


def position_noise(ids_BL: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Two uniform numbers of each position [B, L]: when it is revealed, and as what."""
    device = ids_BL.device
    return uniforms(request.seed, request.sequences_B.to(device), _POSITIONS, torch.arange(ids_BL.shape[1], device=device))


def _plan(ids_BL: Tensor, request: Request, turn_BL: Tensor, key_BL: Tensor, given: GivenOrder) -> Reveals:
    """Masks by turn (integers from 0, with gaps) and then by key, after given tokens."""
    _one_of(given, GivenOrder)
    masked_BL = blanks(ids_BL, request.law)
    given_key_BL = position_noise(ids_BL, request)[0] if given == "shuffled" else _positions(ids_BL).double()
    key_BL, turn_BL = torch.where(masked_BL, key_BL, given_key_BL), turn_BL.masked_fill(~masked_BL, -1)
    by_key_BL = key_BL.argsort(dim=1, stable=True)
    order_BL = by_key_BL.gather(1, turn_BL.gather(1, by_key_BL).argsort(dim=1, stable=True))
    turn_BL = turn_BL.gather(1, order_BL)
    # Turns without their gaps: -1 for what is given, then 0, 1, ...
    new_BL = torch.cat((turn_BL[:, :1] >= 0, turn_BL[:, 1:] != turn_BL[:, :-1]), 1)
    turn_BL = new_BL.cumsum(1) - 1
    turn_T = torch.arange(-1, int(turn_BL.max()) + 1, device=ids_BL.device)
    known_BT = torch.searchsorted(turn_BL, turn_T.expand(len(ids_BL), -1).contiguous(), right=True)
    return Reveals(order_BL, known_BT.cpu())


def _positions(ids_BL: Tensor) -> Tensor:
    return torch.arange(ids_BL.shape[1], device=ids_BL.device).expand_as(ids_BL)


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"a sampler needs at least one of its {name}, got {count}")


def _one_of(choice: str, names: object) -> None:
    if choice not in get_args(names):
        raise ValueError(f"{choice} is no order; choose one of {', '.join(get_args(names))}")
