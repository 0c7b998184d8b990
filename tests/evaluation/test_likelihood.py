"""Likelihood aggregation against closed forms."""

import math

import numpy as np
import pytest
from scipy import stats

from pretrain.errors import UserError
from pretrain.evaluation.likelihood import LikelihoodResult, estimate_likelihood, unigram_entropy
from pretrain.validation import validation_record


def result(nats: float, low: float, high: float, label: str = "bound") -> LikelihoodResult:
    return LikelihoodResult(label=label, nats_per_token=nats, ci_low=low, ci_high=high, tokens=8192, sequences=128, draws=1)  # type: ignore[arg-type]


def test_equal_lengths_give_students_interval_of_the_mean() -> None:
    """With equal lengths the ratio estimator is the sample mean: scipy's t interval."""
    per_token = np.random.default_rng(0).normal(4.0, 0.3, 20)
    found = estimate_likelihood(np.arange(20), per_token * 64, np.full(20, 64), label="exact")
    low, high = stats.t.interval(0.95, 19, loc=per_token.mean(), scale=stats.sem(per_token))
    assert (found.nats_per_token, found.ci_low, found.ci_high) == pytest.approx((per_token.mean(), low, high), rel=1e-12)
    assert (found.tokens, found.sequences, found.draws) == (20 * 64, 20, 1)
    assert found.perplexity == pytest.approx(math.exp(per_token.mean()))


def test_tokens_weigh_equally_whatever_the_lengths() -> None:
    found = estimate_likelihood(np.array([0, 1]), np.array([30.0, 2.0]), np.array([9, 1]), label="exact")
    assert found.nats_per_token == pytest.approx(3.2)
    # residuals 30 - 28.8 and 2 - 3.2: standard error sqrt(2 * (1.44 + 1.44)) / 10
    assert found.ci_high - found.nats_per_token == pytest.approx(12.7062047 * math.sqrt(5.76) / 10)


def test_draws_are_averaged_before_sequences_are_compared() -> None:
    """Noise that differs between draws but not on average adds nothing; order and fillers do not matter; tokens count once."""
    nats = np.array([[10.0, 14.0], [20.0, 28.0], [12.0, 12.0]])
    ids = np.array([[0, 0], [1, 1], [2, 2]])
    order = np.random.default_rng(1).permutation(6)
    several = estimate_likelihood(
        np.append(ids.ravel()[order], -1), np.append(nats.ravel()[order], 99.0), np.append(np.full(6, 8), 0), label="bound"
    )
    once = estimate_likelihood(np.arange(3), nats.mean(1), np.full(3, 8), label="bound")
    assert (several.nats_per_token, several.ci_low) == pytest.approx((once.nats_per_token, once.ci_low))
    assert (several.tokens, several.sequences, several.draws) == (24, 3, 2)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Texts of random length with a known mean: 95% coverage within Monte-Carlo error."""
    random, hits = np.random.default_rng(2), 0
    for _ in range(1000):
        tokens = random.integers(8, 64, 40)
        found = estimate_likelihood(np.arange(40), tokens * 3.0 + random.normal(0, np.sqrt(tokens)), tokens, label="exact")
        hits += found.ci_low < 3.0 < found.ci_high
    assert 0.93 < hits / 1000 < 0.97


def test_words() -> None:
    assert str(result(math.log(61.2), math.log(60.1), math.log(62.3))) == "perplexity 61.2 (bound, 95% CI 60.1-62.3)"
    assert str(result(math.log(2.345), math.log(2.2), math.log(2.5), "exact")) == "perplexity 2.35 (exact, 95% CI 2.20-2.50)"
    assert str(result(10.0, 9.9, 10.1, "estimate")) == "perplexity 22,026 (estimate, 95% CI 19,930-24,343)"
    assert str(result(2.5, 2.4, 2.6, "not_a_likelihood")) == "2.5000 nats/token (not_a_likelihood, 95% CI 2.4000-2.6000)"
    assert "perplexity inf" in str(result(1e4, 9e3, 2e4))
    for nats, told in ((math.nan, "nan"), (math.inf, "inf")):
        for label in ("bound", "not_a_likelihood"):
            diverged = result(nats, math.nan, math.nan, label)
            assert str(diverged) == f"no perplexity ({label}): the loss of the held-out text is {told}, the model has diverged"
            assert diverged.describe() == f"{diverged}; 8,192 tokens in 128 sequences"
    assert str(estimate_likelihood([0], [7.0], [7], label="exact")) == "perplexity 2.72 (exact, no CI from 1 sequence)"
    assert estimate_likelihood([0], [7.0], [7], label="exact").describe().endswith("; 1.0000 nats/token over 7 tokens in 1 sequence")
    assert result(2.5, 2.4, 2.6).describe().endswith("; 2.5000 nats/token over 8,192 tokens in 128 sequences; the interval is over "
                                                    "the choice of held-out text and noise (1 per sequence)")
    assert result(2.5, 2.4, 2.6, "exact").describe().endswith("the interval is over the choice of held-out text")


def test_nothing_scored() -> None:
    with pytest.raises(UserError, match="no token of the held-out text was scored"):
        estimate_likelihood(np.array([-1, 0]), np.zeros(2), np.zeros(2, dtype=int), label="exact")
    with pytest.raises(ValueError, match="different numbers of tokens"):
        estimate_likelihood(np.array([0, 0]), np.zeros(2), np.array([3, 4]), label="bound")


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([3, 0])) == 0
    counts = np.random.default_rng(0).integers(0, 50, 300)
    assert unigram_entropy(counts) == pytest.approx(stats.entropy(counts))
    with pytest.raises(UserError, match="empty text"):
        unigram_entropy(np.zeros(4))


def test_importance_samples_are_combined_as_probabilities() -> None:
    """-log of the mean of exp(-nats) in each group, then the mean over groups: by hand, and below the plain mean (Jensen)."""
    nats = np.array([[1.0, 3.0, 2.0, 2.0], [4.0, 4.0, 9.0, 5.0]])
    ids = np.repeat([0, 1], 4)
    found = estimate_likelihood(np.append(ids, -1), np.append(nats.ravel(), 7.0), np.append(np.full(8, 2), 0), label="bound", importance=2)
    groups = -np.log(np.exp(-nats.reshape(2, 2, 2)).mean(-1))
    assert found.nats_per_token == pytest.approx(groups.mean(1).sum() / 4)
    assert found.nats_per_token < estimate_likelihood(ids, nats.ravel(), np.full(8, 2), label="bound").nats_per_token
    assert found.draws == 2 and found.sequences == 2
    with pytest.raises(ValueError, match="whole groups of 3"):
        estimate_likelihood(np.repeat([0, 1], [4, 5]), np.zeros(9), np.full(9, 2), label="bound", importance=3)


def test_a_validation_record_says_what_a_whole_sequence_costs() -> None:
    """Sequences of 2, 3 and 5 tokens and of 4, 6 and 8 nats: 18 nats over 10 tokens, and 6 nats each, however often noise was drawn."""
    ids, nats, tokens = np.repeat(np.arange(3), 2), np.array([3.0, 5.0, 6.0, 6.0, 7.0, 9.0]), np.repeat([2, 3, 5], 2)
    record = validation_record(0, estimate_likelihood(ids, nats, tokens, label="bound"))
    assert record["nelbo_nats_per_token"] == pytest.approx(1.8) and record["nats_per_sequence"] == pytest.approx(6.0)
