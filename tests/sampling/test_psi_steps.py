"""The psi family's steps: as a choice among three against the posterior spelled out, and its schedules by hand.

Shape suffixes: N positions, K all ids.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from pretrain.hf_model.sampling_psi import Loop, Psi, ReverseStep, random_ids
from pretrain.hf_model.uniform_diffusion import uniform_posterior
from tests.reference_duo import kernel, reverse_step

STEPS = [(1.0, 0.7), (1.0, 0.0), (0.6, 0.4), (0.4, 0.4), (0.3, 0.0), (1e-5, 0.0), (2e-3, 1e-3)]


def mixture(p_K: np.ndarray, z: int, step: ReverseStep) -> np.ndarray:
    """[K]: kappa q(z_s | z_t, p) + (1 - kappa) q_s(z_s | x0), by Bayes' rule and the forward kernel."""
    alpha_t, alpha_s = 1 - step.t, 1 - step.s
    return step.kappa * reverse_step(p_K, z, alpha_t, alpha_s) + (1 - step.kappa) * reverse_step(p_K, z, alpha_t, 1.0) @ kernel(len(p_K), alpha_s)


def parts(p_K: np.ndarray, z: int, step: ReverseStep) -> np.ndarray:
    """[K]: the law that the product's three weights make."""
    keep, redraw, noise = (float(w) for w in step.weights(torch.tensor([p_K[z]]), len(p_K)))
    return keep * np.eye(len(p_K))[z] + redraw * p_K + noise / len(p_K)


@pytest.mark.parametrize(("t", "s"), STEPS)
@pytest.mark.parametrize("kappa", [1.0, 0.3, 0.0])
def test_three_weights_make_the_law(t: float, s: float, kappa: float) -> None:
    step = ReverseStep(t, s, kappa)
    rng = np.random.default_rng(0)
    for p_K in (*rng.dirichlet(np.full(5, 0.5), size=4), np.eye(5)[0]):
        for z in range(5):
            np.testing.assert_allclose(parts(p_K, z, step), mixture(p_K, z, step), rtol=1e-9, atol=1e-12)
            if kappa == 1:
                np.testing.assert_allclose(
                    parts(p_K, z, step), uniform_posterior(torch.from_numpy(p_K)[None], torch.tensor([z]), 1 - t, 1 - s)[0], rtol=1e-9, atol=1e-12
                )


def test_printed_values() -> None:
    """K = 4, p = (.5, .2, .2, .1), z = 2: the posterior from alpha .6 to .8, and the guess at the clean token, which is not p."""
    p_K = np.array([0.5, 0.2, 0.2, 0.1])
    np.testing.assert_allclose(parts(p_K, 2, ReverseStep(0.4, 0.2, 1.0)), [0.12784091, 0.05965909, 0.77556818, 0.03693182], atol=1e-8)
    np.testing.assert_allclose(parts(p_K, 2, ReverseStep(0.4, 0.0, 0.0)), [0.22727, 0.09091, 0.63636, 0.04545], atol=5e-6)


@pytest.mark.parametrize(("t", "s"), STEPS)
@pytest.mark.parametrize("kappa", [1.0, 0.3, 0.0])
def test_surely_kept_is_the_least_weight_of_keeping(t: float, s: float, kappa: float) -> None:
    step = ReverseStep(t, s, kappa)
    keep_N, _, _ = step.weights(torch.linspace(0, 1, 101, dtype=torch.float64), 50)
    assert keep_N.min().item() == pytest.approx(step.surely_kept, rel=1e-12)
    assert keep_N.argmin() == 0


def test_draws_have_the_law() -> None:
    p_K, step, draws = np.array([0.5, 0.2, 0.3, 0.0]), ReverseStep(0.6, 0.4, 0.5), 40_000
    generator = torch.Generator().manual_seed(0)
    choice_N, value_N = torch.rand(2, draws, generator=generator, dtype=torch.float64)
    for z in range(4):
        drawn_N = step.draw(torch.from_numpy(p_K).expand(draws, -1), torch.full((draws,), z), choice_N, value_N)
        observed = torch.bincount(drawn_N, minlength=4).tolist()
        assert chisquare(observed, draws * mixture(p_K, z, step)).pvalue > 1e-4


