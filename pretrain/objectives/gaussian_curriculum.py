"""Duo's Gaussian curriculum: "The Diffusion Duality" (Sahoo et al. 2025), in the top-k form of its Chapter II.

Behind the uniform-state process stands a Gaussian one. With log noise-to-signal ratio gamma, signal a = sqrt(sigmoid(-gamma)) and noise
s = sqrt(sigmoid(gamma)), the K numbers w = a onehot(x) + s N(0, 1) have an argmax z with exactly the uniform-state law

    P(z = v) = alpha [v = x] + (1 - alpha) / K,    alpha = T(gamma) = (K P - 1) / (K - 1),    P = integral phi(u - mu) Phi(u)^(K-1) du,

mu = a / s = exp(-gamma / 2): P is the chance that the token's own number is the largest. While the curriculum lasts the network reads
softmax(w / tau) in the place of z, which makes early training easier. That tells it more than z does: no number of such a draw is a likelihood.

Only the k largest entries of w are drawn, never all K. The K - 1 other ids are exchangeable: their numbers are order statistics, and
which ids those belong to is a uniform draw without replacement. The softmax's denominator holds the numbers that are drawn (the k largest
of the others and the token's own, kept or displaced) and the *expected* exponentials of the rest given that they lie below the k-th.

Shape suffixes: L positions, k kept entries of the softened input, U nodes of the quadrature.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, expit, log_ndtr, ndtri_exp

from pretrain.errors import UserError
from pretrain.hf_model.uniform_diffusion import NoiseLevel
from pretrain.objectives.config import DuoConfig

LOWEST_GAMMA = -5.0
"""Below it 1 - T(gamma) is under 1e-10 even for a million ids: there is no noise to learn from. The nodes of the quadrature end there."""


@dataclass(frozen=True)
class SoftDraw:
    """noisy_L: the argmax of w. ids_Lk, weights_Lk: its kept entries after the softmax; the weights miss the mass of the entries left out."""

    noisy_L: np.ndarray
    ids_Lk: np.ndarray
    weights_Lk: np.ndarray


@final
class Duality:
    """T and its derivative for K = `classes` ids, by the trapezoidal rule on the whole line, which converges geometrically here.

    The table holds, at fixed nodes u, what does not depend on gamma: Phi(u)^(K-1), one minus it, and its derivative. A value of T costs
    one exponential per node and is right to rounding, so nothing is interpolated.
    """

    def __init__(self, classes: int) -> None:
        step = 1 / 32
        self.classes = classes
        self._u_U = np.arange(-10.0, np.exp(-LOWEST_GAMMA / 2) + 10, step)
        log_below_U = log_ndtr(self._u_U)
        log_density_U = -(self._u_U**2) / 2 - np.log(2 * np.pi) / 2
        self._table_3U = step * np.array([
            np.exp((classes - 1) * log_below_U),
            -np.expm1((classes - 1) * log_below_U),
            (classes - 1) * np.exp((classes - 2) * log_below_U + log_density_U),
        ])  # fmt: skip

    def level(self, gamma: float) -> tuple[float, float, float]:
        """T(gamma), 1 - T(gamma) and dT / d gamma, for gamma >= LOWEST_GAMMA."""
        if gamma < LOWEST_GAMMA:
            raise ValueError(f"gamma = {gamma} is below {LOWEST_GAMMA}, where the process has no noise")
        mu, classes = np.exp(-gamma / 2), self.classes
        # dP / d mu = integral phi(u - mu) d/du Phi(u)^(K-1) du, by parts; d mu / d gamma = -mu / 2.
        wins, loses, slope = self._table_3U @ np.exp(-((self._u_U - mu) ** 2) / 2) / np.sqrt(2 * np.pi)
        share = classes / (classes - 1)
        return float(share * (wins - 1 / classes)), float(share * loses), float(-share * slope * mu / 2)

    def gamma_of(self, alpha: float) -> float:
        """The gamma with T(gamma) = alpha."""
        return float(brentq(lambda gamma: self.level(gamma)[0] - alpha, LOWEST_GAMMA, 20.0, xtol=1e-12))


@lru_cache(maxsize=8)
def duality(classes: int) -> Duality:
    """The table for K = `classes`, made once."""
    return Duality(classes)


@final
class GaussianCurriculum:
    """The constants of a run's curriculum, at work. Raises UserError where they do not fit the vocabulary."""

    def __init__(self, classes: int, config: DuoConfig) -> None:
        if config.top_k >= classes:
            raise UserError(f"objective.duo.top_k={config.top_k} must be below the model's {classes} ids; use objective.duo.top_k={classes - 1}")
        self.config = config
        self.duality = duality(classes)
        self.gamma_min = self.duality.gamma_of(0.95) if config.gamma_min is None else config.gamma_min
        self.gamma_max = self.duality.gamma_of(0.05) if config.gamma_max is None else config.gamma_max
        if self.gamma_min >= self.gamma_max:
            raise UserError(
                f"objective.duo.gamma_min={self.gamma_min:.4g} must be below objective.duo.gamma_max={self.gamma_max:.4g} (one of them follows from "
                f"the {classes} ids of the model); leave both out"
            )

    def active(self, step: int) -> bool:
        """Whether the network reads softened inputs at this optimizer step."""
        return self.config.curriculum == "topk" and step < self.config.curriculum_end

    def tau(self, step: int) -> float:
        """Temperature of the softmax: linear in its logarithm between the curriculum's start and end, constant outside."""
        config = self.config
        log10_tau = np.interp(step, (config.curriculum_start, config.curriculum_end), (config.log10_tau_start, config.log10_tau_end))
        return float(10.0**log10_tau)

    def gamma(self, t: float) -> float:
        """gamma_t, linear in t."""
        return self.gamma_min + t * (self.gamma_max - self.gamma_min)

    def level(self, t: float) -> NoiseLevel:
        """The uniform-state process that the argmax of w at gamma_t follows."""
        alpha, one_minus_alpha, slope = self.duality.level(self.gamma(t))
        return NoiseLevel(alpha, one_minus_alpha, slope * (self.gamma_max - self.gamma_min))

    def draw(self, tokens_L: np.ndarray, t: float, step: int, generator: np.random.Generator) -> SoftDraw:
        """Noise every token at time t."""
        return draw_top_k(tokens_L, self.duality.classes, self.config.top_k, self.gamma(t), self.tau(step), generator)


