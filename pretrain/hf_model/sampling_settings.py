"""Every sampler by objective, with the settings that it takes. Neither torch nor anything else is imported: command lines are checked with this.

`sampling_methods.py` runs what is named here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = bool | int | float | str | None


class SettingsError(ValueError):
    """A sampler or a setting that does not fit; the message names what does."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A number between `low` and `high`, one of `choices`, or a truth value.

    default  what holds when it is not given; None: it follows from the model or the sequence, as `absent` says.
    """

    meaning: str
    default: Value = None
    absent: str = ""
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0


SETTINGS: dict[str, Setting] = {
    "steps": Setting(meaning="steps from noise to text", absent="one per token to fill", low=1, high=10**6),
    "noise_removal": Setting(
        meaning="how the end is reached: by drawing, or by the most likely tokens (Duo: of p at t = 1e-5, one more evaluation)",
        default="ancestral", choices=("ancestral", "greedy"),
    ),
    "tokens": Setting(meaning="tokens per evaluation", default=1, low=1, high=2**20),
    "block": Setting(meaning="fill one run of so many tokens after another", absent="all at once", low=1, high=2**20),
    "psi": Setting(
        meaning="which member of the family: how kappa follows from eta",
        default="max_capped", choices=("constant", "remdm", "max_capped", "max_rescaled"),
    ),
    "eta": Setting(meaning="strength of correction; for psi=constant kappa itself, where 1 corrects nothing", default=0.01),
    "loop": Setting(meaning="fall, wait at one noise level while correcting, fall again", default=False),
    "loop_alpha": Setting(meaning="share of clean tokens at which a loop waits", default=0.9),
    "loop_rise": Setting(meaning="share of the steps until then", default=0.45),
    "loop_fall": Setting(meaning="share of the steps after it", default=0.05),
    "alpha_0": Setting(meaning="expected share of the tokens that diffusion fills, before the rest follows one by one", absent="as in training"),
    "order": Setting(
        meaning="a block sampler's steps from left to right; in random order; and with each step's positions in random order as well",
        default="natural", choices=("natural", "shuffled_steps", "shuffled"),
    ),
    "segments": Setting(meaning="runs of neighbours that are filled one after another", default=4, low=1, high=2**20),
    "given": Setting(meaning="order in which the tokens of the prompt are read", default="natural", choices=("natural", "shuffled")),
    "score_temperature": Setting(meaning="divides the predicted noise; the smaller, the more steps it takes", default=1.0, low=1e-3, high=1e3),
    "self_conditioning": Setting(meaning="let the network read its previous estimate", absent="as in training"),
    "clean_share": Setting(
        meaning="positions that the clean ones are a share of, which the network is told: all, or those to fill (a fine-tuned network's prompt is "
        "never noised)",
        default="all", choices=("all", "filled"),
    ),
    "joint_above": Setting(
        meaning="steps that begin above this t reveal a token's digits together: 0 all of them, 1 none", absent="as training masked, or 1",
    ),
}  # fmt: skip

_PSI = ("steps", "noise_removal", "psi", "eta", "loop", "loop_alpha", "loop_rise", "loop_fall")
_SOLVER = ("steps", "score_temperature", "self_conditioning")

SAMPLERS: dict[str, dict[str, tuple[str, ...]]] = {
    "ar": {"ar": ()},
    "mdlm": {
        "ancestral": ("steps", "noise_removal"),
        "first_hitting": (),
        "confidence": ("tokens", "block"),
        "margin": ("tokens", "block"),
        "left_to_right": ("tokens",),
        "psi": _PSI,
    },
    "duo": {"ancestral": ("steps", "noise_removal"), "psi": _PSI, "left_to_right": ("clean_share",)},
    "esolm": {
        "ancestral": ("steps", "alpha_0", "given"),
        "block": ("steps", "order", "given"),
        "block_autoregressive": ("steps", "segments", "order", "given"),
        "left_to_right": ("given",),
    },
    "replaid": {"ddpm": _SOLVER, "ddim": _SOLVER, "dpm++": _SOLVER, "heun": _SOLVER, "left_to_right": ()},
    "mdm_prime": {"ancestral": ("steps", "joint_above"), "left_to_right": ()},
}
"""Objective -> sampler -> its settings. The first sampler is the one that `auto` stands for."""


def choose_sampler(objective: str, sampler: str) -> str:
    """`sampler`, or the objective's first for auto. Raises SettingsError for one that would draw another law than the model's."""
    known = SAMPLERS[objective]
    if sampler == "auto":
        return next(iter(known))
    if sampler not in known:
        raise SettingsError(f"sampler={sampler} cannot sample a model trained with objective={objective}; use {_or(known)}, or auto")
    return sampler


def complete_settings(objective: str, sampler: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a sampler: those given (not None), defaults for the rest. Raises SettingsError for what it does not take."""
    taken = SAMPLERS[objective][sampler]
    wanted = {name: value for name, value in given.items() if value is not None}
    for name, value in wanted.items():
        if name not in taken:
            owners = [other for other, names in SAMPLERS[objective].items() if name in names]
            elsewhere = f"; of this model's samplers, {_or(owners)} {'takes' if len(owners) == 1 else 'take'} it" if owners else ""
            own = f"takes {', '.join(taken)}" if taken else "takes no settings"
            raise SettingsError(f"{name}={_spelled(value)} means nothing to sampler={sampler} of {objective}, which {own}; leave it out{elsewhere}")
        _check(name, value)
    loop = [name for name in wanted if name.startswith("loop_")]
    if loop and not wanted.get("loop"):
        raise SettingsError(f"{loop[0]}={_spelled(wanted[loop[0]])} belongs to loop=true; add it, or leave {loop[0]} out")
    return {name: wanted.get(name, SETTINGS[name].default) for name in taken}


def _check(name: str, value: Any) -> None:
    """Raise SettingsError for a value outside the setting's range."""
    setting = SETTINGS[name]
    if setting.choices:
        if value not in setting.choices:
            raise SettingsError(f"{name}={value} is no choice; use {_or(setting.choices)}")
    elif not isinstance(value, bool) and not setting.low <= value <= setting.high:
        advice = f"leave it out for {setting.absent or _spelled(setting.default)}"
        raise SettingsError(f"{name}={_spelled(value)} must lie in [{setting.low:g}, {setting.high:g}]; {advice}")


def _or(names: Mapping[str, object] | tuple[str, ...] | list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _spelled(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
