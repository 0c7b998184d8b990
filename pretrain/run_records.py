"""What a run writes down about itself: its log's opening facts, and a record of every few steps."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from pretrain.backbones.parameters import count_parameters
from pretrain.build import compute_dtype
from pretrain.checkpoint.layout import Layout
from pretrain.engine.statistics import TIME_BINS, StepResult, time_records
from pretrain.errors import counted
from pretrain.objectives.base import Objective
from pretrain.parallel.groups import Groups
from pretrain.rules import Derived, run_flops_per_token
from pretrain.run_config import RunConfig
from pretrain.telemetry.log import LOG_NAME, RunLog
from pretrain.telemetry.throughput import Compute, Throughput, device_peak, peak_memory_gib


@dataclass
class Window:
    """Sums since the last training record."""

    steps: int = 0
    loss: float = 0.0
    nelbo: float = 0.0
    gradient_norm: float = 0.0
    tokens: int = 0
    time_sums: np.ndarray = field(default_factory=lambda: np.zeros((TIME_BINS, 5)))

    def add(self, result: StepResult) -> None:
        """Count one step."""
        self.steps += 1
        self.loss += result.loss * result.tokens
        self.nelbo += result.nelbo * result.tokens
        self.gradient_norm = max(self.gradient_norm, result.gradient_norm)
        self.tokens += result.tokens
        self.time_sums = self.time_sums + result.time_sums


def open_log(
    config: RunConfig, objective: Objective, derived: Derived, groups: Groups, device: torch.device, *, layout: Layout, resumed_step: int | None
) -> tuple[RunLog, Throughput]:
    """The log with what a reader wants to know first, and the meter of this run. Raises UserError if the log cannot be written."""
    model_size = objective.vocabulary.model_size
    flops = run_flops_per_token(config, model_size)
    dtype: Compute = "fp8" if config.precision.fp8 else "bf16" if compute_dtype(config) is torch.bfloat16 else "fp32"
    peak = device_peak(device, dtype, config.telemetry.peak_tflops)
    log = RunLog(
        config.directory,
        is_main=groups.is_main,
        settings=config.telemetry,
        label=objective.label(evaluation=False),
        resumed_step=resumed_step,
        total_steps=derived.steps,
        last_step=derived.last_step,
        run_name=config.name,
        config=dataclasses.asdict(config),
        facts={
            "parameters": count_parameters(config.backbone, model_size),
            "vocabulary": dataclasses.asdict(objective.vocabulary),
            "training_flops_per_token": flops,
            "flops_formula": "3 x forward matrix products, attention scores and values counted in full",
            "peak_flops_per_rank": peak.flops,
            "peak_source": peak.source,
            "layout": str(layout),
            "compute": dtype,
        },
    )
    for sentence in _opening(config, derived, f"{layout}, {dtype} on {device.type}", resumed_step):
        log.say(sentence)
    return log, Throughput(flops, peak.flops, ranks=groups.world_size)


def _opening(config: RunConfig, derived: Derived, where: str, resumed_step: int | None) -> Iterator[str]:
    """What a start prints first."""
    parameters = count_parameters(config.backbone, derived.model_size) / 1e6
    kind = f"{config.objective.name} with {parameters:,.4g}M parameters ({config.backbone.kind})"
    yield f"{config.directory}: {kind}, {where}; log: {config.directory / LOG_NAME}"
    begins = f"from step {resumed_step:,}, " if resumed_step else ""
    leaves = f", leaving at step {derived.last_step:,}" if derived.last_step != derived.steps else ""
    size = f"{config.batch.global_sequences} x {config.batch.length} = {derived.tokens_per_step:,} tokens"
    yield f"{begins}{counted(derived.steps, 'step')} of {size}, {derived.steps * derived.tokens_per_step:.4g} tokens in all{leaves}"


def training_record(
    window: Window, speed: dict[str, float], *, tokens: int, tokens_per_step: int, lr: float, device: torch.device
) -> dict[str, object]:
    """The figures of the steps in `window`. tokens: input tokens since step 0; speed: what Throughput.read gave."""
    bins = time_records(window.time_sums)
    record = {
        "tokens": tokens,
        "loss_nats_per_token": window.loss / window.tokens,
        "nelbo_nats_per_token": window.nelbo / window.tokens,
        "lr": lr,
        "gradient_norm": window.gradient_norm,
        "peak_memory_gib": peak_memory_gib(device),
        **speed,
        "loss_bearing_tokens_per_second": speed["tokens_per_second"] * window.tokens / (window.steps * tokens_per_step),
    }
    return record | ({"t_bins": bins} if bins else {})
