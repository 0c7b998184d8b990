"""kill -9 at random moments of one run, again and again; then it must have ended where an uninterrupted run ends, bit for bit.

    python -m tests.kills --kills 60 --ranks 1
    python -m tests.kills --kills 50 --ranks 2          one rank of two is killed, and what is left is swept away as torchrun would

Each start draws a phase, which time it is entered, and a delay, and its process kills itself with SIGKILL so long after it entered the phase;
what it was really doing then is written down. Checkpoints are saved in the background after every step, and one is kept. Starts are forked
from a server that has everything imported.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.distributed import _CONTEXT, _entry, run_distributed

DELAYS = {"starting": 0.2, "loading": 0.05, "training": 0.06, "copying": 0.01, "saving": 0.03, "renaming": 0.0, "pruning": 0.01}
"""Phase -> longest delay in seconds after it is entered."""


LOGGED = ("step", "tokens", "loss_nats_per_token", "nelbo_nats_per_token", "lr", "gradient_norm")


@dataclass(frozen=True)
class Plan:
    """What kills a start: the entrance of a phase by its count, the delay, the rank, and for renaming whether before or after it."""

    phase: str
    count: int
    delay: float
    rank: int
    after: bool


class Phases:
    """What this process is doing, over all its threads; kills it by plan."""

    def __init__(self, plan: Plan | None, record: Path) -> None:
        self.plan, self.record = plan, record
        self.counts: Counter[str] = Counter()
        self.now: list[str] = []

    @contextmanager
    def entered(self, phase: str) -> Iterator[None]:
        self.counts[phase] += 1
        due = self.plan is not None and self.plan.phase == phase and self.plan.count == self.counts[phase]
        self.now.append(phase)
        if due and not (phase == "renaming" and self.plan.after):
            self._die()
        yield
        if due:
            self._die()
        self.now.remove(phase)

    def _die(self) -> None:
        if self.plan.delay:
            threading.Timer(self.plan.delay, self._kill).start()
        else:
            self._kill()

    def _kill(self) -> None:
        with self.record.open("a") as file:
            file.write(json.dumps({"planned": self.plan.phase, "during": sorted(set(self.now)) or ["between"]}) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, phase: str, wanted: Callable[..., bool] = lambda *_: True) -> None:
        """Every call of owner.name is the phase."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not wanted(*args):
                return original(*args, **kwargs)
            with self.entered(phase):
                return original(*args, **kwargs)

        setattr(owner, name, call)


def start(config: Any, plan: Plan | None, evidence: str) -> None:
    """One start on this rank."""
    import torch.distributed as dist

    from pretrain import trainer as training
    from pretrain.checkpoint.manager import CheckpointManager
    from pretrain.checkpoint.saving import Saving
    from pretrain.engine.zero import Engine
    from tests import small_run

    rank = dist.get_rank()
    phases = Phases(plan if plan and plan.rank == rank else None, Path(evidence) / "kills.jsonl")
    begin = training.Trainer._begin

    def noting(trainer: Any) -> None:
        begin(trainer)
        _note(Path(evidence) / f"starts_{rank}.jsonl", {"step": trainer.step})

    training.Trainer._begin = noting  # type: ignore[method-assign]
    step = Engine.train_step

    def seen(engine: Engine, shard: Any, lr: float) -> Any:
        with phases.entered("training"):
            result = step(engine, shard, lr)
        _note(Path(evidence) / f"steps_{rank}.jsonl", {"step": shard.step, "loss": result.loss, "lr": lr, "data": small_run.digest_of(shard)})
        return result

    Engine.train_step = seen  # type: ignore[method-assign]
    phases.around(training.Trainer, "_begin", "starting")
    phases.around(training.Trainer, "_load", "loading")
    phases.around(Saving, "start", "copying")
    phases.around(CheckpointManager, "save", "saving")
    phases.around(CheckpointManager, "_delete", "pruning")
    phases.around(os, "rename", "renaming", lambda source, target: "/checkpoints/" in str(target))
    small_run.train(config)


