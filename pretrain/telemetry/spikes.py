"""Spikes of the loss, judged at equal diffusion time: a batch that drew small t has a high loss and is no spike.

Each part of the t axis (and what has no time) keeps a running mean and deviation of its loss per token. The residual of a part is standardised
by its deviation and the tokens that it saw, and limited, so that no few parts decide; the statistic of a step is the sum of residuals over
the root of their number. Losses are heavier in the tail than a normal distribution, so the statistic must be extreme in its own history too.

Running values are winsorised: an observation counts as at most three deviations from the mean, so a spike hardly moves what it is judged by,
while a level that stays is accepted after some time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LIMIT = 3.0
"""Deviations at which an observation is winsorised."""
MEMORY = 100
"""Observations that a running value remembers: its weight of a new one is 1 / MEMORY."""


class Running:
    """Winsorised mean and variance of a sequence whose observation i has variance (variance / weight_i)."""

    def __init__(self, count: int = 0, mean: float = 0.0, variance: float = 0.0) -> None:
        self.count, self.mean, self.variance = count, mean, variance

    def standardised(self, value: float, weight: float = 1.0) -> float:
        """Deviations of `value` from the mean."""
        return (value - self.mean) / self._deviation(weight)

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count an observation."""
        self.count += 1
        share = 1 / min(self.count, MEMORY)
        if self.count > 10:  # before that there is no deviation to speak of
            limit = LIMIT * self._deviation(weight)
            value = min(max(value, self.mean - limit), self.mean + limit)
        difference = value - self.mean
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference**2 * weight)

    def _deviation(self, weight: float) -> float:
        """Never nothing, so that a value that has been constant may change."""
        return max(math.sqrt(self.variance / weight), 1e-4 * abs(self.mean), 1e-12)


class SpikeDetector:
    """Judges steps in their order. threshold: deviations of the statistic; warmup: observations before anything is called a spike."""

    def __init__(self, *, threshold: float, warmup: int) -> None:
        self._threshold, self._warmup = threshold, warmup
        self._parts: dict[int, Running] = {}
        self._statistic = Running()

    def judge(self, losses: np.ndarray, tokens: np.ndarray) -> float | None:
        """Deviations of a step whose parts have summed losses [K] (nats) and tokens [K], if it is a spike; None if not. Then it is counted."""
        residuals: list[float] = []
        for part in np.flatnonzero(tokens > 0).tolist():
            running = self._parts.setdefault(part, Running())
            value, weight = float(losses[part] / tokens[part]), float(tokens[part])
            if running.count >= self._warmup:
                residuals.append(running.standardised(value, weight))
            running.add(value, weight)
        if not residuals:
            return None
        limit = 3 * self._threshold / math.sqrt(len(residuals))  # a third of the parts must be as far off as can be
        statistic = sum(min(max(z, -limit), limit) for z in residuals) / math.sqrt(len(residuals))
        score = min(statistic, self._statistic.standardised(statistic)) if self._statistic.count >= self._warmup else -math.inf
        self._statistic.add(statistic)
        return score if score > self._threshold else None

    def state(self) -> dict[str, Any]:
        """JSON that `load` takes: a resumed run decides as the unbroken one does."""
        parts = {str(part): [r.count, r.mean, r.variance] for part, r in self._parts.items()}
        return {"parts": parts, "statistic": [self._statistic.count, self._statistic.mean, self._statistic.variance]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        parts: Mapping[str, Sequence[Any]] = state["parts"]
        self._parts = {int(part): Running(*values) for part, values in parts.items()}
        self._statistic = Running(*state["statistic"])
