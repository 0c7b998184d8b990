"""What a run tells about itself. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What is recorded, and where else it goes.

    log_every     steps between records.
    wandb         off, offline (no account needed) or online.
    peak_tflops   denominator of MFU per rank; None: by device.
    """

    log_every: int = 10
    wandb: Literal["off", "offline", "online"] = "offline"
    wandb_project: str = "pretrain"
    peak_tflops: float | None = None
