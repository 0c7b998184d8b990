"""The schedule of a mixture: what a run draws its samples from, phase after phase, and how a run that continues may change it.

A phase begins at the first step whose tokens lie wholly behind the phase before: a step belongs to the phase in which its first token
lies. Phases are counted in samples here, of which a step has always the same number. The past of a run is part of its data: how far it
had come in every source when a phase ended decides which windows come next. So a run records its phases, and continuing it with another
schedule keeps them up to the step that it continues from. No torch here.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pretrain.data.config import DataConfig
from pretrain.errors import UserError, nearest

_SAME = 1e-9
"""Shares that differ by less are one share, written in two ways."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Samples [start, end) of a run, drawn from sources by weight.

    end       None: as long as the run lasts.
    mix       source -> relative weight, above 0.
    laid_out  the end for which its samples were laid out: the end that the schedule gave it when it began. A run that left the phase
              earlier keeps the order of what it has read. None: without end.
    """

    start: int
    end: int | None
    mix: dict[str, float]
    laid_out: int | None

    @property
    def shares(self) -> dict[str, float]:
        """Source -> share of the samples."""
        whole = math.fsum(self.mix.values())
        return {name: weight / whole for name, weight in self.mix.items()}

    def describe(self) -> str:
        """`web 60%, code 40%`."""
        return ", ".join(f"{name} {share:.4g}%" for name, share in ((name, 100 * share) for name, share in self.shares.items()))


def planned_phases(config: DataConfig, *, global_sequences: int, length: int) -> list[Phase]:
    """The phases of a schedule as the configuration states it; the last one has no end."""
    if not config.phases:
        return [Phase(start=0, end=None, mix=_read({name: source.weight for name, source in config.train.items()}), laid_out=None)]
    phases: list[Phase] = []
    start = 0
    for number, phase in enumerate(config.phases, start=1):
        last = number == len(config.phases) or phase.until is None
        end = None if last else first_step(phase.until, global_sequences * length) * global_sequences
        phases.append(Phase(start=start, end=end, mix=_read(phase.mix), laid_out=end))
        start = end or start
    return phases


def check_phases(config: DataConfig, *, tokens_per_step: int, steps: int) -> None:
    """Raises UserError for a schedule that names no source, goes back, or ends before the last step."""
    before = 0
    for number, phase in enumerate(config.phases):
        key, last = f"data.phases[{number}]", number == len(config.phases) - 1
        _check_mix(key, phase.mix, list(config.train))
        if phase.until is None:
            if not last:
                raise UserError(f"{key}.until=null has no end, and another phase follows it; set the tokens after which that one begins")
            continue
        if not (math.isfinite(phase.until) and first_step(phase.until, tokens_per_step) > before):
            rule = f"be more than the {before * tokens_per_step:,} tokens at which it begins"
            raise UserError(f"{key}.until={phase.until:.12g} must {rule}; use for example {(before + 1) * tokens_per_step}")
        before = first_step(phase.until, tokens_per_step)
        if last and before < steps:
            raise UserError(
                f"{key}.until={phase.until:.12g} ends the last phase before the run, which reads {steps * tokens_per_step:,} tokens; "
                "use until: null there, or add a phase"
            )
    weighted = [name for name, source in config.train.items() if source.weight != 1] if config.phases else []
    if weighted:
        raise UserError(f"data.train.{weighted[0]}.weight has no effect beside data.phases, whose mix gives the shares; leave the weight out")


def _check_mix(key: str, mix: Mapping[str, float], known: list[str]) -> None:
    for name, weight in mix.items():
        if name not in known:
            raise UserError(f"{key}.mix names {name}, which is not a source of data.train{nearest(name, known)}")
        if not (math.isfinite(weight) and weight >= 0):
            raise UserError(f"{key}.mix.{name}={weight} must be a share of at least 0; use 0 for a source that is not read")
    if not any(mix.values()):
        raise UserError(f"{key}.mix reads nothing; give a source a share above 0, for example mix: {{{known[0]}: 1}}")


def first_step(tokens: float | None, tokens_per_step: int) -> int:
    """The first step (from 0) whose tokens all come after the first `tokens` of a run."""
    return math.ceil(Fraction(tokens or 0) / tokens_per_step)


def continued(past: Sequence[Phase], planned: Sequence[Phase], *, at: int, declared: bool, length: int) -> list[Phase]:
    """The phases of a run that goes on from sample `at` with another schedule, or with the same.

    past      phases that the run recorded, as they were to go on.
    planned   those of the schedule now.
    declared  whether that schedule says what came before `at`, and does not only say what is to come.
    length    tokens of a sample, for messages.

    UserError where it says so, and it was not like that.
    """
    if declared:
        _require_same_past(past, planned, at, length)
    if _alike(_runs(past, at, None), _runs(planned, at, None)):
        return list(past)
    kept = [dataclasses.replace(phase, end=at if phase.end is None else min(phase.end, at)) for phase in past if phase.start < at]
    future = [phase for phase in planned if phase.end is None or phase.end > at]
    now = kept[-1] if kept else None
    fits = now is not None and (now.laid_out is None or (future[0].end is not None and future[0].end <= now.laid_out))
    if now is not None and fits and _same(now, future[0]):
        return [*kept[:-1], dataclasses.replace(now, end=future[0].end), *future[1:]]
    return [*kept, *(dataclasses.replace(phase, start=max(phase.start, at)) for phase in future)]


def begun(phases: Sequence[Phase], first: int, before: int | None, *, length: int) -> str | None:
    """What the log says of a step that reads from sample `first` on, if it is the first of its phase; None for other steps, and where there is one
    phase only. before: the first sample of the step before it, None: there is none. length: tokens of a sample."""
    number = _place(phases, first)
    if len(phases) < 2 or (before is not None and _place(phases, before) == number):
        return None
    phase = phases[number]
    end = "to the end" if phase.end is None else f"to {length * phase.end:,}"
    return f"phase {number + 1} of {len(phases)} begins at {length * first:,} tokens, {end}: {phase.describe()}"


def _place(phases: Sequence[Phase], sample: int) -> int:
    return sum(phase.start <= sample for phase in phases) - 1


def to_record(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Phases as JSON values."""
    return [dataclasses.asdict(phase) for phase in phases]


