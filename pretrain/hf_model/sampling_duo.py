"""Sampling from uniform-state diffusion (Duo, Sahoo et al. 2025): ancestral and psi steps (sampling_psi.py), and from left to right.

The process is the one whose likelihood evaluation bounds: pure noise over all K ids at t = 1, clean at t = 0 (e = 0), and a network that is
told sigma = -log alpha_t, held at the largest that training showed it (`time_conditioning`). Temperature, top-k and nucleus shape the
network's p, normalised, before it enters the reverse step.

The mask id marks the positions to fill. Prompts stand clean beside the noise from the first step on. During the process the mask is an id like
any other (K counts it), but p never predicts it and the last step leaves none.

Time conditioning changes the network's output at every step, so predictions cannot be kept from one to the next. What is saved instead: a
position whose uniform number keeps it for whatever p might be needs no logits, and a sequence of such positions no evaluation.

Shape suffixes: B sequences, L positions, R sequences that are evaluated in this step, N positions that the network decides, D features.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from .sampling_draw import rows_at_once
from .sampling_network import Denoiser, Request, after_end, blanks, draw_tokens, read_canvas
from .sampling_noise import uniforms
from .sampling_psi import ANCESTRAL, Psi, ReverseStep, random_ids
from .uniform_diffusion import time_conditioning

NoiseRemoval = Literal["ancestral", "greedy"]
CleanShare = Literal["all", "filled"]

TAIL_TIME = 1e-5
"""Where the steps end for greedy noise removal."""


@torch.no_grad()
def sample_duo(
    network: Denoiser,
    ids_BL: Tensor,
    steps: int,
    request: Request,
    *,
    psi: Psi = ANCESTRAL,
    noise_removal: NoiseRemoval = "ancestral",
    schedule_eps: float = 1e-3,
) -> tuple[Tensor, Tensor]:
    """Fill every mask of ids_BL by `steps` reverse steps from t = 1 to t = 0.

    psi            which steps; ancestral by default.
    noise_removal  ancestral: the last step draws the clean text. greedy: the steps end at t = 1e-5, and one more evaluation takes the most
                   likely token of p at every position filled, as the authors do. p is the posterior given the *other* positions: the better
                   the network, the more of z this step forgets.
    schedule_eps   e of the schedule that the network was trained with.

    Returns ids [B, L] and the network evaluations of each sequence [B]: at most one per step, and one for greedy noise removal. Raises
    ValueError for too few steps.
    """
    greedy, blank_BL = noise_removal == "greedy", blanks(ids_BL, request.law)
    way = psi.steps(steps, TAIL_TIME if greedy else 0.0)
    ids_BL = _fill_with_noise(ids_BL, blank_BL, request, 0)
    evaluations_B = torch.zeros(len(ids_BL), dtype=torch.long, device=ids_BL.device)
    total, shown = int(blank_BL.sum()), 0
    for number, step in enumerate(way, start=1):
        choice_BL, value_BL = _uniforms(ids_BL, request, number)
        open_BL = blank_BL & (choice_BL >= step.surely_kept)
        evaluations_B += _move(network, ids_BL, open_BL, choice_BL, value_BL, step, request, schedule_eps)
        # No token is final before the end: what is shown is the share of the steps.
        done = total * number // (len(way) + greedy)
        request.progress(done - shown)
        request.show(ids_BL)
        shown = done
    if greedy:
        most_likely = replace(request, law=replace(request.law, temperature=0.0))
        alpha_B = torch.full((len(ids_BL),), 1 - TAIL_TIME, dtype=torch.float64)
        evaluations_B += _draw_from_p(network, ids_BL, blank_BL, alpha_B, 0, most_likely, schedule_eps)
        request.progress(total - shown)
        request.show(ids_BL)
    request.check(ids_BL)
    return ids_BL, evaluations_B


@torch.no_grad()
def sample_duo_left_to_right(
    network: Denoiser, ids_BL: Tensor, request: Request, *, clean_share: CleanShare = "all", schedule_eps: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """Fill the masks of ids_BL one at a time, from left to right, each in one evaluation of the whole sequence, until the request's `end`.

    What is not yet filled holds noise, drawn afresh for every evaluation, and alpha is the share of positions that are clean. A position of
    pure noise says nothing about its token, so the token is drawn from p there, and not from the posterior that would weigh p by it. (Sahoo et
    al. 2026 decode from left to right without saying how; noise after the prefix and this alpha are as in the evaluation code of Duo's authors.)

    clean_share  positions that alpha is the share of. all: as pretraining noises every position. filled: those to fill, as fine-tuning never
                 noises a prompt, so that its network expects alpha = 0 where nothing but the prompt is clean.

    p knows alpha and not which positions are clean: an exact p weighs a clean prefix x_i as K alpha / (1 - alpha) + 1 to 1 against noise. So the
    law is the data's up to terms of order (1 - alpha) / (K alpha), which vanish for the K of real vocabularies, and not exactly.

    Results as in `sample_duo`.
    """
    first_BL = blank_BL = blanks(ids_BL, request.law)
    ids_BL = ids_BL.clone()
    counted_B = blank_BL.sum(-1) if clean_share == "filled" else torch.full((len(ids_BL),), ids_BL.shape[1], device=ids_BL.device)
    evaluations_B = torch.zeros(len(ids_BL), dtype=torch.long, device=ids_BL.device)
    for turn in range(int(blank_BL.sum(-1).max())):
        noisy_BL = _fill_with_noise(ids_BL, blank_BL, request, turn)
        next_BL = blank_BL & (blank_BL.cumsum(-1) == 1)
        alpha_B = 1 - blank_BL.sum(-1).double() / counted_B.clamp(min=1)
        evaluations_B += _draw_from_p(network, noisy_BL, next_BL, alpha_B, turn, request, schedule_eps)
        ids_BL = torch.where(next_BL, noisy_BL, ids_BL)
        over_BL = after_end(ids_BL, first_BL, request.end) & blank_BL & ~next_BL
        ids_BL = ids_BL if request.end is None else ids_BL.masked_fill(over_BL, request.end)
        blank_BL = blank_BL & ~next_BL & ~over_BL
        request.progress(int((next_BL | over_BL).sum()))
        request.show(torch.where(blank_BL, noisy_BL, ids_BL))
        if not blank_BL.any():
            break
    request.check(ids_BL)
    return ids_BL, evaluations_B


def _uniforms(ids_BL: Tensor, request: Request, step: int) -> tuple[Tensor, Tensor]:
    return uniforms(request.seed, request.sequences_B.to(ids_BL.device), step, torch.arange(ids_BL.shape[1], device=ids_BL.device))


def _fill_with_noise(ids_BL: Tensor, blank_BL: Tensor, request: Request, step: int) -> Tensor:
    """A copy of ids_BL with one of all ids, the mask included, at every blank: step's first uniform numbers."""
    return torch.where(blank_BL, random_ids(_uniforms(ids_BL, request, step)[0], request.vocab_size), ids_BL)


def _move(
    network: Denoiser, ids_BL: Tensor, open_BL: Tensor, choice_BL: Tensor, value_BL: Tensor, step: ReverseStep, request: Request, schedule_eps: float
) -> Tensor:
    """Take the step at the positions of open_BL, in place; which sequences were evaluated [B]. Logits exist for a bounded number of positions."""
    active_B = open_BL.any(-1)
    if active_B.any():
        sigma_R = torch.full((int(active_B.sum()),), time_conditioning(step.alpha_t, schedule_eps), device=ids_BL.device)
        features_ND = read_canvas(network, ids_BL[active_B], sigma_R)[open_BL[active_B]]
        rows = rows_at_once(request.vocab_size)
        slices = zip(*(x.split(rows) for x in (features_ND, ids_BL[open_BL], choice_BL[open_BL], value_BL[open_BL])), strict=True)
        ids_BL[open_BL] = torch.cat([step.draw(request.law.probabilities(network.logits(x_ND)), z_N, u_N, v_N) for x_ND, z_N, u_N, v_N in slices])
    return active_B


def _draw_from_p(network: Denoiser, ids_BL: Tensor, where_BL: Tensor, alpha_B: Tensor, step: int, request: Request, schedule_eps: float) -> Tensor:
    """Draw the positions of where_BL from p itself, in place, with step's second uniform numbers; which sequences were evaluated [B]."""
    active_B = where_BL.any(-1)
    if active_B.any():
        sigma_R = time_conditioning(alpha_B.to(ids_BL.device)[active_B], schedule_eps)
        features_ND = read_canvas(network, ids_BL[active_B], sigma_R)[where_BL[active_B]]
        ids_BL[where_BL] = draw_tokens(network, features_ND, _uniforms(ids_BL, request, step)[1][where_BL], request)
    return active_B
