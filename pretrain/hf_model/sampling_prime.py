"""Sampling from masked diffusion over the digits of token ids (MDM-Prime-v2, Chao et al. 2026; section 2.4 of MDM-Prime, 2025).

A step from t to s reveals each masked digit with probability (alpha_s - alpha_t) / (1 - alpha_t). What it shows comes from one draw of the
whole token, x0 ~ p(. | y_t) over the ids that agree with the token's visible digits (carry-over), whose digits the revealed ones take.
Digits that are revealed together are so drawn jointly; digits once visible stay. Since every draw agrees with all digits shown before, there is
always an id left that does, and every finished string of digits is an id, also where base ** digits exceeds the vocabulary. (The released code
has no carry-over here, mixes digits of different draws, and can end outside the vocabulary.) Ancestral steps sample the data as their number
grows, if p is exact.

`joint_above` reveals a token's digits together, as `joint_mask_above` masks them while training (appendix A.4.2): masked diffusion over tokens.

The ids to fill are marked BLANK, which `DigitCode.decode` also says of masked digits: the vocabulary has no mask id. Time is no input, so a
step that reveals nothing in a sequence does not evaluate it.

Shape suffixes: B sequences, L positions, J digits of a token, R sequences evaluated, N positions drawn, D features, V vocabulary.
"""

import torch
from torch import Tensor

from .diffusion_math import reveal_probability
from .digits import DigitCode
from .network_input import Attention, NetworkInput
from .sampling_draw import inverse_cdf, rows_at_once
from .sampling_network import BLANK, Denoiser, Request, after_end
from .sampling_noise import uniforms


@torch.no_grad()
def sample_prime(
    network: Denoiser, ids_BL: Tensor, steps: int, request: Request, *, code: DigitCode, joint_above: float | None = None
) -> tuple[Tensor, Tensor]:
    """Fill every BLANK of ids_BL on the grid t = 1, 1 - 1/steps, ..., 0; the last step reveals whatever is left.

    code         the digits that the network was trained with.
    joint_above  steps that begin above this t reveal all of a token's digits at once; 0: every step; None: each digit on its own.

    Temperature, top-k and nucleus shape p over the ids that agree. Returns ids [B, L] and the network evaluations of each sequence [B]: at
    most one per step. Raises ValueError for too few steps.
    """
    if steps < 1:
        raise ValueError(f"needs at least 1 step, got {steps}")
    digits_BLJ, evaluations_B = _canvas(ids_BL, code)
    for step in range(steps):
        t, s = (torch.tensor(1 - i / steps, dtype=torch.float64, device=ids_BL.device) for i in (step, step + 1))
        where_BLJ, what_BL = _uniforms(digits_BLJ, request, step)
        if joint_above is not None and t > joint_above:
            where_BLJ = where_BLJ[..., :1].expand_as(where_BLJ)
        reveal_BLJ = (digits_BLJ == code.base) & (where_BLJ < reveal_probability(t, s))
        evaluations_B += _reveal(network, digits_BLJ, reveal_BLJ, what_BL, request, code)
        _show(ids_BL, digits_BLJ, request, code)
    return _finished(ids_BL, digits_BLJ, evaluations_B, request, code)


@torch.no_grad()
def sample_prime_left_to_right(network: Denoiser, ids_BL: Tensor, request: Request, *, code: DigitCode) -> tuple[Tensor, Tensor]:
    """Fill the blanks of ids_BL from left to right, a whole token in each evaluation of the whole sequence, until the request's `end`. Results as
    in `sample_prime`.

    All digits of a token come from one draw of the id, so they are drawn jointly and no digit of a token is ever masked beside a visible one.
    What the network says of a token depends on how many are masked after it: sample at the length that is meant.
    """
    digits_BLJ, evaluations_B = _canvas(ids_BL, code)
    _, uniform_BL = _uniforms(digits_BLJ, request, 0)
    while (masked_BLJ := digits_BLJ == code.base).any():
        blank_BL = masked_BLJ.any(-1)
        next_BL = blank_BL & (blank_BL.cumsum(-1) == 1)
        evaluations_B += _reveal(network, digits_BLJ, masked_BLJ & next_BL[..., None], uniform_BL, request, code)
        if request.end is not None:
            over_BL = after_end(code.decode(digits_BLJ), ids_BL == BLANK, request.end) & blank_BL & ~next_BL
            digits_BLJ[over_BL] = code.encode(torch.tensor([request.end], device=ids_BL.device))
            request.progress(int(over_BL.sum()))
        _show(ids_BL, digits_BLJ, request, code)
    return _finished(ids_BL, digits_BLJ, evaluations_B, request, code)


