"""What happens when numbers go wrong: a loss or gradient that is not finite, a spike, copies of a parameter that are no longer equal.

The engine asks `accept` before it updates, so a step that is refused leaves weights, moments, averages and counts untouched, bit for bit. The
step still counts: the next one has the next learning rate and the next text. A rewind goes back to the last checkpoint, and leaves out the text
from there to the step that went wrong. All ranks see the same numbers, and so decide alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pretrain.data.batch import BatchShard
from pretrain.data.samples import TrainingStream
from pretrain.engine.diagnosis import diagnose
from pretrain.engine.replicas import ReplicaCheck
from pretrain.engine.statistics import StepResult
from pretrain.engine.zero import Engine
from pretrain.errors import UserError
from pretrain.telemetry.config import GuardConfig
from pretrain.telemetry.spikes import SpikeDetector

Action = Literal["keep", "skip", "rewind"]
_SHOWN = 4
"""Samples whose documents are listed."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a step, and what is said about it."""

    action: Action
    message: str = ""


class Guard:
    """The policies of one run. say: an event of the log (step, kind, message); advice: what a user can do about a divergence."""

    def __init__(self, config: GuardConfig, engine: Engine, samples: TrainingStream, say: Callable[[int, str, str], None], advice: str) -> None:
        self._config, self._engine, self._samples, self._say, self._advice = config, engine, samples, say, advice
        self._spikes = None if config.spike == "off" else SpikeDetector(threshold=config.spike_threshold, warmup=config.spike_warmup)
        self._replicas = ReplicaCheck(engine.module, engine.objective.modules(), engine.groups, engine.device)
        self._left_out: list[int] = []
        self._score: float | None = None
        engine.accept = self.accept

    def accept(self, result: StepResult) -> bool:
        """Whether a step may update the weights."""
        self._score = None
        if not result.finite:
            return False
        if self._spikes is not None:
            self._score = self._spikes.judge(*parts(result))
        return self._score is None or self._config.spike == "warn"

    def check(self, shard: BatchShard, result: StepResult) -> Verdict:
        """After a step. Raises UserError if it stops the run."""
        step = shard.step + 1
        if not result.finite:
            return self._refused(step, self._config.nonfinite, self._describe(shard, result))
        if self._score is None:
            return Verdict("keep")
        said = f"step {step} gave loss {result.loss:.4g}, {self._score:.1f} deviations above what its diffusion times explain"
        if self._config.spike == "warn":
            self._say(step, "spike", said)
            return Verdict("keep")
        return self._refused(step, self._config.spike, said)

    def _refused(self, step: int, policy: str, said: str) -> Verdict:
        if policy == "stop":
            raise UserError(f"{said}: the run diverged and stops here, with its earlier checkpoints intact; {self._advice}")
        self._left_out = [at for at in self._left_out if at > step - self._config.window] + [step]
        if len(self._left_out) > self._config.max_skips:
            raise UserError(
                f"{said}: more than guard.max_skips={self._config.max_skips} steps within guard.window={self._config.window} went wrong, so the run "
                f"diverged and stops here, with its earlier checkpoints intact; {self._advice}"
            )
        if policy == "skip":
            self._say(step, "skip", f"{said}; its update was left out")
            return Verdict("skip", said)
        return Verdict("rewind", said)

    def check_replicas(self, step: int) -> None:
        """When due after `step`: raises UserError naming what copies of a parameter differ on which ranks. Collective."""
        every = self._config.replicas_every
        if not every or step % every or self._engine.groups.world_size == 1:
            return
        found = self._replicas.compare()
        if found:
            listed = "; ".join(map(str, found[:_SHOWN])) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
            raise UserError(
                f"after step {step} copies of a parameter differ between ranks: {listed}; a device, its memory or a connection is at fault: "
                "take that machine out, and start again from the newest checkpoint that is older than the last comparison "
                f"(guard.replicas_every={every})"
            )

    def _describe(self, shard: BatchShard, result: StepResult) -> str:
        diagnosis = diagnose(self._engine, shard) if not result.updated else None
        said = f"step {shard.step + 1} gave loss {result.loss:.4g} and gradient norm {result.gradient_norm:.4g}"
        if diagnosis is None:
            return said
        return f"{said}, {diagnosis}{self._documents(diagnosis.samples)}"

    def _documents(self, numbers: tuple[int, ...]) -> str:
        """Samples with the documents that they were cut from."""
        found = [f"{number} ({self._samples.origin_of(number)})" for number in numbers[:_SHOWN]]
        rest = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
        return f", in {'sample' if len(numbers) == 1 else 'samples'} {', '.join(found)}{rest}" if found else ""

    # ---- state --------------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {"left_out": self._left_out, "spikes": self._spikes.state() if self._spikes else None}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self._left_out = list(state.get("left_out", []))
        if self._spikes is not None and state.get("spikes"):
            self._spikes.load(state["spikes"])

    def rewound(self, state: Mapping[str, Any]) -> None:
        """The same after a rewind, which itself counts among the steps left out."""
        left_out = self._left_out
        self.load(state)
        self._left_out = left_out


def parts(result: StepResult) -> tuple[np.ndarray, np.ndarray]:
    """Summed losses and tokens of each part of the t axis, and last of what has no time."""
    timed_tokens, timed_losses = result.time_sums[:, 1], result.time_sums[:, 2]
    rest = result.tokens - timed_tokens.sum()
    losses = np.append(timed_losses, result.loss * result.tokens - timed_losses.sum())
    return losses, np.append(timed_tokens, rest if rest > 0.5 else 0.0)
