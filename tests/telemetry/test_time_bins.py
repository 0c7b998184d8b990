"""Bins against sums written out by hand."""

import pytest

from pretrain.telemetry.time_bins import TimeBins


def test_a_bin_divides_sums_by_tokens_and_squares_by_samples() -> None:
    bins = TimeBins()
    bins.sums[1] += (1, 10, 20.0, 40.0, 9.0)  # two micro-batches of one bin
    bins.sums[1] += (1, 30, 20.0, 40.0, 16.0)
    bins.sums[9] += (1, 5, 15.0, 30.0, 1.0)
    low, high = bins.records()
    assert low == pytest.approx({"low": 0.1, "high": 0.2, "samples": 2, "loss": 1.0, "nelbo": 2.0, "logit_gradient_norm": 12.5**0.5})
    assert high == pytest.approx({"low": 0.9, "high": 1.0, "samples": 1, "loss": 3.0, "nelbo": 6.0, "logit_gradient_norm": 1.0})


def test_empty_bins_make_no_records_and_a_bin_without_tokens_no_division_by_zero() -> None:
    bins = TimeBins()
    assert bins.records() == []
    bins.sums[0] += (1, 0, 0.0, 0.0, 0.0)
    assert bins.records() == [{"low": 0.0, "high": 0.1, "samples": 1, "loss": 0.0, "nelbo": 0.0, "logit_gradient_norm": 0.0}]
