"""Noised copies of a text, drawn from a seed: what `LanguageModel.forward` scores where labels are given. Torch only.

The law of each draw is that of the objective's evaluation in training (e = 0, t on the whole of (0, 1]), so that its mean is a bound on the
negative log-likelihood. Times are stratified over the batch. The numbers depend on (seed, place in the batch, position) alone.

Shape suffixes: B sequences, L positions, J digits of a token, E width of an embedding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .diffusion_math import bound_time
from .digits import DigitCode
from .esolm_math import PartialSchedule
from .network_input import Attention, NetworkInput
from .sampling_noise import normals, uniforms
from .sampling_psi import random_ids
from .uniform_diffusion import SMALLEST_ALPHA, time_conditioning

_POSITIONS, _TIMES, _ORDER, _NORMALS = 0, 1, 2, 3
"""Steps of the noise: what belongs to a position, the times of the batch, orders of generation, latents."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A batch to score: ids, which of them are scored (the others are given, and never noised), and document numbers (-1: padding) or None.

    t  the time of every sequence; None: one in each of B equal parts of (0, 1].
    """

    ids_BL: Tensor
    scored_BL: Tensor
    documents_BL: Tensor | None
    seed: int
    t: float | None = None

    @property
    def positions_BL(self) -> Tensor:
        """0, 1, … in every sequence."""
        return torch.arange(self.ids_BL.shape[1], device=self.ids_BL.device).expand_as(self.ids_BL)

    def uniforms(self, step: int) -> tuple[Tensor, Tensor]:
        """Two independent numbers in [0, 1) per position."""
        batch, length = self.ids_BL.shape
        device = self.ids_BL.device
        return uniforms(self.seed, torch.arange(batch, device=device), step, torch.arange(length, device=device))

    def times(self) -> Tensor:
        """t_B in (0, 1], float64."""
        batch, device = len(self.ids_BL), self.ids_BL.device
        if self.t is not None:
            return torch.full((batch,), self.t, dtype=torch.float64, device=device)
        shift, _ = uniforms(self.seed, torch.zeros(1, device=device), _TIMES, torch.zeros(1, device=device))
        return bound_time((torch.arange(batch, device=device, dtype=torch.float64) + shift[0, 0]) / batch)

    def input(self, attention: Attention, conditioning_B: Tensor | None = None, **held: Any) -> NetworkInput:
        """What the network reads where nothing is permuted."""
        zeros_B = torch.zeros(len(self.ids_BL), device=self.ids_BL.device)
        return NetworkInput(
            positions_BL=self.positions_BL, documents_BL=self.documents_BL, attention=attention,
            conditioning_B=zeros_B if conditioning_B is None else conditioning_B.float(), **held,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One noised copy.

    inputs     what the network reads.
    ids_BL     the true tokens, in the order of the logits; scored_BL: whose nats count.
    t_B        the time; None where there is none (Eso-LM's sequential phase).
    weight_B   of the cross-entropy in the bound.
    hidden     what the objective hides: masked positions [B, L] or digits [B, L, J], Duo's noisy ids [B, L].
    order_BL   Eso-LM: positions in the order of generation.
    """

    inputs: NetworkInput
    ids_BL: Tensor
    scored_BL: Tensor
    t_B: Tensor | None
    weight_B: Tensor
    hidden: Tensor
    order_BL: Tensor | None = None


def draw_masked(text: Text, mask_id: int) -> Draw:
    """MDLM: each scored token masked with probability t."""
    t_B = text.times()
    masked_BL = (text.uniforms(_POSITIONS)[0] < t_B[:, None]) & text.scored_BL
    inputs = text.input(Attention.FULL, ids_BL=torch.where(masked_BL, mask_id, text.ids_BL))
    return Draw(inputs=inputs, ids_BL=text.ids_BL, scored_BL=masked_BL, t_B=t_B, weight_B=1 / t_B, hidden=masked_BL)


def draw_esolm(text: Text, mask_id: int, alpha_0: float, *, natural: bool = False) -> list[Draw]:
    """Eso-LM's two terms, diffusion and sequential, of which alpha_0 = 1 and 0 leave one. What is given comes first in the order, from left to
    right, then clean tokens, shuffled or (`natural`) from left to right, then masks, and padding last."""
    draws = []
    moment_BL, _ = text.uniforms(_POSITIONS)
    clean_key_BL, mask_key_BL = text.uniforms(_ORDER)
    clean_key_BL = text.positions_BL / text.ids_BL.shape[1] if natural else clean_key_BL
    if alpha_0 > 0:
        schedule, t_B = PartialSchedule(alpha_0, 0.0), text.times()
        masked_BL = (moment_BL < schedule.one_minus_alpha(t_B)[:, None]) & text.scored_BL
        order_BL = _order(text, masked_BL, clean_key_BL, mask_key_BL)
        draws.append(_permuted(text, mask_id, masked_BL, order_BL, t_B, schedule.nelbo_weight(t_B)))
    if alpha_0 < 1:
        masked_BL = (moment_BL < 1 - alpha_0) & text.scored_BL
        order_BL = _order(text, masked_BL, clean_key_BL, text.positions_BL / text.ids_BL.shape[1])
        draws.append(_permuted(text, mask_id, masked_BL, order_BL, None, torch.ones(len(order_BL), device=order_BL.device).double()))
    return draws


