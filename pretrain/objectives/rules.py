"""What an objective's constants may be, whatever the rest of the run. No torch here: configuration must load in milliseconds."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from pretrain.errors import UserError
from pretrain.objectives.config import ObjectiveConfig

SECTIONS = ("duo", "esolm", "replaid", "mdm_prime")
"""Constants of one objective each, under its name."""

Rule = tuple[str, Callable[[Any], bool], str]
"""Key, whether its value is legal, and the rule with a legal example, completing `KEY=VALUE must …`."""

_RULES: tuple[Rule, ...] = (
    ("duo.top_k", lambda k: k >= 2, "be at least 2; use 16"),
    ("duo.log10_tau_start", lambda x: -12 <= x <= 3, "lie in [-12, 3], the logarithm of a temperature; use -3"),
    ("duo.log10_tau_end", lambda x: -12 <= x <= 3, "lie in [-12, 3], the logarithm of a temperature; use -3"),
    ("duo.curriculum_start", lambda n: n >= 0, "not be negative; use 0"),
    ("duo.curriculum_end", lambda n: n >= 0, "not be negative; use 500000"),
    ("duo.gamma_min", lambda x: -12 <= x <= 4, "lie in [-12, 4]; leave it out to derive it from the vocabulary"),
    ("duo.gamma_max", lambda x: -12 <= x <= 4, "lie in [-12, 4]; leave it out to derive it from the vocabulary"),
    ("esolm.alpha_0", lambda x: 0 <= x <= 1, "lie in [0, 1]; use 1 for pure diffusion"),
    ("esolm.batch_split", lambda x: 0 < x < 1, "lie strictly between 0 and 1; use 0.5"),
    ("esolm.orders", lambda n: n >= 1, "be at least 1; use 1"),
    ("replaid.latent", lambda n: n >= 1, "be at least 1; use 16"),
    ("replaid.gamma_0", lambda x: -20 <= x <= 20, "lie in [-20, 20]; use -3"),
    ("replaid.gamma_1", lambda x: -20 <= x <= 20, "lie in [-20, 20]; use 6"),
    ("replaid.schedule_hidden", lambda n: n >= 1, "be at least 1; use 1024"),
    (
        "replaid.self_conditioning",
        lambda x: x == 0 or (0 < x < 1 and (1 / x).is_integer()),
        "be 0 or one n-th from a half down (0.5, 0.25, …), as embeddings and schedule learn from the other examples; use 0.25",
    ),
    ("replaid.prior_ramp_steps", lambda n: n >= 0, "not be negative; use 5000, or 0 for no ramp"),
    ("replaid.learning_rate", lambda x: 0 < x <= 1, "lie in (0, 1]; use 1e-2"),
    ("replaid.endpoint_decay", lambda x: 0 <= x < 1, "lie in [0, 1); use 1e-3"),
    ("mdm_prime.base", lambda n: n >= 2, "be at least 2; use 2"),
    ("mdm_prime.digits", lambda n: n >= 1, "be at least 1; use the digits that the vocabulary needs"),
    ("mdm_prime.shuffle_seed", lambda n: n is None or 0 <= n < 2**63, "lie in [0, 2^63), or be null for no shuffling; use 0"),
    ("mdm_prime.joint_mask_above", lambda x: x is None or 0 <= x < 1, "lie in [0, 1), or be null for independent masks; use 0.5"),
)


def check_objective(objective: ObjectiveConfig) -> None:
    """Raises UserError for a constant out of range, or one that belongs to another objective and would do nothing."""
    _check_foreign(objective)
    for key, legal, rule in _RULES:
        section, name = key.split(".")
        value = getattr(getattr(objective, section), name)
        if value is not None and not legal(value):
            raise UserError(f"objective.{key}={value} must {rule}")
    for low, high in (("duo.gamma_min", "duo.gamma_max"), ("replaid.gamma_0", "replaid.gamma_1")):
        section, name = low.split(".")
        below, above = getattr(getattr(objective, section), name), getattr(getattr(objective, section), high.split(".")[1])
        if below is not None and above is not None and below >= above:
            raise UserError(f"objective.{low}={below:g} must be below objective.{high}={above:g}; use a smaller objective.{low}")
    if objective.duo.curriculum_end < objective.duo.curriculum_start:
        raise UserError(
            f"objective.duo.curriculum_end={objective.duo.curriculum_end} must not come before objective.duo.curriculum_start="
            f"{objective.duo.curriculum_start}; use objective.duo.curriculum_start=0"
        )


def _check_foreign(objective: ObjectiveConfig) -> None:
    plain = ObjectiveConfig(name=objective.name)
    noised = objective.name not in ("ar", "replaid")
    belongs = {
        "mask_id": objective.has_mask,
        "schedule_eps": noised,
        "time_eps": noised,
        "low_variance": objective.has_low_variance,
        "evaluation": noised,
    }
    for key, own in belongs.items():
        value = getattr(objective, key)
        if not own and value != getattr(plain, key):
            raise UserError(f"objective.{key}={value} has no meaning for {_spoken(objective)}: leave it out")
    for section in SECTIONS:
        if section != objective.name and (changed := _changed(getattr(objective, section), getattr(plain, section))):
            key, value = changed
            raise UserError(f"objective.{section}.{key}={value} belongs to objective={section}, and this run trains {objective.name}: leave it out")


def _changed(given: Any, plain: Any) -> tuple[str, Any] | None:
    """The first field that differs."""
    return next(((f.name, getattr(given, f.name)) for f in fields(given) if getattr(given, f.name) != getattr(plain, f.name)), None)


def _spoken(objective: ObjectiveConfig) -> str:
    """How messages call an objective."""
    if objective.name == "ar":
        return "ar, which has no noise"
    return f"esolm at objective.esolm.alpha_0={objective.esolm.alpha_0:g}" if objective.name == "esolm" else objective.name