def from_record(record: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """The inverse of `to_record`."""
    return [Phase(**phase) for phase in record]


def _read(weights: Mapping[str, float]) -> dict[str, float]:
    """The sources that are read. UserError for impossible weights, or none above 0."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise UserError(f"data source '{name}' has weight {weight}; a weight is a number >= 0")
    found = {name: weight for name, weight in weights.items() if weight > 0}
    if not found:
        raise UserError("no data source has a weight above 0; set data.train.NAME.weight")
    return found


def _same(left: Phase, right: Phase) -> bool:
    shares, others = left.shares, right.shares
    return shares.keys() == others.keys() and all(abs(share - others[name]) <= _SAME for name, share in shares.items())


def _runs(phases: Sequence[Phase], start: int, end: int | None) -> list[Phase]:
    """What is read from `start` to `end`: neighbours that read alike are one."""
    found: list[Phase] = []
    for phase in phases:
        low = max(phase.start, start)
        high = phase.end if end is None else end if phase.end is None else min(phase.end, end)
        if high is not None and high <= low:
            continue
        if found and _same(found[-1], phase):
            found[-1] = dataclasses.replace(found[-1], end=high)
        else:
            found.append(Phase(start=low, end=high, mix=phase.mix, laid_out=None))
    return found


def _alike(some: Sequence[Phase], others: Sequence[Phase]) -> bool:
    ends = [phase.end for phase in some] == [phase.end for phase in others]
    return ends and all(_same(one, two) for one, two in zip(some, others, strict=True))


def _require_same_past(past: Sequence[Phase], planned: Sequence[Phase], at: int, length: int) -> None:
    then, now = _runs(past, 0, at), _runs(planned, 0, at)
    if _alike(then, now):
        return
    pairs = [(one, two) for one in then for two in now if max(one.start, two.start) < min(one.end or at, two.end or at)]
    one, two = next((one, two) for one, two in pairs if not _same(one, two))
    start, end = length * max(one.start, two.start), length * min(one.end or at, two.end or at)
    raise UserError(
        f"data.phases now reads {two.describe()} in tokens {start:,} to {end:,}, which this run has read as {one.describe()}: what is past "
        f"cannot change, so say what was read until {length * at:,}, and change what comes after"
    )
