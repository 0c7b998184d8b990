"""The phases of data that a run has behind it and before it, as its checkpoints record them.

Which windows a run reads next depends on how far it has come in each source, and so on every schedule that it has followed. No torch here.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.checkpoint.changes import read_config
from pretrain.checkpoint.layout import CHECKPOINTS, COMPLETE, TrainState, step_of
from pretrain.data.phases import Phase, continued, from_record, planned_phases
from pretrain.data.skips import Skips
from pretrain.errors import UserError
from pretrain.run_config import RunConfig

PHASES = "phases"
"""In TrainState.extras: the phases of the run, those to come as they were planned then."""


SKIPS = "data_skips"
"""In TrainState.extras: text that the run has left out (data.skips)."""


def skips_from(state: TrainState | None) -> Skips:
    """What a run that goes on from this state has left out."""
    return Skips(state.extras.get(SKIPS, ()) if state else ())


def phases_from(config: RunConfig, checkpoint: Path | None, state: TrainState | None) -> list[Phase]:
    """The phases of a run that goes on from a checkpoint (None: starts) with this configuration.

    UserError where the configuration states another past, or the checkpoint's record does not hold.
    """
    batch = config.batch
    planned = planned_phases(config.data, global_sequences=batch.global_sequences, length=batch.length)
    if checkpoint is None or state is None:
        return planned
    past = recorded_phases(checkpoint, state)
    return continued(past, planned, at=state.samples, declared=bool(config.data.phases), length=batch.length)


def phases_of_run(config: RunConfig) -> list[Phase]:
    """The same for the newest complete checkpoint in the run's directory, if it is of this run and will be continued."""
    found = [] if config.resume == "fresh" else complete_states(config.directory)
    if not found:
        return phases_from(config, None, None)
    folder, state = found[-1]
    sequences, data_step = config.batch.global_sequences, skips_from(state).data_step(state.step)
    own = (data_step * sequences, state.step * sequences * config.batch.length) == (state.samples, state.tokens)
    return phases_from(config, folder, state) if own else phases_from(config, None, None)


def complete_states(run_dir: Path) -> list[tuple[Path, TrainState]]:
    """Folder and state of every checkpoint that was written to its end, by step; those whose state is damaged are left out."""
    folder, found = run_dir / CHECKPOINTS, []
    for path in folder.iterdir() if folder.is_dir() else ():
        if step_of(path.name) is not None and (path / COMPLETE).exists():
            with contextlib.suppress(UserError):
                found.append((path, TrainState.read(path)))
    return sorted(found, key=lambda pair: pair[1].step)


def switch(before: list[Phase], now: list[Phase], at: int, length: int) -> str | None:
    """What is read from sample `at` on that was not to be, as sentences for the log; None where nothing changed."""
    if before == now:
        return None
    lines = [f"from {length * max(phase.start, at):,} tokens on {phase.describe()}" for phase in now if phase.end is None or phase.end > at]
    return "the schedule of the data changed; " + "; ".join(lines)


def recorded_phases(checkpoint: Path, state: TrainState) -> list[Phase]:
    """The phases that a checkpoint was written with. UserError where they cannot be read."""
    if PHASES not in state.extras:  # written by a program that knew one phase only
        return [Phase(start=0, end=None, mix=_weights(read_config(checkpoint)), laid_out=None)]
    try:
        return from_record(state.extras[PHASES])
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{checkpoint} does not say what the run has read ({error}); use another checkpoint") from None


def _weights(config: Mapping[str, Any]) -> dict[str, float]:
    return {name: source.get("weight", 1.0) for name, source in config["data"]["train"].items()}
