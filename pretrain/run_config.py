"""The run as one typed tree. Hydra composes YAML; past `main` there is only this.

No torch here: `--cfg job`, `--help` and every configuration error must come in a second or two.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pretrain.backbones.config import BackboneConfig, InputConfig
from pretrain.data.config import DataConfig
from pretrain.data.sft_config import SFTConfig
from pretrain.engine.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from pretrain.objectives.config import ObjectiveConfig
from pretrain.parallel.config import ParallelConfig
from pretrain.telemetry.config import GuardConfig, TelemetryConfig


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Sequences per optimizer step, sequences per forward pass and rank, and tokens per sequence."""

    global_sequences: int
    micro_sequences: int
    length: int


@dataclass(frozen=True, kw_only=True)
class DurationConfig:
    """When the run ends: exactly one of steps, tokens (input tokens, rounded down to whole steps) or flops (the isoFLOP studies' count) is set.

    stop_after  leave cleanly, with a checkpoint, once this step is reached, without shortening the schedule; None: at the end.
    """

    steps: int | None = None
    tokens: float | None = None
    flops: float | None = None
    stop_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """every: steps between validations (0: at the end only). draws: noise draws per sequence. The whole held-out set is always read."""

    every: int = 1000
    draws: int = 1


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run is saved, and what is kept.

    every             steps between checkpoints (the last step is always saved).
    keep              complete checkpoints retained (0: all); milestones are kept besides.
    milestone_tokens  a checkpoint is saved, and never deleted, as soon as another so many input tokens are consumed; None: no milestones.
    asynchronous      train on while a copy of the state in host memory is written; false: wait for the disk, and need no such memory.
    """

    every: int = 1000
    keep: int = 3
    milestone_tokens: float | None = None
    asynchronous: bool = True


def input_config(objective: ObjectiveConfig) -> InputConfig:
    """What stands at each position of the network that an objective trains."""
    if objective.name == "mdm_prime":
        prime = objective.mdm_prime
        return InputConfig(kind="digits", base=prime.base, digits=prime.digits, join=prime.join)
    if objective.name == "replaid":
        return InputConfig(kind="latents", latent=objective.replaid.latent, prompt=objective.replaid.prompt_embedding)
    return InputConfig()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run. The run directory is `root/name`, the same for every rank and restart.

    tokenizer  a sentencepiece .model or a Hugging Face tokenizer.json; the data manifest must name the same one.
    resume     auto: continue the newest complete checkpoint, or start in an empty directory; changed: continue although settings that the
               steps to come depend on have changed (checkpoint.changes says which those are); fresh: move what is there aside and start over.
    init_from    where a run takes its first weights from: another run's directory or checkpoint, of any layout, or a folder that `transformers`
                 loads (convert.origin); None: drawn from the seed. The run starts at step 0 all the same. Its own checkpoints come first.
    sft            what a fine-tuning run reads in place of data.train (launchers/finetune.py); None: the run pretrains.
    init_moments   take AdamW's moments too, where that checkpoint has them; otherwise they start from zero.
    """

    name: str
    root: str = "runs"
    seed: int = 1
    resume: Literal["auto", "changed", "fresh"] = "auto"
    init_from: str | None = None
    init_moments: bool = False
    tokenizer: str
    objective: ObjectiveConfig
    backbone: BackboneConfig
    data: DataConfig
    batch: BatchConfig
    duration: DurationConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    sft: SFTConfig | None = None

    def __post_init__(self) -> None:
        """What the network reads follows from the objective."""
        object.__setattr__(self, "backbone", replace(self.backbone, inputs=input_config(self.objective)))

    @property
    def directory(self) -> Path:
        """Where this run lives."""
        return Path(self.root) / self.name
