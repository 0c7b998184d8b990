"""The ODE likelihood where everything is Gaussian and known: data e ~ N(0, C), linear denoiser, linear self-conditioning.

With the exact denoiser the ODE carries N(0, alpha^2 C + sigma^2 I) at gamma_0 to gamma_1. Decoding with a density p(e | z_0) in place of token
probabilities makes log p(e) known too. Shape suffixes: B sequences, L positions, E width, D = L E.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pretrain.evaluation.ode_likelihood import Denoiser, OdeSettings, log_density, ode_likelihood

L, E, D = 3, 2, 6
GAMMA_0, GAMMA_1 = -4.0, 14.0
FEEDBACK = 0.6


def covariance(kind: str) -> Tensor:
    """Of the data. Diagonal: Rademacher probes give the trace exactly."""
    generator = torch.Generator().manual_seed(4)
    if kind == "diagonal":
        return torch.diag(torch.rand(D, dtype=torch.float64, generator=generator) + 0.3)
    half = torch.randn(D, D, dtype=torch.float64, generator=generator) / 2
    return half @ half.T + 0.2 * torch.eye(D, dtype=torch.float64)


def scales(gamma: float) -> tuple[float, float]:
    """alpha^2 and sigma^2."""
    return 1 / (1 + math.exp(gamma)), 1 / (1 + math.exp(-gamma))


def posterior_matrix(c_DD: Tensor, gamma: float) -> Tensor:
    """E[e | z] = this z."""
    a2, s2 = scales(gamma)
    return math.sqrt(a2) * c_DD @ torch.linalg.inv(a2 * c_DD + s2 * torch.eye(D, dtype=torch.float64))


def denoiser(c_DD: Tensor, *, feedback: float) -> Denoiser:
    """A z + feedback * estimate; the first pass gives A z, so that both together are (1 + feedback) A z = E[e | z]."""

    def denoise(z_BLE: Tensor, gamma_B: Tensor, estimate_BLE: Tensor | None) -> Tensor:
        matrix = posterior_matrix(c_DD, gamma_B[0].item()) / (1 + feedback)
        open_loop = (z_BLE.flatten(1) @ matrix.T).view_as(z_BLE)
        return open_loop if estimate_BLE is None else open_loop + feedback * estimate_BLE

    return denoise


def random_states(count: int, c_DD: Tensor) -> Tensor:
    return MultivariateNormal(torch.zeros(D, dtype=torch.float64), c_DD).sample((count,)).view(count, L, E)


def true_density(z_BLE: Tensor, c_DD: Tensor) -> Tensor:
    a2, s2 = scales(GAMMA_0)
    return MultivariateNormal(torch.zeros(D, dtype=torch.float64), a2 * c_DD + s2 * torch.eye(D, dtype=torch.float64)).log_prob(z_BLE.flatten(1))


def density(z_BLE: Tensor, c_DD: Tensor, *, feedback: float = FEEDBACK, **settings: float) -> Tensor:
    chosen = OdeSettings(**({"steps": 128, "self_conditioning": feedback > 0} | settings))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    return log_density(denoiser(c_DD, feedback=feedback), z_BLE, gamma_0=GAMMA_0, gamma_1=GAMMA_1, generator=generator, settings=chosen)


@pytest.mark.parametrize("feedback", [0.0, FEEDBACK])
def test_density_of_the_latents(feedback: float) -> None:
    """Within Heun's error of the exact Gaussian, with the derivative through the estimate; halving the step quarters the error."""
    torch.manual_seed(0)
    c_DD = covariance("diagonal")
    z_BLE = random_states(4, c_DD)
    error = [(density(z_BLE, c_DD, feedback=feedback, steps=steps) - true_density(z_BLE, c_DD)).abs().max().item() for steps in (32, 64, 128)]
    assert error[2] < 1e-4 and 3 < error[0] / error[1] < 5 and 3 < error[1] / error[2] < 5


