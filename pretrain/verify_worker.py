"""One rank of one start that verify=resume makes: python -m pretrain.verify_worker SPEC RANK.

It trains as launchers/pretrain.py does, and writes down what it saw: per step the loss, the learning rate, the fingerprint of the text, and of
each sample its number and a hash of what the network was given (tokens, noise, targets). Where it is told to, it dies by SIGKILL.
"""

import dataclasses
import hashlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.layout import TrainState
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.command_line import run_command
from pretrain.compose import typed
from pretrain.data.batch import BatchShard, MicroBatch
from pretrain.engine.statistics import StepResult
from pretrain.parallel import groups as parallel_groups
from pretrain.run_config import RunConfig
from pretrain.trainer import Trainer

RESTORED = "restored"
"""Run directory beside the evidence: what a start had in its engine when it had loaded a checkpoint, saved at once."""


@dataclass(frozen=True)
class Spec:
    """What a start does. kill_at: step (1-based) after which every rank kills itself; None: it trains to its end. evidence: folder."""

    config: RunConfig
    evidence: Path
    kill_at: int | None

    @staticmethod
    def read(path: Path) -> "Spec":
        """The file that the parent wrote."""
        tree = json.loads(path.read_text())
        return Spec(typed(RunConfig, tree["config"]), Path(tree["evidence"]), tree["kill_at"])


def main() -> int:
    """Train one start, watched."""
    spec, rank = Spec.read(Path(sys.argv[1])), int(sys.argv[2])
    groups = parallel_groups.initialize(spec.config.parallel, seed=spec.config.seed)
    trainer = Trainer(spec.config, groups)
    try:
        if trainer.step:
            _save_restored(trainer, spec.evidence / RESTORED)
        with (spec.evidence / f"rank_{rank}.jsonl").open("w", encoding="utf-8") as file:
            stepped = trainer.engine.train_step

            def watched(shard: BatchShard, lr: float) -> StepResult:
                result = stepped(shard, lr)
                file.write(json.dumps(_seen(trainer, shard, lr, result)) + "\n")
                file.flush()
                if shard.step + 1 == spec.kill_at:
                    trainer.saving.settle()  # the save before it is what the next start is to find
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            trainer.engine.train_step = watched  # type: ignore[method-assign]
            trainer.fit()
    finally:
        trainer.close()
    trainer.peers.exchange(None)
    parallel_groups.shutdown()
    return 0


def _seen(trainer: Trainer, shard: BatchShard, lr: float, result: StepResult) -> dict[str, Any]:
    samples = {str(number): digest for batch in shard.micro_batches for number, digest in _hashes(batch).items()}
    text = trainer.samples.fingerprint(shard.step)
    return {"step": shard.step + 1, "loss": result.loss, "norm": result.gradient_norm, "lr": lr, "text": text, "samples": samples}


def _hashes(batch: MicroBatch) -> dict[int, str]:
    """Sample number -> hash of its inputs and targets, in any layout the same."""
    found = {}
    for row, number in enumerate(batch.sample_ids):
        digest = hashlib.blake2b(digest_size=8)
        for tensors in (batch.inputs, batch.targets):
            for key in sorted(tensors.keys() - {"documents"}):  # left out of a micro-batch in which nothing is masked
                digest.update(tensors[key][row].cpu().numpy().tobytes())
        found[number] = digest.hexdigest()
    return found


def _save_restored(trainer: Trainer, run_dir: Path) -> None:
    state = TrainState(
        step=trainer.step, tokens=0, samples=0, lr=0.0, next_batch="", seed=trainer.config.seed, layout=trainer._layout(),
        backbone=dataclasses.asdict(trainer.config.backbone), rows=trainer.objective.vocabulary.padded_size,
    )  # fmt: skip
    CheckpointManager(run_dir, 0, trainer.peers, say=lambda _: None).save(trainer.step, trainer.engine.save, state, "")


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="use a smaller batch.micro_sequences, or more ranks"))
