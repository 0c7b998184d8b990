"""The Gaussian curriculum: T against adaptive quadrature, and the top-k draw against draws of all K numbers.

Shape suffixes: S draws, L positions (as many draws), k kept entries, K all ids.
"""

from itertools import permutations

import numpy as np
import pytest
from scipy import special, stats

from pretrain.errors import UserError
from pretrain.objectives.config import DuoConfig
from pretrain.objectives.gaussian_curriculum import (
    LOWEST_GAMMA,
    GaussianCurriculum,
    SoftDraw,
    distinct_ids,
    draw_top_k,
    duality,
    log_expected_rest,
)
from tests import reference_duo as reference


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def draw(token: int, classes: int, k: int, gamma: float, tau: float, draws: int, seed: int = 0) -> SoftDraw:
    return draw_top_k(np.full(draws, token), classes, k, gamma, tau, generator(seed))


# ---- T ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 40, 32001, 131072])
def test_duality_against_adaptive_quadrature(classes: int) -> None:
    for gamma in (LOWEST_GAMMA, -3.7, -3.01, -2.5, -1.9, 0.0, 4.0):
        alpha, one_minus_alpha, slope = duality(classes).level(gamma)
        expected, expected_slope = reference.duality(classes, gamma)
        assert alpha == pytest.approx(expected, abs=1e-11) and slope == pytest.approx(expected_slope, abs=1e-10)
        assert one_minus_alpha == pytest.approx(1 - alpha, abs=1e-13) and one_minus_alpha > 0 and slope < 0


@pytest.mark.parametrize(
    ("classes", "table"),
    [
        (50257, {-3.55: 0.94547, -3.5: 0.92835, -3.0: 0.59625, -2.5: 0.23797, -2.0: 0.07203, -1.85: 0.04932}),
        (32001, {-3.55: 0.95521, -1.85: 0.06065}),
        (131072, {-3.55: 0.92003, -1.85: 0.03132}),
    ],
)
def test_printed_values_of_the_duality(classes: int, table: dict[float, float]) -> None:
    for gamma, alpha in table.items():
        assert duality(classes).level(gamma)[0] == pytest.approx(alpha, abs=5.1e-6)


def test_two_ids_have_a_closed_form() -> None:
    """K = 2: the larger of two normals mu apart, P = Phi(mu / sqrt 2), so T = erf(mu / 2)."""
    for gamma in np.linspace(-5, 4, 19):
        mu = np.exp(-gamma / 2)
        alpha, one_minus_alpha, slope = duality(2).level(gamma)
        assert alpha == pytest.approx(special.erf(mu / 2), rel=1e-13) and one_minus_alpha == pytest.approx(special.erfc(mu / 2), rel=1e-10)
        assert slope == pytest.approx(-mu / 2 * np.exp(-(mu**2) / 4) / np.sqrt(np.pi), rel=1e-10)


@pytest.mark.parametrize(("classes", "low", "high"), [(32001, -3.531, -1.770), (50257, -3.565, -1.855), (131072, -3.633, -2.019)])
def test_range_of_gamma_follows_from_the_vocabulary(classes: int, low: float, high: float) -> None:
    derived = GaussianCurriculum(classes, DuoConfig(curriculum="topk"))
    assert (derived.gamma_min, derived.gamma_max) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert derived.level(0.0).alpha == pytest.approx(0.95, abs=1e-9) and derived.level(1.0).alpha == pytest.approx(0.05, abs=1e-9)
    h = 1e-5
    assert derived.level(0.4).alpha_derivative == pytest.approx((derived.level(0.4 + h).alpha - derived.level(0.4 - h).alpha) / (2 * h), rel=1e-6)
    given = GaussianCurriculum(classes, DuoConfig(curriculum="topk", gamma_min=-4.0, gamma_max=-1.0))
    assert (given.gamma(0.0), given.gamma(0.5), given.gamma(1.0)) == (-4.0, -2.5, -1.0)


