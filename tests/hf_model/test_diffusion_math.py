"""Schedule, times and reverse steps: ends of the range, precision, and the law that small steps compose to a large one."""

from fractions import Fraction

import pytest
import torch

from pretrain.hf_model.diffusion_math import LogLinearSchedule, bound_time, masked_nelbo_weight, reveal_probability, training_time


def test_times_reach_the_ends_they_may() -> None:
    """u comes from [0, 1): a bound's t may be 1 and never 0, training's t starts at time_eps and stays below 1."""
    last = 1 - 2.0**-53
    assert bound_time(0.0) == 1 and 0 < bound_time(last) < 1e-15
    assert training_time(0.0, 1e-3) == 1e-3 and training_time(last, 1e-3) <= 1


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.3])
def test_schedule_keeps_relative_precision_at_both_ends(eps: float) -> None:
    """fp32 against exact fractions, down to t = 1e-6 and 1 - t = 2^-24."""
    t = torch.tensor([1e-6, 1e-3, 0.5, 1 - 2.0**-10, 1 - 2.0**-24, 1.0])
    schedule = LogLinearSchedule(eps)
    for value, alpha, noise in zip(t.tolist(), schedule.alpha(t).tolist(), schedule.one_minus_alpha(t).tolist(), strict=True):
        exact = 1 - (1 - Fraction(eps)) * Fraction(value)
        assert alpha == pytest.approx(float(exact), rel=3e-7) and noise == pytest.approx(float(1 - exact), rel=3e-7)
    assert (schedule.alpha(1.0) == eps) and (schedule.alpha(0.0) == 1) and (schedule.one_minus_alpha(0.0) == 0)


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.3])
def test_weight_and_reveal_probability_are_those_of_the_process(eps: float) -> None:
    schedule, t, s = LogLinearSchedule(eps), 0.7, 0.4
    assert masked_nelbo_weight(t) == pytest.approx(-schedule.alpha_derivative / schedule.one_minus_alpha(t), rel=1e-12)
    assert reveal_probability(t, s) == pytest.approx((schedule.alpha(s) - schedule.alpha(t)) / (1 - schedule.alpha(t)), rel=1e-12)


def test_reverse_steps_compose() -> None:
    """Staying masked through many steps is as likely as through one; the step to 0 reveals everything."""
    grid = torch.linspace(1, 0.25, 76, dtype=torch.float64)
    stays = (1 - reveal_probability(grid[:-1], grid[1:])).prod()
    assert stays.item() == pytest.approx(1 - reveal_probability(1.0, 0.25), rel=1e-12)
    assert reveal_probability(0.01, 0.0) == 1


def test_an_impossible_schedule_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="0 <= e < 1, got 1"):
        LogLinearSchedule(1.0)