def test_the_end_draws_nothing_that_p_rules_out() -> None:
    """At s = 0, for the largest and smallest uniform numbers: never the mask (the last id), also from a state that is the mask."""
    p_K = torch.tensor([0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    for step in (ReverseStep(0.3, 0.0, 1.0), ReverseStep(1.0, 0.0, 0.2), ReverseStep(1e-5, 0.0, 0.0)):
        for choice in (0.0, 0.5, 1 - 2.0**-53):
            for value in (0.0, 1 - 2.0**-53):
                uniform_N = torch.full((4,), choice, dtype=torch.float64)
                drawn_N = step.draw(p_K.expand(4, -1), torch.arange(4), uniform_N, torch.full_like(uniform_N, value))
                assert set(drawn_N.tolist()) <= {0, 2}


def test_random_ids_cover_all() -> None:
    assert random_ids(torch.tensor([0.0, 0.2499, 0.25, 0.75, 1 - 2.0**-53], dtype=torch.float64), 4).tolist() == [0, 0, 1, 3, 3]
    for classes in (3, 32_001, 65_536, 65_537, 131_071, 131_072, 131_073):
        assert random_ids(torch.tensor([1 - 2.0**-53], dtype=torch.float64), classes).tolist() == [classes - 1]


def test_ancestral_schedule() -> None:
    assert Psi().steps(4) == [ReverseStep(1.0, 0.75, 1.0), ReverseStep(0.75, 0.5, 1.0), ReverseStep(0.5, 0.25, 1.0), ReverseStep(0.25, 0.0, 1.0)]
    assert Psi().steps(1, 1e-5) == [ReverseStep(1.0, 1e-5, 1.0)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mode": "constant", "eta": 0.3}, [0.3, 0.3, 0.3, 0.3, 0.3]),
        ({"mode": "remdm", "eta": 0.1}, [1 - 0.1 / 0.8, 1 - 0.1 / 0.6, 1 - 0.1 / 0.4, 1 - 0.1 / 0.2, 1.0]),
        ({"mode": "remdm", "eta": 0.5}, [1 - 0.5 / 0.8, 1 - 0.5 / 0.6, 0.0, 0.0, 1.0]),
        # sigma_max = (1 - alpha_s) / alpha_t: infinite, then 0.6/0.2, 0.4/0.4, 0.2/0.6.
        ({"mode": "max_capped", "eta": 0.5}, [1 - 0.5 / 0.8, 1 - 0.5 / 0.6, 0.0, 0.0, 1.0]),
        ({"mode": "max_rescaled", "eta": 0.1}, [1 - 0.1 / 0.8, 1 - 0.1 / 0.6, 1 - 0.1 / 0.4, 1 - 0.1 * (0.2 / 0.6) / 0.2, 1.0]),
    ],
)
def test_kappas(fields: dict[str, object], expected: list[float]) -> None:
    assert [step.kappa for step in Psi(**fields).steps(5)] == pytest.approx(expected, abs=1e-12)  # type: ignore[arg-type]


def test_loop() -> None:
    steps = Psi(mode="remdm", eta=0.01, loop=Loop()).steps(20)
    assert [(step.t, step.s) for step in steps[:2]] == [(1.0, pytest.approx(0.9)), (pytest.approx(0.9), pytest.approx(0.8))]
    assert [(step.t, step.s) for step in steps[9:19]] == [(1 - 0.9, 1 - 0.9)] * 10
    assert (steps[19].t, steps[19].s) == (1 - 0.9, 0.0)
    assert all(a.s == b.t for a, b in zip(steps, steps[1:], strict=False))
    assert [step.kappa for step in steps] == pytest.approx([1.0] * 9 + [0.9] * 10 + [1.0])
    for count in (3, 4, 7, 50):
        for loop in (Loop(), Loop(rise=0.05, fall=0.9), Loop(rise=0.9, fall=0.05)):
            short = Psi(eta=0.5, loop=loop).steps(count, 1e-5)
            assert len(short) == count and (short[0].t, short[-1].s) == (1.0, 1e-5)
            assert any(step.t == step.s for step in short) and short[0].t > short[0].s and short[-1].t > short[-1].s


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Psi(eta=1.5), "eta in \\[0, 1\\]"),
        (lambda: Psi(mode="max-capped"), "constant, remdm, max_capped, max_rescaled"),  # type: ignore[arg-type]
        (lambda: Psi(loop=Loop()), "does nothing"),
        (lambda: Loop(alpha=1.0), "0 < alpha < 1"),
        (lambda: Loop(rise=0.5, fall=0.5), "leaves steps to wait"),
        (lambda: Psi().steps(0), "at least 1 steps"),
        (lambda: Psi(eta=0.5, loop=Loop()).steps(2), "at least 3 steps"),
    ],
)
def test_what_cannot_be_is_refused(make: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()  # type: ignore[operator]
