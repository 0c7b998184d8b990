"""A whole run on small text: configuration, corpus and tokenizer as a user would have them, started in a forked process."""

import hashlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pretrain.backbones.config import BackboneConfig
from pretrain.data.config import DataConfig, SourceConfig
from pretrain.data.problems import Problem, problem_lines
from pretrain.data.sft_config import SFTConfig
from pretrain.data.sft_format import SFTFormat
from pretrain.engine.config import PrecisionConfig, ScheduleConfig
from pretrain.objectives.config import ObjectiveConfig
from pretrain.run_config import BatchConfig, CheckpointConfig, DurationConfig, RunConfig, ValidationConfig
from pretrain.telemetry.config import TelemetryConfig
from tests.data.examples import prepared, sentencepiece_file, text


def small_config(folder: Path, objective: str | ObjectiveConfig = "mdlm", **changes: Any) -> RunConfig:
    """Six steps of a 4-layer DiT on a corpus in `folder` (made at the first call)."""
    if isinstance(objective, str):
        objective = ObjectiveConfig(name=objective)  # type: ignore[arg-type]
    tokenizer = folder / "small.model"
    if not tokenizer.exists():
        sentencepiece_file(folder)
        prepared(folder / "train", tokenizer, [text(60, seed) for seed in range(40)])
        prepared(folder / "held_out", tokenizer, [text(60, seed) for seed in range(100, 104)])
    config = RunConfig(
        name="small",
        root=str(folder / "runs"),
        tokenizer=str(tokenizer),
        objective=objective,
        backbone=BackboneConfig(kind="dit", hidden=32, layers=4, heads=4, cond_dim=16),
        data=DataConfig(
            train={"words": SourceConfig(path=str(folder / "train" / "corpus"))},
            validation={"words": SourceConfig(path=str(folder / "held_out" / "corpus"))},
            random_length_probability=0.1 if objective.name != "ar" else 0.0,
            max_epochs=None,
        ),
        batch=BatchConfig(global_sequences=8, micro_sequences=2, length=16),
        duration=DurationConfig(steps=6),
        schedule=ScheduleConfig(kind="cosine", peak=1e-2, final=1e-3, warmup_steps=2),
        precision=PrecisionConfig(compute="fp32"),  # layouts are compared to 1e-5, which bf16 does not hold
        validation=ValidationConfig(every=3),
        checkpoint=CheckpointConfig(every=3),
        telemetry=TelemetryConfig(log_every=1, wandb="off", peak_tflops=0.1),
    )
    return replace(config, **changes)


def sft_config(folder: Path, objective: str | ObjectiveConfig = "mdlm", **changes: Any) -> RunConfig:
    """Two epochs of 11 examples in batches of 8 on the same network; the second step of an epoch holds three examples."""
    config = small_config(folder, objective)
    for name, first, count in (("train", 0, 11), ("test", 100, 3)):
        path = folder / f"{name}.jsonl"
        if not path.exists():
            path.write_bytes(problem_lines(word_problems(first, count)))
    sft = SFTConfig(train=str(folder / "train.jsonl"), validation=str(folder / "test.jsonl"), epochs=2, format=SFTFormat(context=48))
    base = replace(
        config, name="tuned", sft=sft, data=DataConfig(max_epochs=None), batch=replace(config.batch, length=48), duration=DurationConfig(steps=1),
        validation=ValidationConfig(every=0), checkpoint=CheckpointConfig(every=1),
    )  # fmt: skip
    return replace(base, **changes)


def word_problems(first: int, count: int) -> list[Problem]:
    """Problems of different lengths in the words of the small tokenizer."""
    questions = {n: f"{text(1 + n % 4, n)} {n}?" for n in range(first, first + count)}
    return [
        Problem(id=f"p-{n}", source="p", question=asked, rationale=" ".join(["night"] * (n % 3)), answer=str(n)) for n, asked in questions.items()
    ]


def trainer_of(config: RunConfig) -> Any:
    """A trainer on this rank, of a pretraining run or of a fine-tuning run, whose length follows from its epochs."""
    from finetune.problems import open_problems
    from pretrain.parallel import groups as parallel_groups
    from pretrain.trainer import Trainer

    groups = parallel_groups.initialize(config.parallel, seed=config.seed)
    if config.sft is None:
        return Trainer(config, groups)
    run = open_problems(config)
    return Trainer(run.config, groups, run.build_samples)


def digest_of(shard: Any) -> str:
    """Hash of everything that a rank is given for a step: tokens, noise, targets."""
    digest = hashlib.blake2b(digest_size=8)
    for batch in shard.micro_batches:
        for tensors in (batch.inputs, batch.targets):
            for key in sorted(tensors):
                digest.update(tensors[key].numpy().tobytes())
    return digest.hexdigest()


def train(config: RunConfig, *, kill_at: int | None = None) -> dict[str, Any]:
    """Train to the end on this rank (call it through tests.distributed). With `kill_at`, SIGKILL this process when that step has been done."""
    if kill_at is not None:  # a save in the background may not have ended by then; kills in the middle of saves have tests of their own
        config = replace(config, checkpoint=replace(config.checkpoint, asynchronous=False))
    trainer = trainer_of(config)
    seen, losses, rates, norms = [], [], [], []
    step_of_engine = trainer.engine.train_step

    def watched(shard: Any, lr: float) -> Any:
        result = step_of_engine(shard, lr)
        seen.append((shard.step, [batch.sample_ids for batch in shard.micro_batches], digest_of(shard)))
        losses.append(result.loss)
        rates.append(lr)
        norms.append(result.gradient_norm)
        if kill_at is not None and shard.step + 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    trainer.engine.train_step = watched  # type: ignore[method-assign]
    try:
        trainer.fit()
    finally:
        trainer.close()
    flats = [flat.detach().clone() for flat in trainer.engine.flat_partitions()]
    states = [trainer.engine.base_optimizer.state[flat] for flat in trainer.engine.flat_partitions()]
    moments = [state[key].clone() for state in states for key in ("exp_avg", "exp_avg_sq")]
    own = trainer.objective.modules().state_dict().values()
    return {
        "seen": seen, "losses": losses, "rates": rates, "norms": norms, "weights": torch.cat(flats), "moments": torch.cat(moments),
        "objective": torch.cat([value.detach().flatten().double() for value in own]) if own else torch.zeros(0),
    }  # fmt: skip


def noised_samples(config: RunConfig) -> dict[int, str]:
    """sample id -> hash of its noised inputs and targets, for every sample that this rank's loader hands out in two steps."""
    trainer = trainer_of(config)
    found = {}
    with trainer._training_loader() as loader:
        for _ in range(2):
            for batch in next(loader).micro_batches:
                for row, number in enumerate(batch.sample_ids):
                    digest = hashlib.blake2b(digest_size=8)
                    for tensors in (batch.inputs, batch.targets):
                        for key in sorted(tensors.keys() - {"documents"}):  # left out of a micro-batch in which nothing is masked
                            digest.update(tensors[key][row].numpy().tobytes())
                    found[number] = digest.hexdigest()
    trainer.close()
    return found
