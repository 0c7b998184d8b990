"""Reverse steps of Gaussian diffusion from a noisy latent to a clean one: ancestral (DDPM), and three solvers of the probability-flow ODE.

All take e_hat, the denoiser's estimate of the clean embedding, and levels gamma, the log noise-to-signal ratio (gaussian_diffusion.py; the
forms are those of Yang et al. 2026, Appendix E). For a step from t to s, with e the estimate at t:

    ddpm    z_s ~ q(z_s | z_t, e)                                                                 (Ho et al. 2020)
    ddim    z_s = alpha_s e + sigma_s eps,  eps = (z_t - alpha_t e) / sigma_t                      (Song et al. 2021), of order 1
    dpm++   the same with e extrapolated from the last two estimates in -gamma/2                   (Lu et al. 2022, 2M), of order 2
    heun    the trapezoid rule on d(z/alpha) / d(sigma/alpha) = eps                                (Karras et al. 2022), of order 2, two estimates

Everything is float64: between neighbouring levels the coefficients are differences of almost equal numbers.

Any shape of latents goes with a scalar gamma.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from .gaussian_diffusion import alpha, sigma

Solver = Literal["ddpm", "ddim", "dpm++", "heun"]

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(z, gamma) -> e_hat, in the shape of z."""

_ESTIMATES: dict[Solver, int] = {"ddpm": 1, "ddim": 1, "dpm++": 1, "heun": 2}


def estimates_per_step(solver: Solver) -> int:
    """How often a step asks the denoiser. Raises ValueError for a solver that does not exist."""
    if solver not in _ESTIMATES:
        raise ValueError(f"the solvers of Gaussian diffusion are {', '.join(_ESTIMATES)}, not {solver}")
    return _ESTIMATES[solver]


def reverse_steps(denoise: Denoise, z: Tensor, gammas: Tensor, solver: Solver, normals: Callable[[int], Tensor]) -> Iterator[Tensor]:
    """The latents after each step along falling `gammas`, beginning with z at the first of them.

    normals(i), standard normal numbers in the shape of z, is asked for step i = 1, 2, … of ddpm alone.
    """
    before: tuple[Tensor, Tensor] | None = None
    for number in range(1, len(gammas)):
        gamma_t, gamma_s = gammas[number - 1], gammas[number]
        clean = denoise(z, gamma_t)
        if solver == "ddpm":
            z = ddpm_step(z, clean, gamma_t, gamma_s, normals(number))
        elif solver == "heun":
            z = heun_step(z, clean, gamma_t, gamma_s, denoise)
        else:
            z = ddim_step(z, clean if solver == "ddim" else extrapolated(clean, gamma_t, gamma_s, before), gamma_t, gamma_s)
        before = (clean, gamma_t)
        yield z


def ddpm_step(z: Tensor, clean: Tensor, gamma_t: Tensor, gamma_s: Tensor, normals: Tensor) -> Tensor:
    """A draw from q(z_s | z_t, clean). c = 1 - SNR_t / SNR_s is the share of z_t that the step replaces."""
    c = -torch.expm1(gamma_s - gamma_t)
    mean = (1 - c) * (alpha(gamma_s) / alpha(gamma_t)) * z + c * alpha(gamma_s) * clean
    return mean + c.sqrt() * sigma(gamma_s) * normals


def ddim_step(z: Tensor, clean: Tensor, gamma_t: Tensor, gamma_s: Tensor) -> Tensor:
    """The same noise around the same clean latent, at another level. Written as (sigma_s / sigma_t) z - alpha_s (e^-h - 1) clean it is Lu's."""
    h = (gamma_t - gamma_s) / 2
    return (sigma(gamma_s) / sigma(gamma_t)) * z - alpha(gamma_s) * torch.expm1(-h) * clean


def extrapolated(clean: Tensor, gamma_t: Tensor, gamma_s: Tensor, before: tuple[Tensor, Tensor] | None) -> Tensor:
    """The clean latent in the middle of the step from t to s, on the line through this estimate and the one `before`, given with its gamma.

    The first step has none before it, and takes the estimate as it is.
    """
    if before is None:
        return clean
    clean_before, gamma_before = before
    return clean + (gamma_t - gamma_s) / (gamma_before - gamma_t) / 2 * (clean - clean_before)


def heun_step(z: Tensor, clean: Tensor, gamma_t: Tensor, gamma_s: Tensor, denoise: Denoise) -> Tensor:
    """A step of ddim, an estimate at its end, and the step again with the mean of both slopes."""
    noise_t, noise_s = (gamma_t / 2).exp(), (gamma_s / 2).exp()
    start = z / alpha(gamma_t)
    first = (start - clean) / noise_t
    end = start + (noise_s - noise_t) * first
    last = (end - denoise(alpha(gamma_s) * end, gamma_s)) / noise_s
    return alpha(gamma_s) * (start + (noise_s - noise_t) * (first + last) / 2)


def sharpened(z: Tensor, clean: Tensor, gamma: Tensor, temperature: float) -> Tensor:
    """The clean latent that belongs to the predicted noise divided by `temperature`: (z - sigma eps / temperature) / alpha (Plaid).

    That is the score divided by it: below 1 the density that the steps follow becomes more peaked. A step moves z / alpha by a share k / temperature
    of the way to e_hat, with k = 1 - exp(gamma_s - gamma_t) for ddpm and 1 - exp((gamma_s - gamma_t) / 2) for ddim: from 2 on it overshoots by
    more than it mends, and latents grow from step to step.
    """
    if temperature == 1:
        return clean
    return (z * (temperature - 1) / alpha(gamma) + clean) / temperature
