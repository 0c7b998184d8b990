"""Which objective, with its constants. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Constants of an objective.

    name             ar or mdlm.
    mask_id          id that the tokenizer keeps free for the mask; None: the id after the tokenizer's last. Never set for ar.
    schedule_eps     e of the log-linear schedule alpha_t = 1 - (1 - e) t while training (authors: 1e-3).
    time_eps         training draws t from [time_eps, 1] (authors: 1e-3).
    low_variance     train on the masked cross-entropy with weight 1 instead of the NELBO's 1/t (Sahoo et al. 2026, section 3.2.2).
    evaluation       bound: evaluate with e = 0 and t in (0, 1], whose value is a bound; authors: with the training constants, an estimate.
    """

    name: Literal["ar", "mdlm"]
    mask_id: int | None = None
    schedule_eps: float = 1e-3
    time_eps: float = 1e-3
    low_variance: bool = True
    evaluation: Literal["bound", "authors"] = "bound"