def _note(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def killed(config: Any, plan: Plan, ranks: int, evidence: Path) -> bool:
    """Make a start that is to be killed; whether it was. When one rank has died, the others are given a moment, then killed."""
    with tempfile.TemporaryDirectory() as folder:
        results = _CONTEXT.Queue()
        store = str(Path(folder) / "store")
        processes = [
            _CONTEXT.Process(target=_entry, args=(start, (config, plan, str(evidence)), rank, ranks, store, results)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        processes[plan.rank].join(120)
        for process in processes:
            process.join(0.3)
            process.kill()
            process.join()
        return processes[plan.rank].exitcode == -signal.SIGKILL


def draw(generator: random.Random, ranks: int) -> Plan:
    """A plan; only the first rank renames and prunes."""
    phase = generator.choice(list(DELAYS))
    rank = 0 if phase in ("renaming", "pruning") else generator.randrange(ranks)
    count = 1 if phase in ("starting", "loading") else generator.randint(1, 3)
    return Plan(phase, count, generator.uniform(0, DELAYS[phase]), rank, generator.random() < 0.5)


def newest(config: Any) -> int:
    """Step of the newest complete checkpoint."""
    from pretrain.checkpoint.manager import find_checkpoint

    return find_checkpoint(config.directory).step


def lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file whose last line a kill may have cut."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def campaign(config: Any, ranks: int, kills: int, seed: int, say: Callable[[str], None] = lambda _: None) -> tuple[Counter[str], Path]:
    """Kill a run so often, then let it end. How often in which phase, and the folder of the evidence. Asserts that each start went on from the
    newest complete checkpoint, and that none was lost."""
    evidence = Path(config.root).parent / f"evidence_{config.name}"
    evidence.mkdir()
    generator, done, starts = random.Random(seed), 0, 0
    first = replace(config, duration=replace(config.duration, stop_after=1))
    run_distributed(start, ranks, first, None, str(evidence))
    begun = time.monotonic()
    while done < kills:
        before = newest(config)
        assert before < config.duration.steps, f"the run ended after {done} kills: give it more steps"
        had = len(lines(evidence / "starts_0.jsonl"))
        done += killed(config, draw(generator, ranks), ranks, evidence)
        starts += 1
        assert starts < 3 * kills + 10, "plans do not come to a kill"
        began = [one["step"] for one in lines(evidence / "starts_0.jsonl")[had:]]
        assert began in ([], [before]), f"a start went on from step {began} where {before} is the newest complete checkpoint"
        assert newest(config) >= before, "a complete checkpoint was lost"
        if done % 10 == 0:
            say(f"{done} of {kills} kills, step {newest(config)}, {time.monotonic() - begun:.0f} s")
    run_distributed(start, ranks, config, None, str(evidence), timeout=300)
    return Counter("+".join(one["during"]) for one in lines(evidence / "kills.jsonl")), evidence


def compare(config: Any, whole: Any, ranks: int, evidence: Path, straight: Path) -> int:
    """Asserts that both runs did the same, bit for bit: every step as often as it was done, the log, the last checkpoint. Steps compared."""
    import torch

    from pretrain.checkpoint.manager import find_checkpoint
    from pretrain.checkpoint.zero_reader import ZeroCheckpoint
    from pretrain.telemetry.log import read_log

    compared = 0
    for rank in range(ranks):
        want = {one["step"]: one for one in lines(straight / f"steps_{rank}.jsonl")}
        seen = lines(evidence / f"steps_{rank}.jsonl")
        assert {one["step"] for one in seen} == want.keys() == set(range(config.duration.steps))
        assert all(one == want[one["step"]] for one in seen), "a step was done otherwise"
        compared += len(seen)
    logs = [[r for r in read_log(each.directory / "log.jsonl") if r["kind"] == "train"] for each in (config, whole)]
    assert [r["step"] for r in logs[0]] == list(range(1, config.duration.steps + 1)), "the log is doubled or holed"
    assert all(one[key] == other[key] for one, other in zip(*logs, strict=True) for key in LOGGED)
    one, other = (ZeroCheckpoint(find_checkpoint(each.directory).folder) for each in (config, whole))
    assert (one.state.step, one.state.samples) == (other.state.step, other.state.samples) == (config.duration.steps, other.state.samples)
    assert all(torch.equal(one.tensor(name, key), other.tensor(name, key)) for name in one.table for key in one.keys)
    return compared


def prove(folder: Path, ranks: int, kills: int, seed: int, say: Callable[[str], None] = lambda _: None) -> tuple[Counter[str], int]:
    """The whole proof: kills by phase, and steps that were compared."""
    from pretrain.run_config import CheckpointConfig, DurationConfig, ValidationConfig
    from tests.small_run import small_config

    config = small_config(
        folder, "mdlm", duration=DurationConfig(steps=4 * kills + 10), checkpoint=CheckpointConfig(every=1, keep=1),
        validation=ValidationConfig(every=0),
    )  # fmt: skip
    whole = replace(config, name="whole", checkpoint=CheckpointConfig(every=1_000_000, keep=1))
    straight = folder / "evidence_whole"
    straight.mkdir()
    run_distributed(start, ranks, whole, None, str(straight), timeout=300)
    found, evidence = campaign(config, ranks, kills, seed, say)
    return found, compare(config, whole, ranks, evidence, straight)


def main() -> None:
    """Kill, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        begun = time.monotonic()
        found, steps = prove(Path(place), given.ranks, given.kills, given.seed, lambda text: print(text, flush=True))
    print(f"{given.kills} kills on {given.ranks} ranks in {time.monotonic() - begun:.0f} s; {steps} steps compared, all equal, and so are log, "
          "weights, moments and data at the end")  # fmt: skip
    for phase, count in found.most_common():
        print(f"  {count:4} while {phase}")


if __name__ == "__main__":
    main()
