"""A run's data again: the same samples that training made, from the configuration, phases and corpora that it had at a step."""

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pretrain.build import build_objective, build_training_samples
from pretrain.checkpoint.changes import read_config
from pretrain.checkpoint.history import complete_states, phases_from, recorded_phases, skips_from
from pretrain.checkpoint.layout import TrainState, step_of
from pretrain.compose import typed
from pretrain.data.phases import Phase
from pretrain.data.samples import TrainingSamples
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.objectives.base import Objective
from pretrain.rules import run_vocabulary
from pretrain.run_config import RunConfig
from pretrain.telemetry.log import LOG_NAME, read_log


@dataclass(frozen=True)
class _Saved:
    """A complete checkpoint."""

    folder: Path
    state: TrainState


class AuditedRun:
    """The samples of step `step` (from 1) of a run, as its ranks made them.

    The configuration is that of the first checkpoint at or after the step, which was trained under it, else the run directory's.

    folder   the run directory.
    source   the folder whose config.yaml is used.

    UserError where there is no run, where its corpora are not what they were, and where they give another text than a checkpoint remembers.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.folder = path.parent.parent if step_of(path.name) is not None else path
        if not path.is_dir():
            raise UserError(f"there is no run at {path}; name a run directory such as runs/NAME")
        saved = [_Saved(*found) for found in complete_states(self.folder)]
        self.step, self.index = step, step - 1
        self.earlier = [checkpoint for checkpoint in saved if checkpoint.state.step <= self.index]
        later = [checkpoint for checkpoint in saved if checkpoint.state.step >= step]
        self.saved = later[0] if later else None
        self.source = later[0].folder if later else self.folder
        self.config: RunConfig = typed(RunConfig, read_config(self.source))
        if self.config.sft is not None:
            raise UserError(f"{path} is a fine-tuning run, which reads problems and no documents; name a run of launchers/pretrain.py")
        self.tokenizer = Tokenizer(self.config.tokenizer)
        self.vocabulary = run_vocabulary(self.config, self.tokenizer)
        self.objective: Objective = build_objective(self.config.objective, self.vocabulary)
        self.samples: TrainingSamples = build_training_samples(self.config, self.objective, self.tokenizer)
        self.samples.follow(self._phases())
        known = self.saved or (self.earlier[-1] if self.earlier else None)
        self.samples.skips = skips_from(known.state if known else None)
        self._require_same_text(later[:1] or self.earlier[-1:])

    def say_if_planned(self) -> None:
        """A note on standard error where nothing shows that the step was trained."""
        logged = [int(record["step"]) for record in read_log(self.folder / LOG_NAME) if record["kind"] == "train"]
        last = max([checkpoint.state.step for checkpoint in self.earlier] + logged, default=0)
        if self.saved is None and self.step > last:
            print(
                f"note: nothing shows that step {self.step:,} was trained: log and checkpoints of {self.folder} end at step {last:,}; "
                "this is what it would read", file=sys.stderr,
            )  # fmt: skip

    @property
    def phase(self) -> Phase:
        """What the step's samples were drawn from."""
        first = self.samples.numbers(self.index).start
        return next(phase for phase in reversed(self.samples.mixture.phases) if phase.start <= first)

    @cached_property
    def data_parallel(self) -> int | None:
        """Data-parallel ranks of the start that trained the step, as far as it is known."""
        if self.saved is not None:
            return self.saved.state.layout.data
        layouts = [re.search(r"DP(\d+)", str(record.get("layout", ""))) for record in read_log(self.folder / LOG_NAME) if record["kind"] == "run"]
        found = [int(match[1]) for match in layouts if match]
        return found[-1] if found else None

    def _phases(self) -> list[Phase]:
        if self.saved is not None:
            return recorded_phases(self.saved.folder, self.saved.state)
        last = self.earlier[-1] if self.earlier else None
        return phases_from(self.config, last.folder if last else None, last.state if last else None)

    def _require_same_text(self, known: list[_Saved]) -> None:
        """A checkpoint remembers the batch that was to follow it: the corpora must still give it."""
        for checkpoint in known:
            if checkpoint.state.seed != self.config.seed or self.samples.fingerprint(checkpoint.state.step) == checkpoint.state.next_batch:
                continue
            sources = ", ".join(f"{name}: {source.path}" for name, source in self.config.data.train.items())
            raise UserError(
                f"the text of {self.folder} is not what it was: the batch after step {checkpoint.state.step:,} differs from the one that "
                f"{checkpoint.folder} remembers; put back the corpora that it was trained on ({sources})"
            )
