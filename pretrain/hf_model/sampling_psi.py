"""Reverse steps of uniform-state diffusion: ancestral ones, and the psi family ("The Diffusion Duality, Chapter II"), which also corrects.

A step from t to s <= t draws z_s at every position, independently given the network's p for the clean token there, from

    kappa q(z_s | z_t, p)  +  (1 - kappa) q_s(z_s | x0),    x0 = q(z_0 | z_t, p):

the posterior (`uniform_posterior`), or a guess at the clean text that is noised again down to s. kappa = 1 is ancestral sampling, kappa = 0
predicts and corrects only. x0 is p weighed by what z_t says, and not p itself, which for this process is the posterior given the *other*
positions and would forget z_t at every correction.

A correction guesses every position apart from the others. So while ancestral steps with the exact p sample the data as their number grows, steps
that all keep kappa below the same number less than 1 end a little beside it; what they are for is a p that is not exact.

Both laws only ever keep z_t, draw from p, or draw from all K ids, so a step is a choice among the three, and of p it needs p at z_t alone to
choose. Times stand for noise levels, alpha_t = 1 - t: a process that begins as pure noise at t = 1 and ends clean at t = 0.

Shape suffixes: N positions, K every id of the vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .sampling_draw import inverse_cdf

Mode = Literal["constant", "remdm", "max_capped", "max_rescaled"]


@dataclass(frozen=True)
class ReverseStep:
    """From t to s, 0 <= s <= t <= 1, with kappa in [0, 1]."""

    t: float
    s: float
    kappa: float

    @property
    def alpha_t(self) -> float:
        """Share of tokens that the step finds clean."""
        return 1 - self.t

    @property
    def surely_kept(self) -> float:
        """The least probability of keeping z_t that any p can give: a smaller uniform number keeps it, and nobody need ask the network."""
        return self.kappa * self.alpha_t * self.s / ((1 - self.s) * self.t)

    def weights(self, p_z_N: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities [N] of keeping z_t, of a draw from p and of a draw from all `classes` ids, given p at z_t; float64."""
        evidence_N = classes * self.alpha_t * p_z_N.double()
        total_N, alpha_s, correct = evidence_N + self.t, 1 - self.s, 1 - self.kappa
        keep_N = self.kappa * (evidence_N + self.alpha_t * self.s / alpha_s) + correct * alpha_s * evidence_N
        redraw = self.kappa * (self.t - self.s) + correct * alpha_s * self.t
        noise_N = self.kappa * (self.t - self.s) * self.s / alpha_s + correct * self.s * total_N
        return keep_N / total_N, redraw / total_N, noise_N / total_N

    def draw(self, p_NK: Tensor, z_N: Tensor, choice_N: Tensor, value_N: Tensor) -> Tensor:
        """z_s [N] from p and z_t, with one uniform number for the choice among the three and another for the draw."""
        classes = p_NK.shape[-1]
        keep_N, redraw_N, noise_N = self.weights(p_NK.gather(-1, z_N[:, None])[:, 0], classes)
        # Rounding must not reach a draw from all ids where there is none: the mask is among them.
        noise_N = (choice_N >= keep_N + redraw_N) & (noise_N > 0)
        redraw_N = (choice_N >= keep_N) & ~noise_N
        drawn_N = torch.where(noise_N, random_ids(value_N, classes), z_N)
        drawn_N[redraw_N] = inverse_cdf(p_NK[redraw_N], value_N[redraw_N])
        return drawn_N


def random_ids(uniform_N: Tensor, classes: int) -> Tensor:
    """One of all ids for each uniform number in [0, 1), float64; any shape. The product never rounds up to `classes`."""
    return (uniform_N * classes).long()


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Noise that falls, waits and falls again, as in ReMDM's loop: `rise` of the steps until a share `alpha` of the tokens is clean, then
    steps at that level, which only correct, and `fall` of the steps from there to the end."""

    alpha: float = 0.9
    rise: float = 0.45
    fall: float = 0.05

    def __post_init__(self) -> None:
        if not (0 < self.alpha < 1 and self.rise > 0 and self.fall > 0 and self.rise + self.fall < 1):
            raise ValueError(f"a loop waits at 0 < alpha < 1 and leaves steps to wait between its rise and its fall, got {self}")


@dataclass(frozen=True, kw_only=True)
class Psi:
    """Which member of the family. The default is ancestral sampling.

    mode  how kappa follows from eta. constant: kappa = eta. The others are those of ReMDM (Wang et al. 2025), whose sigma is the chance that a
          finished token is noised again: kappa = 1 - sigma / (1 - alpha_s), at least 0, with sigma = eta (remdm), min(eta, sigma_max)
          (max_capped; the same as remdm once kappa is held at 0), or eta min(1, sigma_max) (max_rescaled), sigma_max = (1 - alpha_s) / alpha_t.
          The authors' code for the last one computes eta min(eta, sigma_max): their eta is nearly the root of this one.
    loop  None: noise falls evenly. Otherwise the steps that wait use `mode`, and the others are ancestral.
    """

    mode: Mode = "constant"
    eta: float = 1.0
    loop: Loop | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode) or not 0 <= self.eta <= 1:
            raise ValueError(f"psi sampling takes a mode of {', '.join(get_args(Mode))} and eta in [0, 1], got {self.mode} and {self.eta}")
        if self.loop is not None and self.kappa(1 - self.loop.alpha, 1 - self.loop.alpha) == 1:
            raise ValueError(f"with mode {self.mode} and eta {self.eta} kappa is 1, and a loop that waits without correcting does nothing")

    def kappa(self, t: float, s: float) -> float:
        """Weight of the posterior in a step from t to s; at the end (s = 0) both laws are the same, and the ReMDM modes say 1."""
        if self.mode == "constant":
            return self.eta
        if s == 0:
            return 1.0
        largest = s / (1 - t) if t < 1 else float("inf")
        sigma = {"remdm": self.eta, "max_capped": min(self.eta, largest), "max_rescaled": self.eta * min(1.0, largest)}[self.mode]
        return max(0.0, 1 - sigma / s)

    def steps(self, steps: int, end: float = 0.0) -> list[ReverseStep]:
        """The whole way from t = 1 to t = `end`. Raises ValueError for too few steps: 1, or 3 with a loop."""
        if steps < (1 if self.loop is None else 3):
            raise ValueError(f"needs at least {1 if self.loop is None else 3} steps, got {steps}")
        if self.loop is None:
            times = _line(1.0, end, steps)
            return [ReverseStep(t, s, self.kappa(t, s)) for t, s in zip(times, times[1:], strict=False)]
        level = 1 - self.loop.alpha
        # Every part has a step at least.
        rise = min(max(1, round(self.loop.rise * steps)), steps - 2)
        fall = min(max(1, round(self.loop.fall * steps)), steps - rise - 1)
        ways = (_line(1.0, level, rise), _line(level, end, fall))
        first, last = ([ReverseStep(t, s, 1.0) for t, s in zip(way, way[1:], strict=False)] for way in ways)
        return first + [ReverseStep(level, level, self.kappa(level, level))] * (steps - rise - fall) + last


ANCESTRAL = Psi()


def _line(start: float, end: float, steps: int) -> list[float]:
    """steps + 1 times, evenly spaced, with both ends exact."""
    return [start + (end - start) * i / steps for i in range(steps)] + [end]
