"""What a run tells about itself. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What is recorded, and where else it goes.

    log_every     steps between records.
    wandb         off, offline (no account needed) or online.
    peak_tflops   denominator of MFU per rank; None: by device.
    hang_seconds  without a step boundary for so long the run ends and says which rank hangs where; 0: never. One step, a held-out batch and a
                  save each must take less.
    """

    log_every: int = 10
    wandb: Literal["off", "offline", "online"] = "offline"
    wandb_project: str = "pretrain"
    peak_tflops: float | None = None
    hang_seconds: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What is done about numbers that go wrong.

    nonfinite        a loss or gradient that is not finite: stop; skip, leave out the step's update; rewind, go back to the last checkpoint and
                     on with the text after the one that led here.
    spike            the same for a loss far above what its diffusion times explain, or warn, or off.
    spike_threshold  deviations from the running mean that make a spike.
    spike_warmup     observations before anything is called one.
    max_skips        skips and rewinds within `window` steps that are borne; one more stops the run.
    replicas_every   steps between comparisons of parameters that several ranks hold; 0: never.
    """

    nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    spike: Literal["off", "warn", "skip", "rewind"] = "warn"
    spike_threshold: float = 6.0
    spike_warmup: int = 200
    max_skips: int = 5
    window: int = 1000
    replicas_every: int = 1000