def test_dropping_the_term_through_the_estimate_is_visibly_wrong() -> None:
    """Its part of the trace, by quadrature: had the product kept the estimate, its density would be off by that, nats away from the truth."""
    torch.manual_seed(0)
    c_DD = covariance("diagonal")
    gammas = torch.linspace(GAMMA_0, GAMMA_1, 2001, dtype=torch.float64).tolist()
    dropped = [0.5 * math.sqrt(scales(g)[0]) * FEEDBACK / (1 + FEEDBACK) * posterior_matrix(c_DD, g).trace().item() for g in gammas]
    inflation = torch.trapezoid(torch.tensor(dropped), torch.tensor(gammas)).item()
    assert inflation > 3
    z_BLE = random_states(4, c_DD)
    torch.testing.assert_close(density(z_BLE, c_DD), true_density(z_BLE, c_DD), rtol=0, atol=2e-3)


def test_random_probes_are_unbiased() -> None:
    """Correlated coordinates: 400 estimates of one density average to it within four standard errors, and more probes scatter less."""
    torch.manual_seed(0)
    c_DD = covariance("full")
    z_BLE = random_states(1, c_DD).expand(400, L, E)
    exact = true_density(z_BLE[:1], c_DD).item()
    scatter = []
    for probes in (1, 4):
        found = density(z_BLE, c_DD, steps=64, probes=probes)
        scatter.append(found.std().item())
        assert abs(found.mean().item() - exact) < 4 * scatter[-1] / 20 + 8e-3
    assert 0.01 < scatter[1] < 0.7 * scatter[0]


def gaussian_decoder(e_BD: Tensor, matrix: Tensor, c_DD: Tensor) -> Denoiser:
    """log N(e; matrix z, c)."""

    def decode(z_BLE: Tensor, gamma_B: Tensor, estimate_BLE: Tensor | None) -> Tensor:
        return MultivariateNormal(torch.zeros(D, dtype=torch.float64), c_DD).log_prob(e_BD - z_BLE.flatten(1) @ matrix.T)

    return decode


def nats(e_BLE: Tensor, matrix: Tensor, decoder_DD: Tensor, c_DD: Tensor, *, samples: int, seed: int = 0, steps: int = 64) -> Tensor:
    found = ode_likelihood(
        denoiser(c_DD, feedback=FEEDBACK), gaussian_decoder(e_BLE.flatten(1), matrix, decoder_DD), e_BLE, gamma_0=GAMMA_0, gamma_1=GAMMA_1,
        samples=samples, generator=torch.Generator().manual_seed(seed), settings=OdeSettings(steps=steps),
    )  # fmt: skip
    assert found.label == "estimate" and found.nats_B.dtype == torch.float64
    return found.nats_B


def test_with_the_exact_decoder_one_sample_is_exact() -> None:
    """log w = log p(e | z_0) + log p(z_0) - log q(z_0 | e) = log p(e), whatever z_0 was drawn."""
    torch.manual_seed(0)
    c_DD = covariance("diagonal")
    e_BLE = random_states(5, c_DD)
    matrix = posterior_matrix(c_DD, GAMMA_0)
    spread_DD = c_DD - math.sqrt(scales(GAMMA_0)[0]) * matrix @ c_DD
    exact = -MultivariateNormal(torch.zeros(D, dtype=torch.float64), c_DD).log_prob(e_BLE.flatten(1))
    for samples in (1, 3):
        torch.testing.assert_close(nats(e_BLE, matrix, spread_DD, c_DD, samples=samples, steps=128), exact, rtol=0, atol=5e-3)


def test_more_importance_samples_come_down_to_the_likelihood() -> None:
    """An inexact decoder N(e; z, 0.01): -log of its mixture over p(z_0) is known; the average over draws falls towards it with K."""
    torch.manual_seed(0)
    c_DD, eye = covariance("diagonal"), torch.eye(D, dtype=torch.float64)
    e_BLE = random_states(1, c_DD)
    a2, s2 = scales(GAMMA_0)
    exact = -MultivariateNormal(torch.zeros(D, dtype=torch.float64), a2 * c_DD + (s2 + 0.01) * eye).log_prob(e_BLE.flatten(1)).item()
    many_BLE = e_BLE.expand(200, L, E)
    mean = [nats(many_BLE, eye, 0.01 * eye, c_DD, samples=samples, steps=24).mean().item() for samples in (1, 4, 24)]
    assert mean[0] > mean[1] > mean[2] and mean[0] > exact + 0.1 and mean[2] == pytest.approx(exact, abs=0.03)
