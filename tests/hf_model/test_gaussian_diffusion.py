"""Gaussian diffusion and the learned schedule: the paper's numbers, precision at both ends, and that g is what it must be."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from pretrain.hf_model.gaussian_diffusion import UnitEmbedding, alpha, diffuse, evidence_scale, network_scale, prior_divergence, sigma, snr
from pretrain.hf_model.monotone_schedule import LearnedSchedule, MonotoneNetwork

GAMMAS = torch.linspace(-20, 20, 41, dtype=torch.float64)


def random_network(hidden: int = 1024, seed: int = 0) -> MonotoneNetwork:
    network, generator = MonotoneNetwork(hidden), torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = torch.randn(hidden, dtype=torch.float64, generator=generator)
    return network


def test_the_numbers_of_the_paper() -> None:
    """Prior KL 0.00126081 nats per token at gamma_1 = 6 with 16 coordinates; alpha_0^2 = 0.952574 at gamma_0 = -3."""
    assert prior_divergence(torch.tensor(6.0, dtype=torch.float64), 16).item() == pytest.approx(0.00126081, abs=5e-9)
    assert alpha(torch.tensor(-3.0, dtype=torch.float64)).item() ** 2 == pytest.approx(0.952574, abs=5e-7)


def test_scales() -> None:
    torch.testing.assert_close(alpha(GAMMAS).square() + sigma(GAMMAS).square(), torch.ones_like(GAMMAS), rtol=1e-15, atol=0)
    torch.testing.assert_close(alpha(GAMMAS).square() / sigma(GAMMAS).square(), snr(GAMMAS), rtol=1e-13, atol=0)
    torch.testing.assert_close(evidence_scale(GAMMAS), alpha(GAMMAS) / sigma(GAMMAS).square(), rtol=1e-14, atol=0)
    torch.testing.assert_close(alpha(GAMMAS).square(), torch.tensor([1 / (1 + math.exp(x)) for x in GAMMAS.tolist()], dtype=torch.float64))


@pytest.mark.parametrize("gamma", [-4.0, 0.0, 3.0, 9.0])
def test_prior_divergence_is_the_integral(gamma: float) -> None:
    """Against scipy's quadrature of q log q/p: one coordinate carries the mean alpha, the other none."""
    a, s = (1 + math.exp(gamma)) ** -0.5, (1 + math.exp(-gamma)) ** -0.5

    def divergence(mean: float) -> float:
        q = stats.norm(mean, s)
        return integrate.quad(lambda z: q.pdf(z) * (q.logpdf(z) - stats.norm.logpdf(z)), mean - 12 * s, mean + 12 * s, epsabs=1e-13)[0]

    assert prior_divergence(torch.tensor(gamma, dtype=torch.float64), 2).item() == pytest.approx(divergence(a) + divergence(0.0), rel=1e-6)


def test_prior_divergence_keeps_its_precision_where_it_vanishes() -> None:
    """width (a + a^2/2 - a)/2 + a/2 with a = alpha^2: at gamma = 20 the naive form would leave no digit."""
    a = 1 / (1 + math.exp(20.0))
    value = prior_divergence(torch.tensor(20.0, dtype=torch.float64), 16).item()
    assert value == pytest.approx(0.5 * a + 8 * (a**2 / 2 + a**3 / 3), rel=1e-7)


def test_noise_has_the_variance_of_the_process_and_is_scaled_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    clean_BLE = torch.nn.functional.normalize(torch.randn(3, 5000, 16, generator=generator), dim=-1)
    gamma_B = torch.tensor([-3.0, 0.0, 6.0], dtype=torch.float64)
    z_BLE = diffuse(clean_BLE, torch.randn(3, 5000, 16, generator=generator), gamma_B)
    assert z_BLE.dtype == torch.float32
    scaled = z_BLE * network_scale(gamma_B, 16).float()[:, None, None]
    torch.testing.assert_close(scaled.square().mean((1, 2)), torch.ones(3), rtol=0.02, atol=0)
    residual = (z_BLE - alpha(gamma_B).float()[:, None, None] * clean_BLE).square().mean((1, 2))
    torch.testing.assert_close(residual, sigma(gamma_B).square().float(), rtol=0.02, atol=0)


def test_embeddings_have_length_one_and_no_gradient_along_themselves() -> None:
    embedding = UnitEmbedding(7, 16)
    embedding.weight.data = 3 * torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    rows = embedding(2, 6)
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(4), rtol=1e-6, atol=0)
    rows.square().sum().backward()
    assert embedding.weight.grad is not None and embedding.weight.grad.abs().max() < 1e-6
    torch.testing.assert_close(rows.detach(), torch.nn.functional.normalize(embedding.weight.detach(), dim=-1)[2:6])


@pytest.mark.parametrize("seed", range(5))
def test_g_runs_from_zero_to_one_and_begins_almost_as_the_identity(seed: int) -> None:
    network, t = random_network(seed=seed), torch.linspace(0, 1, 1001, dtype=torch.float64)
    g, slope = network(t)
    assert g[0].abs() < 1e-14 and (g[-1] - 1).abs() < 1e-14 and (g.diff() > 0).all() and (slope > 0).all()
    np.testing.assert_allclose(g[[250, 500, 750]].detach().numpy(), [0.25, 0.5, 0.75], atol=0.025)
    assert slope.min() > 0.8 and slope.max() < 1.25


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_the_slope_and_its_gradient_are_those_of_autograd(scale: float) -> None:
    """g' in closed form against create_graph, and the gradient of a function of g and g' in every parameter."""
    network = random_network(64)
    for parameter in network.parameters():
        parameter.data *= scale
    t = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    g, slope = network(t)
    (automatic,) = torch.autograd.grad(g.sum(), t, create_graph=True)
    torch.testing.assert_close(slope, automatic, rtol=1e-11, atol=1e-13)
    closed, twice = (torch.autograd.grad((g.exp() * s).sum(), list(network.parameters()), retain_graph=True) for s in (slope, automatic))
    for a, b in zip(closed, twice, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_gamma_joins_its_endpoints() -> None:
    schedule = LearnedSchedule(-3.0, 6.0, 16)
    schedule.interior = random_network(16)
    gamma, slope = schedule(torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64))
    assert (gamma[0].item(), gamma[2].item()) == pytest.approx((-3, 6), abs=1e-12) and gamma.dtype == torch.float64
    ahead, _ = schedule(torch.tensor([0.3 + 1e-6], dtype=torch.float64))
    behind, _ = schedule(torch.tensor([0.3 - 1e-6], dtype=torch.float64))
    assert slope[1].item() == pytest.approx((ahead - behind).item() / 2e-6, rel=1e-6)
