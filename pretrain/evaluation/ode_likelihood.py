"""Likelihood of a Gaussian diffusion through its probability-flow ODE (Yang et al. 2026, Appendix F), beside the bound of RePlaid.

    -log p(x) ~ -log 1/K sum_k w_k,    log w = log p(x | z_0) + log p(z_0) - log q(z_0 | x),    z_0 ~ q(z_0 | x)
    dz/dgamma = v = ½ (alpha^2 z - alpha e_theta(z, gamma)),    log p(z_0) = log N(z_1; 0, I) + ∫ tr(dv/dz) dgamma from gamma_0 to gamma_1

The trace is Hutchinson's with Rademacher probes, the product with the Jacobian a central difference. With self-conditioning e_theta(z) is
e_theta(z, e_theta(z, 0)), and its derivative has a term through the estimate: the estimate is made again at each displaced state. Kept
from the undisplaced one it would drop that term, and the likelihood would come out far too good.

The label is `estimate`: a finite number of steps and differences displace log w by an unknown sign, and exp of a log w with a random trace
is on average larger than exp of its mean, so that neither the mean weight nor the result is known to lie on the bound's side. And it is the
likelihood of the ODE's model, which is the bound's only where the denoiser is exact: no order holds between the two.

Shape suffixes: B sequences, L positions (all of them text), E width of an embedding, K importance samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pretrain.hf_model.gaussian_diffusion import alpha, diffuse, sigma

if TYPE_CHECKING:
    from pretrain.objectives.base import Label

Denoiser = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(z_BLE, gamma_B, estimate_BLE or None) -> e_theta, [B, L, E]."""

Decoder = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(z_BLE at gamma_0, gamma_B, estimate_BLE or None) -> log p(x | z_0) of each sequence, [B]."""


@dataclass(frozen=True, kw_only=True)
class OdeSettings:
    """How well the ODE is solved.

    steps              of Heun's method, equal in gamma.
    probes             random vectors per trace.
    difference         displacement of the central difference.
    self_conditioning  whether the denoiser is given its own first estimate.
    """

    steps: int = 128
    probes: int = 1
    difference: float = 1e-3
    self_conditioning: bool = True


@dataclass(frozen=True, kw_only=True)
class OdeLikelihood:
    """nats_B: -log p of each sequence, float64."""

    nats_B: Tensor
    label: Label = "estimate"


@torch.no_grad()
def ode_likelihood(
    denoise: Denoiser, decode: Decoder, clean_BLE: Tensor, *, gamma_0: float, gamma_1: float, samples: int, generator: torch.Generator,
    settings: OdeSettings,
) -> OdeLikelihood:  # fmt: skip
    """-log of the mean of `samples` importance weights; on average it falls as their number grows. `clean_BLE` are the embeddings of x."""
    gamma_B = torch.full(clean_BLE.shape[:1], gamma_0, dtype=torch.float64, device=clean_BLE.device)
    weights = []
    for _ in range(samples):
        normals_BLE = torch.randn(clean_BLE.shape, generator=generator, dtype=clean_BLE.dtype, device=clean_BLE.device)
        z_BLE = diffuse(clean_BLE, normals_BLE, gamma_B)
        estimate_BLE = denoise(z_BLE, gamma_B, None) if settings.self_conditioning else None
        proposal_B = _normal_log_density(normals_BLE) - normals_BLE[0].numel() * sigma(gamma_B).log()
        density_B = log_density(denoise, z_BLE, gamma_0=gamma_0, gamma_1=gamma_1, generator=generator, settings=settings)
        weights.append(decode(z_BLE, gamma_B, estimate_BLE).double() + density_B - proposal_B)
    return OdeLikelihood(nats_B=math.log(samples) - torch.stack(weights).logsumexp(0))


@torch.no_grad()
def log_density(
    denoise: Denoiser, z_BLE: Tensor, *, gamma_0: float, gamma_1: float, generator: torch.Generator, settings: OdeSettings
) -> Tensor:
    """log p(z_0) of each sequence, float64 [B]."""
    h = (gamma_1 - gamma_0) / settings.steps
    trace_B = torch.zeros(len(z_BLE), dtype=torch.float64, device=z_BLE.device)
    for step in range(settings.steps):
        gamma = gamma_0 + step * h
        slope_BLE, first_B = _velocity_and_trace(denoise, z_BLE, gamma, generator, settings)
        end_BLE, last_B = _velocity_and_trace(denoise, z_BLE + h * slope_BLE, gamma + h, generator, settings)
        z_BLE = z_BLE + h / 2 * (slope_BLE + end_BLE)
        trace_B += h / 2 * (first_B + last_B)
    return _normal_log_density(z_BLE) + trace_B


def _velocity_and_trace(denoise: Denoiser, z_BLE: Tensor, gamma: float, generator: torch.Generator, settings: OdeSettings) -> tuple[Tensor, Tensor]:
    """v, and an unbiased estimate of tr(dv/dz) but for the difference's error: of its linear part, ½ alpha^2 per coordinate, exactly."""
    gamma_B = torch.full(z_BLE.shape[:1], gamma, dtype=torch.float64, device=z_BLE.device)

    def closed_loop(z: Tensor) -> Tensor:
        estimate = denoise(z, gamma_B, None) if settings.self_conditioning else None
        return denoise(z, gamma_B, estimate)

    scale = float(alpha(gamma_B[0]))
    trace_B = torch.zeros(len(z_BLE), dtype=torch.float64, device=z_BLE.device)
    for _ in range(settings.probes):
        coin_BLE = torch.randint(2, z_BLE.shape, generator=generator, device=z_BLE.device)
        probe_BLE = (2 * coin_BLE - 1).to(z_BLE.dtype)
        shift_BLE = settings.difference * probe_BLE
        change_BLE = (closed_loop(z_BLE + shift_BLE) - closed_loop(z_BLE - shift_BLE)) / (2 * settings.difference)
        trace_B += (change_BLE * probe_BLE).double().sum((1, 2)) / settings.probes
    velocity_BLE = 0.5 * (scale**2 * z_BLE - scale * closed_loop(z_BLE))
    return velocity_BLE, 0.5 * (scale**2 * z_BLE[0].numel() - scale * trace_B)


def _normal_log_density(z_BLE: Tensor) -> Tensor:
    """log N(z; 0, I) of each sequence, float64."""
    return -0.5 * (z_BLE.double().square() + math.log(2 * math.pi)).sum((1, 2))