def test_constants_that_do_not_fit_the_vocabulary_are_refused() -> None:
    with pytest.raises(UserError, match="top_k=16 must be below the model's 16 ids; use objective.duo.top_k=15"):
        GaussianCurriculum(16, DuoConfig(curriculum="topk"))
    with pytest.raises(UserError, match=r"gamma_min=-1 must be below objective.duo.gamma_max=-1.77 "):
        GaussianCurriculum(32001, DuoConfig(curriculum="topk", gamma_min=-1.0))
    with pytest.raises(ValueError, match="below -5"):
        duality(10).level(-5.1)


def test_temperature_moves_on_the_log_scale_between_start_and_end() -> None:
    moving = GaussianCurriculum(
        50, DuoConfig(curriculum="topk", log10_tau_start=-1.0, log10_tau_end=-3.0, curriculum_start=100, curriculum_end=200)
    )
    assert [moving.tau(step) for step in (0, 100, 150, 175, 199)] == pytest.approx([1e-1, 1e-1, 1e-2, 10**-2.5, 10**-2.98])
    assert [moving.active(step) for step in (0, 199, 200, 10**6)] == [True, True, False, False]
    assert not GaussianCurriculum(50, DuoConfig()).active(0)


# ---- The draw ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 5])
def test_the_argmax_keeps_the_token_as_often_as_alpha_says(k: int) -> None:
    """0.23798 at K = 50257, gamma = -2.5. Calling the token the argmax wherever it is among the k largest gives 0.306 and 0.400."""
    alpha, classes, draws = duality(50257).level(-2.5)[0], 50257, 40_000
    kept = (draw(7, classes, k, -2.5, 1e-3, draws).noisy_L == 7).mean()
    expected = alpha + (1 - alpha) / classes
    assert expected == pytest.approx(0.23798, abs=2e-5)
    assert abs(kept - expected) < 4.5 * np.sqrt(expected * (1 - expected) / draws)


def test_the_argmax_is_uniform_over_the_other_ids() -> None:
    drawn_L = draw(2, 6, 4, 0.0, 0.1, 60_000).noisy_L
    counts_K = np.bincount(drawn_L[drawn_L != 2], minlength=6)
    assert counts_K[2] == 0 and stats.chisquare(np.delete(counts_K, 2)).pvalue > 1e-4
    alpha = duality(6).level(0.0)[0]
    assert (drawn_L == 2).mean() == pytest.approx(alpha + (1 - alpha) / 6, abs=4.5 * 0.5 / np.sqrt(60_000))


@pytest.mark.parametrize(("size", "k"), [(4, 2), (4, 4), (5, 3)])
def test_ids_are_drawn_without_replacement_in_every_order_equally_often(size: int, k: int) -> None:
    drawn_Lk = distinct_ids(size, k, 60_000, generator(1))
    orders = {order: 0 for order in permutations(range(size), k)}
    for row, count in zip(*np.unique(drawn_Lk, axis=0, return_counts=True), strict=True):
        orders[tuple(int(x) for x in row)] += int(count)
    assert stats.chisquare(list(orders.values())).pvalue > 1e-4


def test_kept_entries_are_distinct_and_hold_the_argmax_with_the_largest_weight() -> None:
    """Also that the weights are those of a softmax over more than the kept entries, and that the token is missing from them at times."""
    soft = draw(3, 40, 4, -1.5, 0.2, 4000)
    assert (np.diff(np.sort(soft.ids_Lk, axis=1), axis=1) > 0).all() and soft.ids_Lk.min() == 0 and soft.ids_Lk.max() == 39
    np.testing.assert_array_equal(soft.ids_Lk[np.arange(4000), soft.weights_Lk.argmax(1)], soft.noisy_L)
    assert soft.weights_Lk.dtype == np.float32 and (soft.weights_Lk >= 0).all() and (soft.weights_Lk.sum(1) < 1).all()
    assert 0.05 < (soft.ids_Lk == 3).any(1).mean() < 0.95


