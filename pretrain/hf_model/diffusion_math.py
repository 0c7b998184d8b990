"""The mathematics that objectives and samplers share: noise schedule, diffusion times, weights and reverse steps. Torch only.

Everything is arithmetic on a float or a tensor of any shape, so the loader uses it on numbers and a sampler on batches.
Notation of MDLM (Sahoo et al. 2024): a token is still clean at time t with probability alpha_t, from alpha_0 = 1 down to alpha_1 = e.
"""

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Real = TypeVar("Real", float, Tensor)


@dataclass(frozen=True)
class LogLinearSchedule:
    """alpha_t = 1 - (1 - e) t. The authors' runs use e = 1e-3; e = 0 destroys everything at t = 1, which a likelihood bound needs.

    Each form below keeps full relative precision at both ends: 1 - alpha_t is never computed from alpha_t, nor alpha_t from 1 - alpha_t.
    """

    eps: float

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise ValueError(f"the log-linear schedule needs 0 <= e < 1, got {self.eps}")

    def alpha(self, t: Real) -> Real:
        """Probability that a token is clean at t."""
        return (1 - t) + self.eps * t

    def one_minus_alpha(self, t: Real) -> Real:
        """Probability that a token is noise at t."""
        return (1 - self.eps) * t

    @property
    def alpha_derivative(self) -> float:
        """d alpha / dt, the same at every t."""
        return -(1 - self.eps)


def training_time(u: Real, time_eps: float) -> Real:
    """u in [0, 1) to t in [time_eps, 1): the authors' truncation, which leaves a small part of the likelihood out."""
    return (1 - time_eps) * u + time_eps


def bound_time(u: Real) -> Real:
    """u in [0, 1) to t in (0, 1]: the whole range, without the point where the weight 1/t has no value."""
    return 1 - u


def masked_nelbo_weight(t: Real) -> Real:
    """-alpha'_t / (1 - alpha_t), the weight of a masked position's cross-entropy in the NELBO: 1/t for a log-linear schedule, whatever its e."""
    return 1 / t


def reveal_probability(t: Real, s: Real) -> Real:
    """(alpha_s - alpha_t) / (1 - alpha_t): the chance that a position masked at t is revealed by the reverse step to s < t.

    (t - s)/t for a log-linear schedule, whatever its e. Revealed, the position draws from the denoiser; clean positions are carried over.
    """
    return (t - s) / t
