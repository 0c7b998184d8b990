"""Eso-LM's noise schedule, which the objective and the samplers share. Torch only.

Diffusion starts from nothing but masks at t = 1 and stops at t = 0 with a share alpha_0 of the tokens revealed; what is still masked
then is for the sequential phase. Notation of "Esoteric Language Models" (Sahoo et al. 2025, arXiv 2506.01928).
"""

from dataclasses import dataclass

from .diffusion_math import LogLinearSchedule, Real


@dataclass(frozen=True)
class PartialSchedule:
    """alpha_t = alpha_0 (1 - (1 - e) t). alpha_0 = 1 is MDLM's schedule; a bound on the likelihood needs e = 0.

    As there, 1 - alpha_t is never computed from alpha_t, so that both keep full relative precision.
    """

    alpha_0: float
    eps: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha_0 <= 1:
            raise ValueError(f"Eso-LM's schedule needs 0 <= alpha_0 <= 1, got {self.alpha_0}")
        LogLinearSchedule(self.eps)  # refuses an impossible e here, not at the first use

    def alpha(self, t: Real) -> Real:
        """Probability that a token is clean at t."""
        return self.alpha_0 * self._whole.alpha(t)

    def one_minus_alpha(self, t: Real) -> Real:
        """Probability that a token is masked at t."""
        return (1 - self.alpha_0) + self.alpha_0 * self._whole.one_minus_alpha(t)

    @property
    def alpha_derivative(self) -> float:
        """d alpha / dt, the same at every t."""
        return self.alpha_0 * self._whole.alpha_derivative

    def nelbo_weight(self, t: Real) -> Real:
        """-alpha'_t / (1 - alpha_t), the weight of a masked position's cross-entropy in the diffusion term; 1/t at alpha_0 = 1."""
        return -self.alpha_derivative / self.one_minus_alpha(t)

    def reveal_probability(self, t: Real, s: Real) -> Real:
        """(alpha_s - alpha_t) / (1 - alpha_t): the chance that a position masked at t is revealed by the reverse step to s < t."""
        return -self.alpha_derivative * (t - s) / self.one_minus_alpha(t)

    @property
    def _whole(self) -> LogLinearSchedule:
        return LogLinearSchedule(self.eps)
