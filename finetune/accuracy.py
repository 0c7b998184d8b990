"""Accuracy with its confidence interval, and the comparison of two models on the same problems."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import binomtest, norm

Method = Literal["Wilson", "Clopper-Pearson"]
_SCIPY = {"Wilson": "wilson", "Clopper-Pearson": "exact"}


@dataclass(frozen=True)
class Accuracy:
    """Correct answers among so many problems, with an interval for the share over problems of the same kind.

    method  Wilson: covers close to its confidence on average. Clopper-Pearson: at least its confidence, so wider.
    """

    correct: int
    total: int
    low: float
    high: float
    method: Method
    confidence: float

    @property
    def share(self) -> float:
        """The accuracy."""
        return self.correct / self.total

    def __str__(self) -> str:
        interval = f"{100 * self.low:.1f}-{100 * self.high:.1f}"
        return f"{100 * self.share:.1f}% ({self.correct} of {self.total}; {100 * self.confidence:g}% {self.method} interval {interval}%)"


def accuracy(correct: int, total: int, *, method: Method = "Wilson", confidence: float = 0.95) -> Accuracy:
    """ValueError without problems, or with more correct answers than problems."""
    if not 0 <= correct <= total or total < 1:
        raise ValueError(f"{correct} correct answers of {total} problems")
    interval = binomtest(correct, total).proportion_ci(confidence, method=_SCIPY[method])
    return Accuracy(correct, total, float(interval.low), float(interval.high), method, confidence)


@dataclass(frozen=True)
class Comparison:
    """Two models on the same problems: `only_first` were solved by the first alone, and so on.

    difference  accuracy of the first minus that of the second, with its interval (Agresti and Min 2005: Wald with half a problem added to each cell).
    p_value     McNemar's exact two-sided test of equal accuracies: the problems that one model alone solved, as coin flips.
    """

    both: int
    only_first: int
    only_second: int
    neither: int
    difference: float
    low: float
    high: float
    p_value: float
    confidence: float

    def __str__(self) -> str:
        interval = f"{100 * self.confidence:g}% interval {100 * self.low:+.1f} to {100 * self.high:+.1f}"
        return f"{100 * self.difference:+.1f} points ({interval}; McNemar exact p = {self.p_value:.3g}; {self.only_first} against {self.only_second})"


def compare(first: Sequence[bool], second: Sequence[bool], *, confidence: float = 0.95) -> Comparison:
    """Compare the correctness of two models, problem by problem. ValueError for unequal or no problems."""
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} results cannot be paired")
    pairs = list(zip(first, second, strict=True))
    both, only_first, only_second, neither = (pairs.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False)))
    discordant, total = only_first + only_second, len(pairs)
    p_value = float(binomtest(only_first, discordant).pvalue) if discordant else 1.0
    centre = (only_first - only_second) / (total + 2)
    spread = (discordant + 1) / (total + 2) - centre**2
    half = float(norm.ppf((1 + confidence) / 2)) * math.sqrt(spread / (total + 2))
    difference = (only_first - only_second) / total
    low, high = max(-1.0, centre - half), min(1.0, centre + half)
    return Comparison(both, only_first, only_second, neither, difference, low, high, p_value, confidence)