def _canvas(ids_BL: Tensor, code: DigitCode) -> tuple[Tensor, Tensor]:
    """The digits of ids_BL, all masked where it is BLANK, and no evaluations yet."""
    blank_BL1 = (ids_BL == BLANK).unsqueeze(-1)
    digits_BLJ = torch.where(blank_BL1, code.base, code.encode(ids_BL.clamp(min=0)))
    return digits_BLJ, torch.zeros(len(ids_BL), dtype=torch.long, device=ids_BL.device)


def _show(ids_BL: Tensor, digits_BLJ: Tensor, request: Request, code: DigitCode) -> None:
    if request.watch is not None:
        shown_BL = torch.where(ids_BL == BLANK, code.decode(digits_BLJ), ids_BL)
        request.show(shown_BL, digits_BLJ.masked_fill(digits_BLJ == code.base, BLANK))


def _finished(ids_BL: Tensor, digits_BLJ: Tensor, evaluations_B: Tensor, request: Request, code: DigitCode) -> tuple[Tensor, Tensor]:
    filled_BL = torch.where(ids_BL == BLANK, code.decode(digits_BLJ), ids_BL)
    request.check(filled_BL)
    return filled_BL, evaluations_B


def _uniforms(digits_BLJ: Tensor, request: Request, step: int) -> tuple[Tensor, Tensor]:
    """A number for each digit's reveal [B, L, J] and one for each token's draw [B, L]; digits are counted through the positions."""
    length, digits = digits_BLJ.shape[1:]
    places = torch.arange(length * digits, device=digits_BLJ.device)
    where, what = uniforms(request.seed, request.sequences_B.to(digits_BLJ.device), step, places)
    return where.reshape(digits_BLJ.shape), what.reshape(digits_BLJ.shape)[..., 0]


def _reveal(network: Denoiser, digits_BLJ: Tensor, reveal_BLJ: Tensor, uniform_BL: Tensor, request: Request, code: DigitCode) -> Tensor:
    """Show the digits of reveal_BLJ, in place, and report the tokens that this completes; which sequences were evaluated [B]."""
    drawn_BL = reveal_BLJ.any(-1)
    active_B = drawn_BL.any(-1)
    if active_B.any():
        features_ND = _read(network, digits_BLJ[active_B])[drawn_BL[active_B]]
        tokens_N = _draw(network, features_ND, digits_BLJ[drawn_BL], uniform_BL[drawn_BL], request, code)
        digits_BLJ[drawn_BL] = torch.where(reveal_BLJ[drawn_BL], code.encode(tokens_N), digits_BLJ[drawn_BL])
        request.progress(int((digits_BLJ[drawn_BL] != code.base).all(-1).sum()))
    return active_B


def _read(network: Denoiser, digits_RLJ: Tensor) -> Tensor:
    """Features [R, L, D] of whole sequences under full attention, at conditioning 0."""
    rows, length, _ = digits_RLJ.shape
    inputs = NetworkInput(
        digits_BLJ=digits_RLJ,
        positions_BL=torch.arange(length, device=digits_RLJ.device).expand(rows, length),
        conditioning_B=torch.zeros(rows, device=digits_RLJ.device),
        attention=Attention.FULL,
    )
    return network.features(inputs)


def _draw(network: Denoiser, features_ND: Tensor, digits_NJ: Tensor, uniform_N: Tensor, request: Request, code: DigitCode) -> Tensor:
    """[N] ids that agree with the visible digits; logits exist for a bounded number of positions at a time."""
    rows, tokens = rows_at_once(request.vocab_size), []
    for x_ND, y_NJ, u_N in zip(features_ND.split(rows), digits_NJ.split(rows), uniform_N.split(rows), strict=True):
        logits_NV = network.logits(x_ND).masked_fill(~code.possible(y_NJ), -torch.inf)
        tokens.append(inverse_cdf(request.law.probabilities(logits_NV), u_N))
    return torch.cat(tokens)
