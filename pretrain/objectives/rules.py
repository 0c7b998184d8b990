"""What an objective's constants may be, whatever the rest of the run. No torch here: configuration must load in milliseconds."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from pretrain.errors import UserError
from pretrain.objectives.config import DuoConfig, MDMPrimeConfig, ObjectiveConfig

SECTIONS = ("duo", "esolm", "replaid", "mdm_prime")
"""Constants of one objective each, under its name."""

MAX_DIGIT_VALUES = 4096
"""Digits times base of MDM-Prime: columns of a table with a row per id. The least base for two digits of a million ids is half of it."""

Range = tuple[Callable[[Any], bool], str]
"""Whether a value is legal, and the rule with a legal example, completing `KEY=VALUE must …`."""

OBJECTIVE_RANGES: dict[str, Range] = {
    "objective.mask_id": (lambda x: x >= 0, "be a token id; leave it out for the id after the tokenizer's last"),
    "objective.schedule_eps": (lambda x: 0 <= x < 1, "lie in [0, 1); use 1e-3"),
    "objective.time_eps": (lambda x: 0 < x < 1, "lie strictly between 0 and 1; use for example 1e-3"),
    "objective.duo.top_k": (lambda k: k >= 2, "be at least 2; use 16"),
    "objective.duo.log10_tau_start": (lambda x: -12 <= x <= 3, "lie in [-12, 3], the logarithm of a temperature; use -3"),
    "objective.duo.log10_tau_end": (lambda x: -12 <= x <= 3, "lie in [-12, 3], the logarithm of a temperature; use -3"),
    "objective.duo.curriculum_start": (lambda n: n >= 0, "not be negative; use 0"),
    "objective.duo.curriculum_end": (lambda n: n >= 0, "not be negative; use 500000"),
    "objective.duo.gamma_min": (lambda x: -5 <= x <= 4, "lie in [-5, 4]; leave it out to derive it from the vocabulary"),
    "objective.duo.gamma_max": (lambda x: -5 <= x <= 4, "lie in [-5, 4]; leave it out to derive it from the vocabulary"),
    "objective.esolm.alpha_0": (lambda x: 0 <= x <= 1, "lie in [0, 1]; use 1 for pure diffusion"),
    "objective.esolm.batch_split": (lambda x: 0 < x < 1, "lie strictly between 0 and 1; use 0.5"),
    "objective.esolm.orders": (lambda n: n >= 1, "be at least 1; use 1"),
    "objective.replaid.latent": (lambda n: n >= 1, "be at least 1; use 16"),
    "objective.replaid.gamma_0": (lambda x: -20 <= x <= 20, "lie in [-20, 20]; use -3"),
    "objective.replaid.gamma_1": (lambda x: -20 <= x <= 20, "lie in [-20, 20]; use 6"),
    "objective.replaid.schedule_hidden": (lambda n: n >= 1, "be at least 1; use 1024"),
    "objective.replaid.self_conditioning": (
        lambda x: x == 0 or (0 < x < 1 and (1 / x).is_integer()),
        "be 0 or one n-th from a half down (0.5, 0.25, …), as embeddings and schedule learn from the other examples; use 0.25",
    ),
    "objective.replaid.prior_ramp_steps": (lambda n: n >= 0, "not be negative; use 5000, or 0 for no ramp"),
    "objective.replaid.learning_rate": (lambda x: 0 < x <= 1, "lie in (0, 1]; use 1e-2"),
    "objective.replaid.endpoint_decay": (lambda x: 0 <= x < 1, "lie in [0, 1); use 1e-3"),
    "objective.mdm_prime.base": (lambda n: n >= 2, "be at least 2; use 2"),
    "objective.mdm_prime.digits": (lambda n: n >= 1, "be at least 1; use the digits that the vocabulary needs"),
    "objective.mdm_prime.shuffle_seed": (lambda n: 0 <= n < 2**63, "lie in [0, 2^63), or be null for no shuffling; use 0"),
    "objective.mdm_prime.joint_mask_above": (lambda x: 0 <= x < 1, "lie in [0, 1), or be null for independent masks; use 0.5"),
}
"""Every number of an ObjectiveConfig. None is legal wherever the type allows it."""


def check_objective(objective: ObjectiveConfig) -> None:
    """Raises UserError for constants that contradict each other, or that belong to another objective and would do nothing."""
    _check_foreign(objective)
    _check_duo(objective)
    _check_esolm(objective)
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


def check_vocabulary(objective: ObjectiveConfig, model_size: int) -> None:
    """Raises UserError for a vocabulary of `model_size` classes that the objective's constants cannot write or softened inputs exceed."""
    if objective.name == "mdm_prime":
        check_digits(objective.mdm_prime, model_size)
    if objective.name == "duo" and objective.duo.curriculum == "topk" and objective.duo.top_k >= model_size:
        raise UserError(f"objective.duo.top_k={objective.duo.top_k} must be below the vocabulary of {model_size}; use {min(16, model_size - 1)}")