def draw_uniform(text: Text, classes: int, schedule_eps: float) -> Draw:
    """Duo: each scored token drawn again from all ids with probability t."""
    t_B = text.times()
    where_BL, what_BL = text.uniforms(_POSITIONS)
    noisy_BL = torch.where((where_BL < t_B[:, None]) & text.scored_BL, random_ids(what_BL, classes), text.ids_BL)
    sigma_B = time_conditioning((1 - t_B).clamp(min=SMALLEST_ALPHA), schedule_eps)
    inputs = text.input(Attention.FULL, sigma_B, ids_BL=noisy_BL)
    return Draw(inputs=inputs, ids_BL=text.ids_BL, scored_BL=text.scored_BL, t_B=t_B, weight_B=torch.ones_like(t_B), hidden=noisy_BL)


def draw_digits(text: Text, code: DigitCode) -> Draw:
    """MDM-Prime-v2: each digit of a scored token masked with probability t."""
    t_B, digits_BLJ = text.times(), code.encode(text.ids_BL)
    steps = range(code.digits)
    number_BLJ = torch.stack([text.uniforms(_NORMALS + 1 + step)[0] for step in steps], dim=-1)
    masked_BLJ = (number_BLJ < t_B[:, None, None]) & text.scored_BL[..., None]
    inputs = text.input(Attention.FULL, digits_BLJ=torch.where(masked_BLJ, code.base, digits_BLJ))
    return Draw(inputs=inputs, ids_BL=text.ids_BL, scored_BL=masked_BLJ.any(-1), t_B=t_B, weight_B=1 / t_B, hidden=masked_BLJ)


def draw_normals(text: Text, width: int) -> Tensor:
    """[B, L, E], float64: RePlaid's noise; 0 where nothing is scored."""
    batch, length = text.ids_BL.shape
    device = text.ids_BL.device
    normals_BLE = normals(text.seed, torch.arange(batch, device=device), _NORMALS, torch.arange(length, device=device), width)
    return normals_BLE * text.scored_BL[..., None]


def _order(text: Text, masked_BL: Tensor, clean_key_BL: Tensor, mask_key_BL: Tensor) -> Tensor:
    """Positions in the order of generation: what is given, then clean tokens, then masks, then padding, each by its key in [0, 1)."""
    key_BL = torch.where(masked_BL, 1 + mask_key_BL, clean_key_BL)
    key_BL = torch.where(text.scored_BL, key_BL, text.positions_BL / text.ids_BL.shape[1] - 1)
    if text.documents_BL is not None:
        key_BL = torch.where(text.documents_BL < 0, 2 + clean_key_BL, key_BL)
    return key_BL.argsort(-1)


def _permuted(text: Text, mask_id: int, masked_BL: Tensor, order_BL: Tensor, t_B: Tensor | None, weight_B: Tensor) -> Draw:
    """One causal stream for diffusion (with a time), two for the sequential phase: the noisy one, then the clean one."""
    noisy_BL = torch.where(masked_BL, mask_id, text.ids_BL).gather(1, order_BL)
    ids_BL = text.ids_BL.gather(1, order_BL)
    documents_BL = None if text.documents_BL is None else text.documents_BL.gather(1, order_BL)
    two = t_B is None
    inputs = NetworkInput(
        ids_BL=torch.cat((noisy_BL, ids_BL), 1) if two else noisy_BL,
        positions_BL=torch.cat((order_BL, order_BL), 1) if two else order_BL,
        documents_BL=None if documents_BL is None else torch.cat((documents_BL, documents_BL), 1) if two else documents_BL,
        conditioning_B=torch.zeros(len(order_BL), device=order_BL.device),
        attention=Attention.TWO_STREAM if two else Attention.CAUSAL,
    )
    scored_BL = masked_BL.gather(1, order_BL)
    return Draw(inputs=inputs, ids_BL=ids_BL, scored_BL=scored_BL, t_B=t_B, weight_B=weight_B, hidden=masked_BL, order_BL=order_BL)
