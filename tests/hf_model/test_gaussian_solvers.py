"""Reverse steps of Gaussian diffusion against conditioning of joint Gaussians, and against SciPy's solution of the probability-flow ODE."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from pretrain.hf_model.gaussian_solvers import Solver, ddpm_step, estimates_per_step, reverse_steps, sharpened

START, END = 5.0, -4.0
MEANS, WEIGHTS, SPREAD = np.array([-1.2, 0.3, 1.5]), np.array([0.3, 0.5, 0.2]), 0.4


def scales(gamma: float) -> tuple[float, float]:
    return (1 + np.exp(gamma)) ** -0.5, (1 + np.exp(-gamma)) ** -0.5


def posterior_mean(z: np.ndarray, gamma: float) -> np.ndarray:
    """E[x | z] for the mixture of normal distributions with these means and weights and one variance."""
    a, s = scales(gamma)
    total = a**2 * SPREAD**2 + s**2
    log_weight = np.log(WEIGHTS) - (z[..., None] - a * MEANS) ** 2 / (2 * total)
    weight = np.exp(log_weight - log_weight.max(-1, keepdims=True))
    means = MEANS + a * SPREAD**2 / total * (z[..., None] - a * MEANS)
    return (weight * means).sum(-1) / weight.sum(-1)


def denoise(z: Tensor, gamma: Tensor) -> Tensor:
    return torch.from_numpy(posterior_mean(z.numpy(), float(gamma)))


def no_normals(step: int) -> Tensor:
    raise AssertionError("a deterministic solver asked for noise")


def last(steps: int, solver: Solver, z: Tensor, denoiser: Callable[[Tensor, Tensor], Tensor] = denoise) -> Tensor:
    *_, end = reverse_steps(denoiser, z, torch.linspace(START, END, steps + 1, dtype=torch.float64), solver, no_normals)
    return end


@pytest.mark.parametrize(("solver", "order"), [("ddim", 1), ("dpm++", 2), ("heun", 2)])
def test_order_of_convergence(solver: Solver, order: int) -> None:
    z = np.linspace(-2, 2, 9)

    def slope(gamma: float, z: np.ndarray) -> np.ndarray:
        a, _ = scales(gamma)
        return 0.5 * (a**2 * z - a * posterior_mean(z, gamma))

    truth = solve_ivp(slope, (START, END), z, method="DOP853", rtol=1e-12, atol=1e-12).y[:, -1]
    error = [np.abs(last(steps, solver, torch.from_numpy(z)).numpy() - truth).max() for steps in (80, 160, 320)]
    rates = np.log2(np.array(error[:-1]) / error[1:])
    assert rates == pytest.approx([order, order], abs=0.15) and error[-1] < (0.02 if order == 1 else 1e-3)


def test_levels_may_be_uneven() -> None:
    """The extrapolation of dpm++ knows that its last step had another length: an estimate linear in gamma is met in the middle of the step."""
    gammas = torch.tensor([4.0, 3.0, 0.0, -1.5], dtype=torch.float64)
    *_, end = reverse_steps(lambda z, gamma: gamma.expand_as(z), torch.zeros(1, dtype=torch.float64), gammas, "dpm++", no_normals)
    z, clean = 0.0, (4.0, 1.5, -0.75)
    for i in range(3):
        (a_s, s_s), (a_t, s_t) = scales(float(gammas[i + 1])), scales(float(gammas[i]))
        z = a_s * clean[i] + s_s * (z - a_t * clean[i]) / s_t
    assert end.item() == pytest.approx(z, abs=1e-12)


@pytest.mark.parametrize("solver", ["ddim", "dpm++", "heun"])
def test_one_step_is_exact_where_the_clean_latent_is_known(solver: Solver) -> None:
    clean, noise = torch.tensor([0.7, -0.2], dtype=torch.float64), torch.tensor([0.4, -1.9], dtype=torch.float64)
    (a_t, s_t), (a_s, s_s) = scales(START), scales(END)
    end = last(1, solver, a_t * clean + s_t * noise, lambda z, gamma: clean)
    torch.testing.assert_close(end, a_s * clean + s_s * noise, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gamma_t", "gamma_s"), [(6.0, 5.9), (2.0, -1.0), (-2.9, -3.0), (3.0, 3.0 - 1e-9)])
def test_ddpm_is_the_posterior(gamma_t: float, gamma_s: float) -> None:
    """q(z_s | z_t, x) from the joint distribution of z_s = a_s x + noise and z_t = (a_t / a_s) z_s + noise."""
    (a_t, s_t), (a_s, s_s) = scales(gamma_t), scales(gamma_s)
    x, z_t, n = 0.8, -0.6, 1.3
    gain = a_t / a_s * s_s**2 / s_t**2
    mean, variance = a_s * x + gain * (z_t - a_t * x), s_s**2 - gain * a_t / a_s * s_s**2
    numbers = [torch.tensor(value, dtype=torch.float64) for value in (z_t, x, gamma_t, gamma_s)]
    drawn = ddpm_step(*numbers, torch.tensor(n, dtype=torch.float64))
    middle = ddpm_step(*numbers, torch.tensor(0.0, dtype=torch.float64))
    assert middle.item() == pytest.approx(mean, abs=1e-12)
    # Where the levels almost meet the reference cancels; the variance is s_s^2 (1 - e^-d) = s_s^2 d there, d the distance.
    expected = variance if gamma_t - gamma_s > 1e-3 else s_s**2 * (gamma_t - gamma_s)
    assert ((drawn - middle) / n).item() ** 2 == pytest.approx(expected, rel=1e-6)


def test_many_ddpm_steps_sample_the_data() -> None:
    """Gaussian data of variance 0.3 and its exact denoiser: the last law is N(0, v), v by recursion, which tends to that of z_0."""

    def gain(gamma: float) -> float:
        a, s = scales(gamma)
        return a * 0.3 / (a**2 * 0.3 + s**2)

    def recursion(gammas: np.ndarray) -> float:
        v = 1.0
        for gamma_t, gamma_s in pairwise(gammas):
            (a_t, s_t), (a_s, s_s) = scales(gamma_t), scales(gamma_s)
            back = a_t / a_s * s_s**2 / s_t**2
            v = (back + (a_s - back * a_t) * gain(gamma_t)) ** 2 * v + s_s**2 - back**2 * s_t**2
        return float(v)

    generator, gammas = np.random.default_rng(0), np.linspace(6.0, -4.0, 41)

    def normals(step: int) -> Tensor:
        return torch.from_numpy(generator.normal(size=40_000))

    *_, end = reverse_steps(lambda z, gamma: gain(float(gamma)) * z, normals(0), torch.from_numpy(gammas), "ddpm", normals)
    assert end.var().item() == pytest.approx(recursion(gammas), rel=0.03) and end.mean().item() == pytest.approx(0, abs=0.012)
    a, s = scales(-4.0)
    assert recursion(np.linspace(6.0, -4.0, 4001)) == pytest.approx(a**2 * 0.3 + s**2, rel=2e-3)


@pytest.mark.parametrize("temperature", [0.05, 0.9, 1.0, 2.0])
def test_score_temperature_divides_the_noise(temperature: float) -> None:
    z, clean, gamma = (torch.tensor(x, dtype=torch.float64) for x in ([0.3, -2.0], [0.9, 0.1], 1.7))
    a, s = scales(1.7)
    noise = (z - a * clean) / s / temperature
    torch.testing.assert_close(sharpened(z, clean, gamma, temperature), (z - s * noise) / a, rtol=1e-12, atol=1e-12)


def test_estimates_are_counted() -> None:
    for solver in ("ddpm", "ddim", "dpm++", "heun"):
        asked = list[float]()

        def count(z: Tensor, gamma: Tensor, asked: list[float] = asked) -> Tensor:
            asked.append(float(gamma))
            return torch.zeros_like(z)

        list(reverse_steps(count, torch.zeros(1), torch.tensor([3.0, 1.0, -1.0]), solver, lambda step: torch.zeros(1)))
        assert len(asked) == 2 * estimates_per_step(solver) and asked == ([3.0, 1.0, 1.0, -1.0] if solver == "heun" else [3.0, 1.0])
    with pytest.raises(ValueError, match=r"ddpm, ddim, dpm\+\+, heun, not euler"):
        estimates_per_step("euler")  # type: ignore[arg-type]
