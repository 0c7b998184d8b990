"""Learning rate as a pure function of the step: nothing to save, nothing to restore wrongly."""

import math

from pretrain.engine.config import ScheduleConfig


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Length of the warm-up: as configured, or max(1% of the run, 100) (scaling-dllms), but at most a tenth of a short run."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return min(max(total_steps // 100, 100), max(total_steps // 10, 1))


def learning_rate(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Rate of update number `step` (0-based) of `total_steps`.

    Warm-up is peak (step + 1) / warmup. Afterwards: constant; cosine from peak to final over the rest of the run; or wcd, constant and then
    linear to final over the last `decay_fraction` of the run.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.peak * (step + 1) / warmup
    if config.kind == "constant":
        return config.peak
    if config.kind == "cosine":
        done = (step - warmup) / max(total_steps - 1 - warmup, 1)
        return config.final + (config.peak - config.final) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    decay = max(round(config.decay_fraction * total_steps), 1)
    left = max(total_steps - 1 - step, 0)
    return config.peak if left >= decay else config.final + (config.peak - config.final) * left / decay
