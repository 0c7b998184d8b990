"""Eso-LM's schedule: ends of the range, precision, and agreement with MDLM's where diffusion does everything."""

from fractions import Fraction

import pytest
import torch

from pretrain.hf_model.diffusion_math import LogLinearSchedule, masked_nelbo_weight, reveal_probability
from pretrain.hf_model.esolm_math import PartialSchedule

CASES = pytest.mark.parametrize(("alpha_0", "eps"), [(1.0, 1e-3), (1.0, 0.0), (0.5, 1e-3), (0.125, 0.0), (0.0, 1e-3)])


@CASES
def test_relative_precision_at_both_ends(alpha_0: float, eps: float) -> None:
    """fp32 against exact fractions, down to t = 1e-6 and 1 - t = 2^-24."""
    t = torch.tensor([1e-6, 1e-3, 0.5, 1 - 2.0**-10, 1 - 2.0**-24, 1.0])
    schedule = PartialSchedule(alpha_0, eps)
    columns = [f(t).tolist() for f in (schedule.alpha, schedule.one_minus_alpha, schedule.nelbo_weight)]
    for value, alpha, noise, weight in zip(t.tolist(), *columns, strict=True):
        exact = Fraction(alpha_0) * (1 - (1 - Fraction(eps)) * Fraction(value))
        assert alpha == pytest.approx(float(exact), rel=3e-7) and noise == pytest.approx(float(1 - exact), rel=3e-7)
        assert weight == pytest.approx(float(Fraction(alpha_0) * (1 - Fraction(eps)) / (1 - exact)), rel=6e-7)
    assert schedule.alpha(0.0) == alpha_0 and schedule.alpha(1.0) == alpha_0 * eps and schedule.one_minus_alpha(0.0) == 1 - alpha_0


@CASES
def test_weight_is_minus_the_slope_over_the_noise(alpha_0: float, eps: float) -> None:
    schedule, t, h = PartialSchedule(alpha_0, eps), 0.3, 1e-6
    slope = (schedule.alpha(t + h) - schedule.alpha(t - h)) / (2 * h)
    assert schedule.nelbo_weight(t) == pytest.approx(-slope / (1 - schedule.alpha(t)), abs=1e-8)


@CASES
def test_reverse_steps_compose_and_leave_the_sequential_phase_its_share(alpha_0: float, eps: float) -> None:
    """A token that was masked at 1 is still masked at 0 with probability (1 - alpha_0) / (1 - alpha_1), in one step or in many."""
    grid, schedule = torch.linspace(1, 0, 101, dtype=torch.float64), PartialSchedule(alpha_0, eps)
    stays = (1 - schedule.reveal_probability(grid[:-1], grid[1:])).prod().item()
    assert stays == pytest.approx((1 - alpha_0) / (1 - alpha_0 * eps), abs=1e-12)
    assert stays == pytest.approx(1 - schedule.reveal_probability(1.0, 0.0), abs=1e-12)


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_diffusion_alone_is_mdlm(eps: float) -> None:
    ours, theirs, t = PartialSchedule(1.0, eps), LogLinearSchedule(eps), torch.linspace(1e-3, 1, 50, dtype=torch.float64)
    torch.testing.assert_close(ours.one_minus_alpha(t), theirs.one_minus_alpha(t), rtol=1e-15, atol=0)
    torch.testing.assert_close(ours.alpha(t), theirs.alpha(t), rtol=1e-15, atol=0)
    torch.testing.assert_close(ours.nelbo_weight(t), masked_nelbo_weight(t), rtol=1e-15, atol=0)
    torch.testing.assert_close(ours.reveal_probability(t, t / 3), reveal_probability(t, t / 3), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("alpha_0", "eps", "message"), [(1.1, 0.0, "alpha_0 <= 1, got 1.1"), (-0.1, 0.0, "got -0.1"), (0.5, 1.0, "e < 1, got 1")])
def test_an_impossible_schedule_is_a_programming_error(alpha_0: float, eps: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartialSchedule(alpha_0, eps)