def softmax_of_all(classes: int, gamma: float, tau: float, draws: int, seed: int) -> np.ndarray:
    """[S, K] with the token at 0."""
    return special.softmax(reference.dense_draw(classes, 0, gamma, draws, seed) / tau, axis=1)


@pytest.mark.parametrize(("classes", "k", "gamma", "tau"), [(12, 2, -0.8, 0.3), (12, 11, -0.8, 0.5), (60, 8, -1.6, 0.3), (60, 2, -1.6, 0.05)])
def test_weights_against_the_softmax_of_all_numbers(classes: int, k: int, gamma: float, tau: float) -> None:
    """1 / (largest weight) has no bias at all, whether the token is kept or not; the weights themselves next to none.

    Where the token is kept, the authors' denominator treats the k-th number, which the token displaced, as one of the rest: at k = 2 that
    moves the first by 8 to 10 of these errors.
    """
    draws = 40_000
    dense_SK, soft = softmax_of_all(classes, gamma, tau, draws, seed=5), draw(0, classes, k, gamma, tau, draws)
    token_kept_S = dense_SK[:, 0] >= np.sort(dense_SK, axis=1)[:, -k]
    token_kept_L = (soft.ids_Lk == 0).any(1)
    assert token_kept_L.mean() == pytest.approx(token_kept_S.mean(), abs=4.5 * np.sqrt(0.5 / draws))
    for kept in (True, False):
        if k == classes - 1 and not kept:
            continue
        all_S, drawn_L = 1 / dense_SK[token_kept_S == kept].max(1), 1 / soft.weights_Lk[token_kept_L == kept].max(1).astype(float)
        error = np.sqrt(all_S.var() / len(all_S) + drawn_L.var() / len(drawn_L))
        assert abs(all_S.mean() - drawn_L.mean()) < 4.5 * error
    token_L = np.where(soft.ids_Lk == 0, soft.weights_Lk, 0).sum(1)
    assert token_L.mean() == pytest.approx(np.where(token_kept_S, dense_SK[:, 0], 0).mean(), abs=0.012)
    assert soft.weights_Lk.sum(1).mean() == pytest.approx(np.sort(dense_SK, axis=1)[:, -k:].sum(1).mean(), abs=0.012)


@pytest.mark.parametrize(("k", "tau"), [(2, 0.06), (4, 0.1)])
def test_expected_rest_is_what_the_other_numbers_sum_to(k: int, tau: float) -> None:
    """Ratio of the true sum below the k-th number to its expectation, 1 on average. K = 2000."""
    rows, classes, s = 4000, 2000, 0.9 / tau
    normal_SK = np.sort(np.random.default_rng(2).normal(size=(rows, classes)), axis=1)[:, ::-1]
    bound_S = normal_SK[:, k - 1]
    true_S = np.exp(s * (normal_SK[:, k:] - bound_S[:, None])).sum(1)
    ratio_S = true_S / np.exp(log_expected_rest(bound_S.copy(), s, classes - k))
    assert ratio_S.mean() == pytest.approx(1, abs=4.5 * ratio_S.std() / np.sqrt(rows)) and ratio_S.std() / np.sqrt(rows) < 0.02


@pytest.mark.parametrize("tau", [1e-12, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize(("classes", "k"), [(3, 2), (17, 16), (131072, 16)])
def test_extreme_temperatures_are_finite(classes: int, k: int, tau: float) -> None:
    """tau -> 0: one-hot at the argmax. tau -> infinity: every id weighs 1 / K."""
    for gamma in (-4.0, 0.0):
        soft = draw(1, classes, k, gamma, tau, 500)
        assert np.isfinite(soft.weights_Lk).all() and (soft.weights_Lk.sum(1) <= 1 + 1e-6).all()
        if tau == 1e-12:
            assert soft.weights_Lk.max(1).min() == 1
        if tau == 1e3:
            np.testing.assert_allclose(soft.weights_Lk, 1 / classes, rtol=0.02)
