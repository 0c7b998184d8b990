"""From nats per sequence to a labelled likelihood with a confidence interval.

The estimator is the ratio sum(nats) / sum(tokens) over sequences, each sequence's nats averaged over its noise draws first. Its interval
treats sequences as independent samples of text (and, for diffusion, of noise): the linearised variance of a ratio with Student's t.
Diffusion times stratified over a batch make the noise's part of it conservative.

Shape suffixes: R records (a sequence and a noise draw), N sequences, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pretrain.errors import UserError

if TYPE_CHECKING:
    from pretrain.objectives.base import Label

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class LikelihoodResult:
    """A likelihood in nats per token.

    label             what the number may be called: exact, bound, estimate or not_a_likelihood.
    ci_low, ci_high   95% confidence interval of nats_per_token; nan when there is only one sequence.
    tokens            tokens of the text, each counted once however often noise was drawn.
    sequences, draws  sequences, and noise draws of each.
    """

    label: Label
    nats_per_token: float
    ci_low: float
    ci_high: float
    tokens: int
    sequences: int
    draws: int

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return perplexity_of(self.nats_per_token)

    @property
    def perplexity_interval(self) -> tuple[float, float]:
        """The confidence interval on the scale of perplexity."""
        return perplexity_of(self.ci_low), perplexity_of(self.ci_high)

    def __str__(self) -> str:
        """For example: perplexity 61.2 (bound, 95% CI 60.1-62.3). What is no likelihood is given in nats: it has no perplexity."""
        if not math.isfinite(self.nats_per_token):
            return f"no perplexity ({self.label}): the loss of the held-out text is {self.nats_per_token}, the model has diverged"
        if self.label == "not_a_likelihood":
            return f"{self.nats_per_token:.4f} nats/token ({self.label}, {_interval(self.ci_low, self.ci_high, '.4f', self.sequences)})"
        digits = _format(self.perplexity)
        return f"perplexity {self.perplexity:{digits}} ({self.label}, {_interval(*self.perplexity_interval, digits, self.sequences)})"

    def describe(self) -> str:
        """`str` with nats, amount of text, and what the interval is about."""
        text = f"{self.tokens:,} tokens in {self.sequences:,} sequence{'s' if self.sequences > 1 else ''}"
        if not math.isfinite(self.nats_per_token):
            return f"{self}; {text}"
        nats = "" if self.label == "not_a_likelihood" else f"; {self.nats_per_token:.4f} nats/token"
        if math.isnan(self.ci_low):
            return f"{self}{nats} over {text}"
        over = "the choice of held-out text" if self.label == "exact" else f"the choice of held-out text and noise ({self.draws} per sequence)"
        return f"{self}{nats} over {text}; the interval is over {over}"


def estimate_likelihood(
    sequence_ids_R: np.ndarray, nats_R: np.ndarray, tokens_R: np.ndarray, *, label: Label, importance: int = 1
) -> LikelihoodResult:
    """Aggregate records, in any order; those with a negative sequence id (fillers of the last batch) are left out.

    sequence_ids_R  which sequence a record belongs to; its noise draws share the number.
    nats_R          each record's negative log-likelihood or its bound, summed over the sequence.
    tokens_R        scored tokens of the sequence, the same in each of its records.
    importance      consecutive records of a sequence, in groups of this many, are importance samples of its likelihood: each group counts as
                    one draw of -log mean exp(-nats), which is at most, and with more samples tighter than, the mean of the group.

    Raises UserError when no token was scored, ValueError when a sequence's records disagree about its tokens.
    """
    real_R = np.asarray(sequence_ids_R) >= 0
    ids_R, nats_R, tokens_R = (np.asarray(a)[real_R] for a in (sequence_ids_R, nats_R, tokens_R))
    if importance > 1:
        ids_R, nats_R, tokens_R = _combined(ids_R, nats_R, tokens_R, importance)
    _, first_N, sequence_R, draws_N = np.unique(ids_R, return_index=True, return_inverse=True, return_counts=True)
    tokens_N = tokens_R[first_N].astype(np.float64)
    if (tokens_R != tokens_N[sequence_R]).any():
        raise ValueError("the draws of one sequence have different numbers of tokens")
    nats_N = np.bincount(sequence_R, weights=np.asarray(nats_R, dtype=np.float64), minlength=len(first_N)) / draws_N
    nats_N, draws_N, tokens_N = nats_N[tokens_N > 0], draws_N[tokens_N > 0], tokens_N[tokens_N > 0]
    if not len(tokens_N):
        raise UserError("no token of the held-out text was scored: a likelihood needs at least one; give a validation source with longer documents")
    mean, half = _ratio(nats_N, tokens_N)
    return LikelihoodResult(
        label=label,
        nats_per_token=mean,
        ci_low=mean - half,
        ci_high=mean + half,
        tokens=int(tokens_N.sum()),
        sequences=len(tokens_N),
        draws=int(draws_N.min()),
    )


def _combined(ids_R: np.ndarray, nats_R: np.ndarray, tokens_R: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups of `size` consecutive records of one sequence as one record each."""
    from scipy.special import logsumexp  # 10 MiB of every rank: not before the first validation

    order_R = np.argsort(ids_R, kind="stable")
    ids_GS, nats_GS, tokens_GS = (values[order_R].reshape(-1, size) for values in (ids_R, np.asarray(nats_R, np.float64), tokens_R))
    if (ids_GS != ids_GS[:, :1]).any():
        raise ValueError(f"a sequence's records do not make whole groups of {size}")
    return ids_GS[:, 0], -(logsumexp(-nats_GS, axis=1) - math.log(size)), tokens_GS[:, 0]


def perplexity_of(nats: float) -> float:
    """exp(nats per token); inf past the range of a double, since a diverged model must still be reported."""
    return math.exp(nats) if not nats > 709.0 else math.inf


def unigram_entropy(counts_V: np.ndarray) -> float:
    """Nats per token of the best unigram model of a text, fitted to that very text: no unigram model does better on it.

    A model whose bound on the same text is lower has learned more than frequencies. Raises UserError on an empty text.
    """
    counts = np.asarray(counts_V, dtype=np.float64)
    if counts.sum() == 0:
        raise UserError("the unigram entropy of an empty text is undefined; give a text with at least one token")
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def _ratio(nats_N: np.ndarray, tokens_N: np.ndarray) -> tuple[float, float]:
    """sum(nats) / sum(tokens), and half the width of its confidence interval: t * sqrt(n/(n-1) sum (y - R x)^2) / sum(x)."""
    from scipy.special import stdtrit

    n = len(nats_N)
    mean = float(nats_N.sum() / tokens_N.sum())
    if n == 1:
        return mean, math.nan
    error = math.sqrt(n / (n - 1) * float(np.square(nats_N - mean * tokens_N).sum())) / float(tokens_N.sum())
    return mean, float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error


def _format(value: float) -> str:
    """Three significant digits below 1000, whole numbers with separators to a million, then powers of ten."""
    if not value < 1e6:
        return ".3g"
    return ",.0f" if value >= 1000 else f".{max(0, 2 - math.floor(math.log10(max(value, 1.0))))}f"


def _interval(low: float, high: float, spec: str, sequences: int) -> str:
    if math.isnan(low):
        return "no CI from 1 sequence" if sequences == 1 else "no CI"
    return f"{CONFIDENCE:.0%} CI {format(low, spec)}-{format(high, spec)}"
