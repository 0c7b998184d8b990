"""Sampling from masked diffusion with steps that also correct: the psi family on masks (ReMDM, Wang et al. 2025).

A step from t to s draws z_s at every position, independently given the network's p for the masked ones, from

    kappa q(z_s | z_t, p)  +  (1 - kappa) q_s(z_s | x0),    x0 = z_t where a token stands, p where the mask does,

as in sampling_psi.py, whose schedules of times and kappa these are. Written out: a token is masked again with probability
sigma = (1 - kappa) s, and a mask is revealed with probability (t - s + sigma (1 - t)) / t: ReMDM's step. kappa = 1 is ancestral sampling. At
s = 0 nothing is masked again and every mask is revealed, whatever kappa is.

A mistake that ancestral steps would carry over can so be mended. Given tokens never move. The network does not see time, and is asked only
about sequences that reveal something.

Shape suffixes: B sequences, L positions.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .sampling_mdlm import NoiseRemoval, reveal
from .sampling_network import Denoiser, Request, blanks
from .sampling_noise import uniforms
from .sampling_psi import Psi, ReverseStep


def remasking_probability(step: ReverseStep) -> float:
    """That a token is masked again: ReMDM's sigma."""
    return (1 - step.kappa) * step.s


def revealing_probability(step: ReverseStep) -> float:
    """That a mask becomes a token."""
    return (step.t - step.s + remasking_probability(step) * (1 - step.t)) / step.t


@torch.no_grad()
def sample_mdlm_psi(
    network: Denoiser, ids_BL: Tensor, steps: int, request: Request, *, psi: Psi, noise_removal: NoiseRemoval = "ancestral"
) -> tuple[Tensor, Tensor]:
    """Fill every mask of ids_BL by `steps` steps of the family member `psi`.

    noise_removal: as in `sample_mdlm`, of the masks that the last step finds.

    Returns ids [B, L] and the network evaluations of each sequence [B]: at most one per step. Raises ValueError for too few steps.
    """
    free_BL, way = blanks(ids_BL, request.law), psi.steps(steps)
    ids_BL, evaluations_B = ids_BL.clone(), torch.zeros(len(ids_BL), dtype=torch.long, device=ids_BL.device)
    positions_L, sequences_B = torch.arange(ids_BL.shape[1], device=ids_BL.device), request.sequences_B.to(ids_BL.device)
    total, shown, mask_id = int(free_BL.sum()), 0, request.law.mask_id
    assert mask_id is not None, "blanks has looked"
    for number, step in enumerate(way):
        where_BL, what_BL = uniforms(request.seed, sequences_B, number, positions_L)
        masked_BL = blanks(ids_BL, request.law)
        again_BL = free_BL & ~masked_BL & (where_BL < remasking_probability(step))
        reveal_BL = masked_BL & ((where_BL < revealing_probability(step)) | (step.s == 0))
        greedy = noise_removal == "greedy" and number == len(way) - 1
        asked = replace(request, law=replace(request.law, temperature=0.0)) if greedy else request
        evaluations_B += reveal(network, ids_BL, reveal_BL, what_BL, asked)
        ids_BL.masked_fill_(again_BL, mask_id)  # after the network has read the tokens that the step began with
        # No token is final before the end: what is shown is the share of the steps.
        done = total * (number + 1) // len(way)
        request.progress(done - shown)
        request.show(ids_BL)
        shown = done
    request.check(ids_BL)
    return ids_BL, evaluations_B
