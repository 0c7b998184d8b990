"""What an evaluation command takes. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass
from typing import Literal

from pretrain.errors import UserError

_RANGES = {"step": 2**63 - 1, "sequences": 10**12, "draws": 10**6, "ode_steps": 10**6, "ode_samples": 10**6, "batch": 2**16}


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How to score the held-out text of a run with one of its checkpoints.

    checkpoint      a run directory (runs/NAME): its newest complete checkpoint; or one checkpoint's folder.
    step            which checkpoint of the run directory; None: the newest complete one.
    likelihood      nelbo: the objective's own, as training validates it. ode: RePlaid's through the probability-flow ODE,
                    with the term through the estimate that the denoiser is conditioned on (evaluation/ode_likelihood.py).
    sequences       how many windows from the start of the held-out text; None: all.
    draws           noise draws per sequence (nelbo).
    ode_steps       steps of Heun's method.
    ode_samples     importance samples per sequence.
    batch           sequences at once.
    seed            of the noise.
    device          auto: CUDA where there is one; or a torch device such as cpu or cuda:1.
    """

    checkpoint: str
    step: int | None = None
    likelihood: Literal["nelbo", "ode"] = "nelbo"
    sequences: int | None = None
    draws: int = 1
    ode_steps: int = 128
    ode_samples: int = 1
    batch: int = 16
    seed: int = 1
    device: str = "auto"

    def __post_init__(self) -> None:
        """Raises UserError for a value out of range."""
        for key, most in _RANGES.items():
            value = getattr(self, key)
            if value is not None and not 1 <= value <= most:
                raise UserError(f"{key}={value} must lie in [1, {most}]; leave it out for the default")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} must lie in [0, 2^63); use for example 1")