def draw_top_k(tokens_L: np.ndarray, classes: int, k: int, gamma: float, tau: float, generator: np.random.Generator) -> SoftDraw:
    """w at each position, of which the k largest entries are kept. 1 <= k < classes; float64 until the weights, which are float32."""
    length, others = len(tokens_L), classes - 1
    a, s = np.sqrt(expit(-gamma)), np.sqrt(expit(gamma))
    # Falling order statistics of `others` uniforms: -log U_(r) adds up exponentials of rates others, others - 1, ...
    log_uniform_Lk = -np.cumsum(generator.standard_exponential((length, k)) / (others - np.arange(k)), axis=1)
    standard_Lk = ndtri_exp(log_uniform_Lk)
    own_L = a + s * generator.standard_normal(length)
    ids_Lk = distinct_ids(others, k, length, generator)
    ids_Lk += ids_Lk >= tokens_L[:, None]
    value_Lk = s * standard_Lk

    # z is the token only where its number is the largest of all. The authors' code says so wherever it is among the k kept ones, which
    # happens more often than alpha allows (0.31 in place of 0.24 at gamma = -2.5, K = 50257, k = 2).
    noisy_L = np.where(own_L > value_Lk[:, 0], tokens_L, ids_Lk[:, 0])

    highest_L = np.maximum(value_Lk[:, 0], own_L)
    score_Lk = (value_Lk - highest_L[:, None]) / tau
    own_score_L = (own_L - highest_L) / tau
    rest_L = score_Lk[:, -1] + log_expected_rest(standard_Lk[:, -1], s / tau, others - k)
    log_total_L = np.log(np.exp(score_Lk).sum(1) + np.exp(own_score_L) + np.exp(rest_L))
    kept_L = own_L > value_Lk[:, -1]
    ids_Lk[:, -1] = np.where(kept_L, tokens_L, ids_Lk[:, -1])
    score_Lk[:, -1] = np.where(kept_L, own_score_L, score_Lk[:, -1])
    return SoftDraw(noisy_L, ids_Lk, np.exp(score_Lk - log_total_L[:, None]).astype(np.float32))


def distinct_ids(size: int, k: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """[L, k] int64: at each position a uniform draw of k different ids below `size`, in a uniformly random order.

    Floyd's algorithm gives the uniform *set*, but its last entries are more often the highest ids; the shuffle mends the order.
    """
    ids_kL = np.empty((k, length), dtype=np.int64)
    for row, highest in enumerate(range(size - k, size)):
        drawn_L = generator.integers(0, highest + 1, size=length)
        taken_L = (ids_kL[:row] == drawn_L).any(0)
        ids_kL[row] = np.where(taken_L, highest, drawn_L)
    return generator.permuted(ids_kL.T, axis=1)


def log_expected_rest(bound_L: np.ndarray, s: float, count: int) -> np.ndarray:
    """log of the expected sum of `count` exp(s (Z - b)), Z standard normal given Z < b: log(count) + s^2/2 - s b + log(Phi(b - s) / Phi(b)).

    With the scaled complementary error function, because at tau = 1e-3 the terms of that formula are 10^5 and cancel.
    """
    if count == 0:
        return np.full_like(bound_L, -np.inf)
    return np.log(count / 2) - bound_L**2 / 2 + np.log(erfcx((s - bound_L) / np.sqrt(2))) - log_ndtr(bound_L)
