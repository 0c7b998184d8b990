"""The mathematics of uniform-state diffusion that Duo's objective and its samplers share. Torch only.

A token is kept with probability alpha_t, or else drawn again from all K ids, itself included: q(z_t | x) = alpha_t [z_t = x] + (1 - alpha_t) / K.

Shape suffixes: N any leading axes, K every id of the model's vocabulary (the mask id, if there is one, with probability 0; no padding).
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

Real = TypeVar("Real", float, Tensor)

SMALLEST_ALPHA = 2.0**-53
"""Stands for alpha = 0: the alpha of the last t below 1 in float64, where no formula divides by zero."""


@dataclass(frozen=True)
class NoiseLevel:
    """One time of the process: alpha, 1 - alpha with a relative precision of its own, and d alpha / dt."""

    alpha: float
    one_minus_alpha: float
    alpha_derivative: float


def time_conditioning(alpha: Real, schedule_eps: float) -> Real:
    """sigma = -log alpha_t, what the network is told of the time; held at -log e, the largest that training with alpha_1 = e shows it.

    So it is finite at alpha = 0 as well. A likelihood bound stays one: it holds for a denoiser that reads any function of t.
    """
    floor = max(schedule_eps, SMALLEST_ALPHA)
    return -alpha.clamp(min=floor).log() if isinstance(alpha, Tensor) else -math.log(max(alpha, floor))


def uniform_posterior(p_NK: Tensor, z_N: Tensor, alpha_t: Tensor | float, alpha_s: Tensor | float) -> Tensor:
    """[N, K], float64: the reverse step q(z_s | z_t, x) for s < t with the denoiser's probabilities in the place of x.

    (K alpha_t [z] p + (alpha_t|s - alpha_t) [z] + (alpha_s - alpha_t) p + (1 - alpha_t|s)(1 - alpha_s) / K) / (K alpha_t p_z + 1 - alpha_t),
    [z] = one-hot of z_t, alpha_t|s = alpha_t / alpha_s (Sahoo et al. 2026, section 2.2.2). alpha_s = 1 gives the law of z_0 given z_t: p
    weighed by what z_t says. The alphas are numbers, or tensors that broadcast against N; alpha_t <= alpha_s, 0 < alpha_s.
    """
    p_NK = p_NK.double()
    classes = p_NK.shape[-1]
    alpha_t, alpha_s = (torch.as_tensor(alpha, dtype=torch.float64, device=p_NK.device).unsqueeze(-1) for alpha in (alpha_t, alpha_s))
    kept = alpha_t / alpha_s
    z_NK = one_hot(z_N, classes).double()
    seen_NK = z_NK * (classes * alpha_t * p_NK + alpha_t * (1 - alpha_s) / alpha_s)
    unseen_NK = (alpha_s - alpha_t) * p_NK + (1 - kept) * (1 - alpha_s) / classes
    return (seen_NK + unseen_NK) / (classes * alpha_t * p_NK.gather(-1, z_N.unsqueeze(-1)) + 1 - alpha_t)
