"""The reverse step of uniform-state diffusion against printed values, Bayes' rule, and the exact reverse process of a toy; the network's time.

Shape suffixes: M noisy states, L positions, K all ids.
"""

import math

import numpy as np
import pytest
import torch

from pretrain.hf_model.uniform_diffusion import time_conditioning, uniform_posterior
from tests import reference_duo as reference
from tests.reference_math import random_toy

P = torch.tensor([[0.5, 0.2, 0.2, 0.1]])


def test_values_of_one_token() -> None:
    """K = 4, p = (.5, .2, .2, .1), z = 2: alpha .6 -> .8, and .6 -> 1 (x weighed by z, which is not p itself)."""
    z = torch.tensor([2])
    torch.testing.assert_close(
        uniform_posterior(P, z, 0.6, 0.8)[0], torch.tensor([0.12784091, 0.05965909, 0.77556818, 0.03693182], dtype=torch.float64), rtol=0, atol=1e-8
    )
    torch.testing.assert_close(
        uniform_posterior(P, z, 0.6, 1.0)[0], torch.tensor([0.22727, 0.09091, 0.63636, 0.04545], dtype=torch.float64), rtol=0, atol=5e-6
    )


@pytest.mark.parametrize(("alpha_t", "alpha_s"), [(0.0, 0.3), (1e-9, 1e-3), (0.2, 0.200001), (0.5, 0.9), (0.999, 1.0), (0.0, 1.0)])
def test_is_bayes_rule_and_sums_to_one(alpha_t: float, alpha_s: float) -> None:
    p_NK = torch.from_numpy(np.random.default_rng(0).dirichlet(np.full(6, 0.5), size=5))
    z_N = torch.tensor([0, 1, 2, 3, 5])
    got_NK = uniform_posterior(p_NK, z_N, alpha_t, alpha_s)
    expected_NK = [reference.reverse_step(p_K.numpy(), int(z), alpha_t, alpha_s) for p_K, z in zip(p_NK, z_N, strict=True)]
    np.testing.assert_allclose(got_NK, expected_NK, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(got_NK.sum(-1), torch.ones(5, dtype=torch.float64), rtol=1e-14, atol=0)
    assert (got_NK >= 0).all()


def test_leave_one_out_posterior_gives_the_exact_reverse_process() -> None:
    """q(z_s^l | z_t) of the joint process, summed over every text, equals the reverse step with q(x^l | z_t at the other positions)."""
    toy, alpha_t, alpha_s = random_toy(3, 2, 1), 0.4, 0.7
    states_ML = reference.states(toy)
    weight_NM = toy.q_N[:, None] * reference.state_probability(toy, states_ML, alpha_t)
    loo_MLK = torch.from_numpy(np.exp(reference.leave_one_out(toy, states_ML, alpha_t)))
    got_MLK = uniform_posterior(loo_MLK, torch.from_numpy(states_ML), alpha_t, alpha_s)
    for m, state_L in enumerate(states_ML):
        for position, z in enumerate(state_L):
            steps_NK = np.array([reference.reverse_step(np.eye(4)[x], z, alpha_t, alpha_s) for x in toy.sequences_NL[:, position]])
            exact_K = weight_NM[:, m] / weight_NM[:, m].sum() @ steps_NK
            np.testing.assert_allclose(got_MLK[m, position], exact_K, rtol=1e-12, atol=1e-14)


def test_alphas_may_differ_between_sequences() -> None:
    p_BLK, z_BL = P.expand(2, 3, 4), torch.tensor([[0, 1, 2], [3, 2, 2]])
    alpha_t, alpha_s = torch.tensor([[0.6], [0.1]], dtype=torch.float64), torch.tensor([[0.8], [0.3]], dtype=torch.float64)
    got_BLK = uniform_posterior(p_BLK, z_BL, alpha_t, alpha_s)
    torch.testing.assert_close(got_BLK[0, 2:], uniform_posterior(P, torch.tensor([2]), 0.6, 0.8), rtol=1e-14, atol=0)
    torch.testing.assert_close(got_BLK[1, 2:], uniform_posterior(P, torch.tensor([2]), 0.1, 0.3), rtol=1e-14, atol=0)


def test_the_networks_time_is_finite_and_never_beyond_what_training_shows() -> None:
    longest = math.log(1e3)
    cases = [(0.6, 1e-3, -math.log(0.6)), (1.0, 1e-3, 0.0), (1e-3, 1e-3, longest), (0.0, 1e-3, longest), (0.0, 0.0, 53 * math.log(2))]
    for alpha, eps, sigma in cases:
        assert time_conditioning(alpha, eps) == pytest.approx(sigma, rel=1e-14)
        assert time_conditioning(torch.tensor([alpha], dtype=torch.float64), eps).item() == pytest.approx(sigma, rel=1e-14)