def check_parts(objective: ObjectiveConfig, global_sequences: int, micro_sequences: int) -> None:
    """Raises UserError for a batch that cannot be shared out among the objective's parts in whole micro-batches."""
    if objective.name == "replaid" and global_sequences < 2:
        raise UserError(f"batch.global_sequences={global_sequences} must be at least 2 for replaid, which splits each batch; use 2")
    if len(objective.parts) == 1:
        return
    first = round(objective.parts[0] * global_sequences)
    if first % micro_sequences or not 0 < first < global_sequences:
        nearest = min(max(round(first / micro_sequences), 1) * micro_sequences, global_sequences - micro_sequences)
        fix = f"objective.esolm.batch_split={nearest / global_sequences:g}" if nearest > 0 else f"batch.global_sequences={2 * micro_sequences}"
        raise UserError(
            f"objective.esolm.batch_split={objective.esolm.batch_split:g} gives {first} of batch.global_sequences={global_sequences} to diffusion: "
            f"each part must be whole micro-batches of {micro_sequences}; use {fix}"
        )


def check_digits(prime: MDMPrimeConfig, size: int) -> None:
    """Raises UserError unless `digits` is the least number that writes `size` ids in this base: with fewer some have no code, and with more
    the first digit would be 0 in every id."""
    base, digits = prime.base, prime.digits
    given = f"objective.mdm_prime.digits={digits} with objective.mdm_prime.base={base}"
    if base > max(size, 2):
        binary = f"objective.mdm_prime.base=2 objective.mdm_prime.digits={_digits_needed(size, 2)}"
        raise UserError(f"objective.mdm_prime.base={base} must not exceed the vocabulary's {size} ids; use {binary}")
    needed = _digits_needed(size, base)
    if digits < needed:
        raise UserError(f"{given} writes {base**digits} ids, fewer than the vocabulary's {size}; use objective.mdm_prime.digits={needed}")
    if digits > needed:
        raise UserError(
            f"{given} is more than the vocabulary's {size} ids need, and the first digit would always be 0; use objective.mdm_prime.digits={needed}"
        )
    if digits > 1 and base * digits > MAX_DIGIT_VALUES:
        least = next(b for b in range(2, base + 1) if b**digits >= size)
        raise UserError(f"{given} needs {base * digits} sums per position, more than {MAX_DIGIT_VALUES}; use objective.mdm_prime.base={least}")


def _digits_needed(size: int, base: int) -> int:
    return next(n for n in range(1, size + 1) if base**n >= size)


def _check_duo(objective: ObjectiveConfig) -> None:
    """Constants of the curriculum do nothing without it."""
    duo = objective.duo
    if objective.name == "duo" and duo.curriculum == "none" and (changed := _changed(duo, DuoConfig())):
        key, value = changed
        raise UserError(
            f"objective.duo.{key}={value} belongs to the curriculum, and objective.duo.curriculum=none: leave it out, or use objective=duo_curriculum"
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


def _check_esolm(objective: ObjectiveConfig) -> None:
    """Constants of a phase, or of an evaluation, that the run does not have."""
    if objective.name != "esolm":
        return
    plain, esolm = ObjectiveConfig(name="esolm"), objective.esolm
    both = "needs both phases, and objective.esolm.alpha_0={:g} has one: leave it out, or use objective.esolm.alpha_0=0.5"
    timeless = "belongs to diffusion, which objective.esolm.alpha_0=0 leaves out: leave it out"
    if esolm.alpha_0 in (0, 1) and esolm.batch_split != plain.esolm.batch_split:
        raise UserError(f"objective.esolm.batch_split={esolm.batch_split:g} {both.format(esolm.alpha_0)}")
    for key in ("schedule_eps", "time_eps", "evaluation"):
        if esolm.alpha_0 == 0 and getattr(objective, key) != getattr(plain, key):
            raise UserError(f"objective.{key}={getattr(objective, key)} {timeless}")
    if esolm.orders > 1 and esolm.alpha_0 == 0:
        raise UserError(f"objective.esolm.orders={esolm.orders} {timeless}; one order, from left to right, is exact")
    if esolm.orders > 1 and esolm.evaluate != "any_order":
        raise UserError(f"objective.esolm.orders={esolm.orders} belongs to objective.esolm.evaluate=any_order; use that, or leave it out")
    if esolm.evaluate == "any_order" and objective.evaluation != plain.evaluation:
        raise UserError(
            f"objective.evaluation={objective.evaluation} is about diffusion times, and objective.esolm.evaluate=any_order draws none: leave it out"
        )
