"""How often a run reads each of its sources, phase by phase, and the refusal of more than it may. No torch here."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.history import phases_of_run
from pretrain.data.manifest import Manifest
from pretrain.data.mixture import Mixture
from pretrain.data.phases import Phase
from pretrain.errors import UserError, spelled
from pretrain.rules import Derived
from pretrain.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a phase reads of one source, until the run leaves.

    phase         from 1.
    start, end    input tokens of the run at which the phase begins and ends.
    tokens        of the source in this phase; `share` is the one that the phase states.
    held          tokens of the source's corpus; None where it is not prepared yet.
    passes        over the corpus in this phase; `total` from the start of the run to the end of the phase. nan where nothing is prepared.
    """

    phase: int
    start: int
    end: int
    source: str
    tokens: int
    share: float
    held: int | None
    passes: float
    total: float


def readings(config: RunConfig, derived: Derived) -> list[Reading]:
    """Every source of every phase that the run reaches, with what its checkpoints record of the past. UserError where that past is contradicted."""
    if config.sft is not None:  # whole epochs of its examples
        return []
    held = {name: _tokens(Path(source.path)) for name, source in config.data.train.items()}
    phases = phases_of_run(config)
    mixture = Mixture(phases, dict.fromkeys(config.data.train, 1), seed=config.seed)
    last = derived.last_step * config.batch.global_sequences
    found = []
    for number, phase, end in _reached(phases, last):
        before, after = mixture.counts(phase.start), mixture.counts(end)
        for name in phase.mix:
            tokens = (after[name] - before[name]) * config.batch.length
            size = held.get(name)
            passes, total = ((count / size if size else math.nan) for count in (tokens, after[name] * config.batch.length))
            start, until = phase.start * config.batch.length, end * config.batch.length
            found.append(Reading(
                phase=number, start=start, end=until, source=name, tokens=tokens, share=phase.shares[name], held=size, passes=passes, total=total
            ))  # fmt: skip
    return found


def check_repetition(config: RunConfig, found: list[Reading]) -> None:
    """Raises UserError for the first source that is read more often than data.max_epochs."""
    limit = config.data.max_epochs
    over = [] if limit is None else [reading for reading in found if reading.total > limit]
    if not over:
        return
    reading = over[0]
    assert limit is not None
    where = f" by the end of phase {reading.phase} ({reading.end:.4g} tokens)" if found[-1].phase > 1 else f" in {reading.end:.4g} tokens"
    first = reading.total - reading.passes
    room = max(limit - first, 0) / reading.passes * reading.share
    fixes = ["add text to it"]
    if len({one.source for one in found}) > 1 and room > 0:
        fixes.append(f"lower its share of phase {reading.phase} from {reading.share:.3g} to {math.floor(1000 * room) / 1000:g}")
    fixes.append(f"set data.max_epochs={math.ceil(10 * max(one.total for one in found)) / 10:g} (null: no limit)")
    raise UserError(
        f"data source '{reading.source}' would be read {reading.total:.2f} times{where}: it holds {reading.held:,} tokens, and "
        f"data.max_epochs={spelled(limit)}; {', '.join(fixes[:-1])}, or {fixes[-1]}"
    )


def _reached(phases: list[Phase], last: int) -> Iterator[tuple[int, Phase, int]]:
    """Number, phase and the sample at which it or the run ends."""
    for number, phase in enumerate(phases, start=1):
        if phase.start < last:
            yield number, phase, last if phase.end is None else min(phase.end, last)


def _tokens(folder: Path) -> int | None:
    try:
        return Manifest.load(folder).tokens
    except UserError:
        return None
