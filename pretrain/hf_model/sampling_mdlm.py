"""Sampling from masked diffusion (Sahoo et al. 2024): ancestral steps, and the first-hitting sampler (Zheng et al. 2024).

The network does not see time, so a step that reveals nothing leaves its output as it was. Both samplers decide *where* to reveal before
they ask *what*, and evaluate only the sequences that reveal something: the cache of unchanged predictions, without its memory. A position,
once revealed, is carried over. Orders that the network chooses, and from left to right: sampling_orders.py. Steps that mask
again: sampling_remask.py.

Shape suffixes: B sequences, L positions, N revealed positions.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from .diffusion_math import reveal_probability
from .sampling_network import Denoiser, Request, blanks, draw_tokens, read_canvas
from .sampling_noise import uniforms

NoiseRemoval = Literal["ancestral", "greedy"]


@torch.no_grad()
def sample_mdlm(
    network: Denoiser, ids_BL: Tensor, steps: int, request: Request, *, noise_removal: NoiseRemoval = "ancestral"
) -> tuple[Tensor, Tensor]:
    """Fill every mask of ids_BL on the grid t = 1, 1 - 1/steps, ..., 0; the last step reveals whatever is left.

    noise_removal: how the last step does so. ancestral: by drawing, as every other step. greedy: by the most likely token. Either way a
    position that is not a mask stays as it is (the authors' greedy step overwrites all of them).

    Returns ids [B, L] and the network evaluations that each sequence took [B]: at most one per step and one per mask.
    """
    ids_BL, evaluations_B = ids_BL.clone(), torch.zeros(len(ids_BL), dtype=torch.long, device=ids_BL.device)
    positions_L, sequences_B = torch.arange(ids_BL.shape[1], device=ids_BL.device), request.sequences_B.to(ids_BL.device)
    for step in range(steps):
        t, s = (torch.tensor(1 - i / steps, dtype=torch.float64, device=ids_BL.device) for i in (step, step + 1))
        where_BL, what_BL = uniforms(request.seed, sequences_B, step, positions_L)
        reveal_BL = blanks(ids_BL, request.law) & (where_BL < reveal_probability(t, s))
        greedy = noise_removal == "greedy" and step == steps - 1
        asked = replace(request, law=replace(request.law, temperature=0.0)) if greedy else request
        evaluations_B += reveal(network, ids_BL, reveal_BL, what_BL, asked)
        request.progress(int(reveal_BL.sum()))
        request.show(ids_BL)
    request.check(ids_BL)
    return ids_BL, evaluations_B


@torch.no_grad()
def sample_first_hitting(network: Denoiser, ids_BL: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """The law of `sample_mdlm` with infinitely many steps, in one evaluation per mask.

    Masked positions are exchangeable under the reverse process: each reveal falls on one of them uniformly, and without time conditioning
    the moment does not matter. Results as in `sample_mdlm`.
    """
    ids_BL, evaluations_B = ids_BL.clone(), torch.zeros(len(ids_BL), dtype=torch.long, device=ids_BL.device)
    positions_L, sequences_B = torch.arange(ids_BL.shape[1], device=ids_BL.device), request.sequences_B.to(ids_BL.device)
    masked_BL = blanks(ids_BL, request.law)
    key_BL, what_BL = uniforms(request.seed, sequences_B, 0, positions_L)
    rank_BL = key_BL.masked_fill(~masked_BL, torch.inf).argsort(dim=-1).argsort(dim=-1)
    for turn in range(int(masked_BL.sum(-1).max())):
        reveal_BL = masked_BL & (rank_BL == turn)
        evaluations_B += reveal(network, ids_BL, reveal_BL, what_BL, request)
        request.progress(int(reveal_BL.sum()))
        request.show(ids_BL)
    request.check(ids_BL)
    return ids_BL, evaluations_B


def reveal(network: Denoiser, ids_BL: Tensor, reveal_BL: Tensor, uniform_BL: Tensor, request: Request) -> Tensor:
    """Draw the positions of reveal_BL, in place and independently given the sequence as it is; which sequences were evaluated [B]."""
    active_B = reveal_BL.any(-1)
    if active_B.any():
        features_ND = read_canvas(network, ids_BL[active_B])[reveal_BL[active_B]]
        ids_BL[reveal_BL] = draw_tokens(network, features_ND, uniform_BL[reveal_BL], request)
    return active_B
