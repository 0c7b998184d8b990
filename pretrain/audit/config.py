"""What the audits of a run's data take. No torch here."""

from dataclasses import dataclass
from typing import Literal

from pretrain.errors import UserError


@dataclass(frozen=True, kw_only=True)
class StepAuditConfig:
    """The documents that an optimizer step saw.

    run     run directory, or a checkpoint's folder, whose config.yaml, tokenizer and corpora are read.
    step    the step, counted from 1 as in the log.
    words   how much of each window to show, in characters.
    format  a table, or one JSON value per line.
    """

    run: str
    step: int
    words: int = 60
    format: Literal["table", "json"] = "table"

    def __post_init__(self) -> None:
        _check(self.run, self.step)
        if self.words < 0:
            raise UserError(f"words={self.words} must not be negative; use 0 for none")


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """The noised samples that a rank handled in an optimizer step.

    run, step, format  as in StepAuditConfig; JSON holds every array that the network and the loss get.
    rank               global rank, from 0.
    world              ranks of that start; None: as the checkpoint or the log says.
    samples            how many of the rank's samples to show; None: all.
    tokens             how much of each to show as text; None: all.
    """

    run: str
    step: int
    rank: int = 0
    world: int | None = None
    samples: int | None = None
    tokens: int | None = None
    format: Literal["table", "json"] = "table"

    def __post_init__(self) -> None:
        _check(self.run, self.step)
        for key, value, least in (("rank", self.rank, 0), ("world", self.world, 1), ("samples", self.samples, 1), ("tokens", self.tokens, 1)):
            if value is not None and value < least:
                raise UserError(f"{key}={value} must be at least {least}; use {key}={least}")


def _check(run: str, step: int) -> None:
    if not run.strip():
        raise UserError("run is empty: name a run directory such as runs/NAME")
    if step < 1:
        raise UserError(f"step={step} must be at least 1: steps are counted as in the log; use step=1 for the first")
