"""Optimizer, schedule and precision. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW.

    decay  all: weight decay on every parameter (the paper's runs); matrices: not on norms, biases and embeddings.
    clip   global gradient norm; 0 turns clipping off.
    ema    decay of an exponential moving average of the weights; 0 turns it off.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: Literal["all", "matrices"] = "all"
    clip: float = 1.0
    ema: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate as a pure function of the step (the schedules of scaling-dllms).

    kind             constant, cosine, or wcd (warm-up, constant, decay).
    peak, final      learning rates; `final` is reached at the last step (unused by constant).
    warmup_steps     linear warm-up, lr = peak * (step + 1) / warmup_steps; None: max(1% of the steps, 100), but at most a tenth of the run.
    decay_fraction   wcd: share of the run, at its end, over which the rate falls linearly to `final`.
    """

    kind: Literal["constant", "cosine", "wcd"] = "cosine"
    peak: float = 2e-4
    final: float = 2e-5
    warmup_steps: int | None = None
    decay_fraction: float = 1 / 3


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Arithmetic.

    compute         fp32, bf16 (fp32 master weights and gradient accumulation), or auto: bf16 on CUDA and on CPUs with bf16 matrix units, else fp32.
    fp8             Transformer Engine FP8 matrix products (CUDA with transformer-engine only).
    fp32_residual   keep the residual stream in fp32 under bf16, as the authors' runs do.
    loss_chunk      positions whose logits are upcast to fp32 at once on the last stage.
    """

    compute: Literal["auto", "fp32", "bf16"] = "auto"
    fp8: bool = False
    fp32_residual: bool = True
    loss_chunk: int = 128
