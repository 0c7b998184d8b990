"""Intervals and comparisons against closed forms, enumeration and another library's formula."""

from math import comb, sqrt

import pytest
from scipy.stats import beta, binom

from finetune.accuracy import accuracy, compare


@pytest.mark.parametrize(("correct", "total"), [(0, 20), (7, 20), (20, 20), (868, 1319)])
def test_wilson_is_its_closed_form(correct: int, total: int) -> None:
    z, share = 1.959963984540054, correct / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    found = accuracy(correct, total)
    assert found.low == pytest.approx(max(0, centre - half), abs=1e-12) and found.high == pytest.approx(min(1, centre + half), abs=1e-12)


def test_clopper_pearson_is_made_of_beta_quantiles_and_covers() -> None:
    found = accuracy(7, 20, method="Clopper-Pearson")
    assert (found.low, found.high) == pytest.approx((beta.ppf(0.025, 7, 14), beta.ppf(0.975, 8, 13)))
    for share in (0.05, 0.3, 0.5, 0.9):
        intervals = [accuracy(correct, 20, method="Clopper-Pearson") for correct in range(21)]
        covered = sum(binom.pmf(correct, 20, share) for correct, one in enumerate(intervals) if one.low <= share <= one.high)
        assert covered >= 0.95


def test_the_label_is_part_of_the_text() -> None:
    assert str(accuracy(868, 1319)) == "65.8% (868 of 1319; 95% Wilson interval 63.2-68.3%)"
    with pytest.raises(ValueError, match="3 correct answers of 2 problems"):
        accuracy(3, 2)


def test_mcnemar_is_coin_flips() -> None:
    first = [True] * 9 + [False] * 2 + [True] * 30 + [False] * 20
    second = [False] * 9 + [True] * 2 + [True] * 30 + [False] * 20
    found = compare(first, second)
    assert (found.only_first, found.only_second, found.both, found.neither) == (9, 2, 30, 20)
    assert found.p_value == pytest.approx(2 * sum(comb(11, k) for k in range(3)) / 2**11)
    assert found.difference == pytest.approx(7 / 61) and found.low < 7 / 61 < found.high
    swapped = compare(second, first)
    assert (swapped.low, swapped.high, swapped.p_value) == pytest.approx((-found.high, -found.low, found.p_value))


def test_equal_models_differ_by_nothing() -> None:
    found = compare([True, False], [True, False])
    assert found.difference == 0 and found.p_value == 1 and found.low < 0 < found.high


def test_the_interval_of_a_difference_covers() -> None:
    """All outcomes of 40 pairs with P(first alone) = 0.3, P(second alone) = 0.15, enumerated."""
    total, p, q = 40, 0.3, 0.15
    covered = 0.0
    for b in range(total + 1):
        for c in range(total + 1 - b):
            weight = comb(total, b) * comb(total - b, c) * p**b * q**c * (1 - p - q) ** (total - b - c)
            if weight > 1e-9:
                found = compare([True] * b + [False] * (total - b), [False] * b + [True] * c + [False] * (total - b - c))
                covered += weight * (found.low <= p - q <= found.high)
    assert 0.94 < covered < 0.97
