"""The problems of a fine-tuning run: read, encoded and counted before a device is taken; then samples for the trainer. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.sft_data import SFTExamples, SFTSamples, SFTValidationSamples
from pretrain.data.problems import Problem, read_problem_file
from pretrain.data.sft_config import SFTConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.ranges import check_ranges
from pretrain.run_config import RunConfig

if TYPE_CHECKING:
    from pretrain.objectives.base import Objective


@dataclass(frozen=True)
class SFTRun:
    """A run whose length is known, and what it reads. described: what became of the problems, for people."""

    config: RunConfig
    train: SFTExamples
    held_out: SFTExamples | None
    described: str

    def build_samples(
        self, config: RunConfig, objective: Objective, tokenizer: Tokenizer, share: tuple[int, int]
    ) -> tuple[SFTSamples, SFTValidationSamples | None]:
        """What a trainer reads (trainer.SamplesBuilder); every rank has all examples in memory, so there is no share to verify."""
        settings = {"lookahead": objective.lookahead, "seed": config.seed}
        training = SFTSamples(
            self.train, config.batch, corrupt=partial(objective.corrupt, evaluation=False), parts=objective.parts, described=self.described,
            **settings,
        )  # fmt: skip
        if self.held_out is None:
            return training, None
        held_out = SFTValidationSamples(
            self.held_out, config.batch, corrupt=partial(objective.corrupt, evaluation=True), draws=config.validation.draws * objective.importance,
            parts=objective.evaluation_parts, **settings,
        )  # fmt: skip
        return training, held_out


def open_problems(config: RunConfig) -> SFTRun:
    """Read and encode the problems, and give the run as many steps as its epochs take.

    UserError for files that hold no problems, examples that do not fit the context, and held-out problems that are also trained on.
    """
    sft = config.sft
    if sft is None:
        raise UserError("sft.train names no problems: set sft.train=FILE, made by launchers/prepare_data.py gsm8k or gsm_symbolic")
    check_ranges(config)  # before they divide, and in words of keys that the command line has
    if config.batch.length != sft.format.context:
        raise UserError(
            f"batch.length={config.batch.length} must equal sft.format.context={sft.format.context}, the length of an example; set the latter alone"
        )
    tokenizer = Tokenizer(config.tokenizer)
    problems = read_problem_file(Path(sft.train))
    held_out = read_problem_file(Path(sft.validation)) if sft.validation is not None else []
    _require_apart(sft, problems, held_out)
    train = _encoded("sft.train", sft.train, problems, tokenizer, sft)
    described = [f"sft.train: {train.counts.sentence(sft.format.context)}"]
    validation = None
    if sft.validation is not None:
        validation = _encoded("sft.validation", sft.validation, held_out, tokenizer, sft)
        described.append(f"sft.validation: {validation.counts.sentence(sft.format.context)}")
    per_epoch = -(-len(train) // config.batch.global_sequences)
    last = len(train) - (per_epoch - 1) * config.batch.global_sequences
    described.append(f"{sft.epochs} epochs of {per_epoch} steps, the last of which holds {last} of {config.batch.global_sequences} examples")
    run = replace(config, duration=replace(config.duration, steps=sft.epochs * per_epoch))
    return SFTRun(run, train, validation, "\n".join(described))


def _encoded(key: str, path: str, problems: list[Problem], tokenizer: Tokenizer, sft: SFTConfig) -> SFTExamples:
    try:
        return SFTExamples(problems, tokenizer, sft.format)
    except UserError as error:
        raise UserError(f"{key}={path}: {error}") from None


def _require_apart(sft: SFTConfig, problems: list[Problem], held_out: list[Problem]) -> None:
    """UserError where a held-out question is trained on, word for word; prepare_data.py gsm8k against=… looks for near copies too."""
    trained = {" ".join(problem.question.split()).casefold() for problem in problems}
    both = [problem for problem in held_out if " ".join(problem.question.split()).casefold() in trained]
    if both:
        raise UserError(
            f"{len(both)} of the {len(held_out)} questions of sft.validation={sft.validation} are also in sft.train={sft.train}, the first of them "
            f"{both[0].id}: what is held out must not be trained on; remove them from one of the files"
        )
