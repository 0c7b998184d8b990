"""What a checkpoint costs training: steps during a save in the background against steps without one, and a save at once beside it.

    python tests/benchmarks/saving.py                         this machine's disk
    python tests/benchmarks/saving.py --disk-mb-per-second 60 a slower disk: every write sleeps for as long as such a disk would take

One process, random text, a Llama-style MDLM (--hidden, --layers). Training computes on --threads threads (1): as beside a GPU, a core is left for
the thread that writes; with as many threads as cores the two compete. In each round: steps without a save, a save in the background with as
many steps as it takes, a save at once. Ratios are of medians over all rounds, with their means beside them. Where other programs compete for the
cores, wall times say little: the load average is printed, and the processor time of the training thread, which they do not change much.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402

import pretrain.engine.snapshot as snapshot  # noqa: E402
from pretrain.backbones.config import BackboneConfig  # noqa: E402
from pretrain.build import build_engine, build_objective  # noqa: E402
from pretrain.checkpoint.files import size  # noqa: E402
from pretrain.checkpoint.layout import Layout, TrainState  # noqa: E402
from pretrain.checkpoint.manager import CheckpointManager  # noqa: E402
from pretrain.checkpoint.peers import Peers  # noqa: E402
from pretrain.checkpoint.saving import Saved, Saving  # noqa: E402
from pretrain.data.config import DataConfig  # noqa: E402
from pretrain.data.loader import Loader  # noqa: E402
from pretrain.data.random_text import RandomText  # noqa: E402
from pretrain.engine.config import PrecisionConfig  # noqa: E402
from pretrain.objectives.config import ObjectiveConfig  # noqa: E402
from pretrain.parallel import groups as parallel_groups  # noqa: E402
from pretrain.parallel import platform  # noqa: E402
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig  # noqa: E402
from pretrain.selftest import assumed  # noqa: E402


class ThrottledFile:
    """A file on a disk that takes so many megabytes a second."""

    def __init__(self, file: Any, rate: float) -> None:
        self._file, self._rate = file, rate

    def write(self, content: Any) -> int:
        time.sleep(len(content) / self._rate)
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "ThrottledFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass
class Times:
    """Pairs: seconds of a step, and of the training thread's processor in it."""

    plain: list[tuple[float, float]] = field(default_factory=list)
    during: list[tuple[float, float]] = field(default_factory=list)
    steps_of_a_save: list[int] = field(default_factory=list)
    background: list[Saved] = field(default_factory=list)
    at_once: list[Saved] = field(default_factory=list)


def config_of(options: argparse.Namespace) -> RunConfig:
    return RunConfig(
        name="saving", tokenizer="none.model", objective=ObjectiveConfig(name="mdlm"), data=DataConfig(train={}),
        backbone=BackboneConfig(kind="llama", hidden=options.hidden, layers=options.layers, heads=options.hidden // 64),
        batch=BatchConfig(global_sequences=1, micro_sequences=1, length=options.length), duration=DurationConfig(steps=10**6),
        precision=PrecisionConfig(compute="fp32"),
    )  # fmt: skip


def measure(options: argparse.Namespace, folder: Path) -> Times:
    config, times = config_of(options), Times()
    groups = parallel_groups.initialize(config.parallel, seed=1)
    vocabulary = assumed(config, 257)
    objective = build_objective(config.objective, vocabulary)
    engine = build_engine(config, objective, groups, platform.device())
    text = RandomText(config.batch, vocabulary, corrupt=partial(objective.corrupt, evaluation=False), lookahead=0, seed=1, parts=objective.parts)
    loader = Loader(text, config.data, config.batch, dp_rank=0, dp_size=1, steps=iter(range(1 << 30)), device=engine.device)
    layout, done = Layout.of(config.parallel, 1), 0

    def step() -> tuple[float, float]:
        nonlocal done
        begun, computed = time.perf_counter(), time.thread_time()
        engine.train_step(next(loader), 1e-4)
        done += 1
        return time.perf_counter() - begun, time.thread_time() - computed

    def saving(run: str, asynchronous: bool, report: Callable[[Saved], None]) -> Saving:
        return Saving(CheckpointManager(folder / run, 1), Peers.alone(), Peers.alone() if asynchronous else None, report)

    background, at_once = saving("background", True, times.background.append), saving("at_once", False, times.at_once.append)
    with loader:
        for number in range(options.rounds + 1):  # the first round warms up, and gets the memory of the snapshot
            plain = [step() for _ in range(options.steps)]
            state = TrainState(
                step=done, tokens=done, samples=done, lr=0, next_batch="", seed=1, layout=layout, backbone={}, rows=vocabulary.padded_size
            )
            background.start(done, engine, state, "")
            during: list[tuple[float, float]] = []
            while len(times.background) == number:
                during.append(step())
                background.boundary(done)
            at_once.start(done, engine, state, "")
            step(), at_once.boundary(done), background.finish()
            if number:
                times.plain += plain
                times.during += during
                times.steps_of_a_save.append(len(during))
    return Times(times.plain, times.during, times.steps_of_a_save, times.background[1:], times.at_once[1:])


def show(times: Times, options: argparse.Namespace) -> None:
    plain, plain_processor = (statistics.median(column) for column in zip(*times.plain, strict=True))
    during, during_processor = (statistics.median(column) for column in zip(*times.during, strict=True))
    means = statistics.mean(wall for wall, _ in times.during) / statistics.mean(wall for wall, _ in times.plain)
    disk = f"throttled to {options.disk_mb_per_second:g} MB/s" if options.disk_mb_per_second else "of this machine, not throttled"
    print(f"checkpoint {size(times.background[-1].bytes)}, disk {disk}, training on {options.threads} thread(s), {options.rounds} rounds")
    print(f"step without a save     {1000 * plain:8.1f} ms (median of {len(times.plain)})")
    print(f"step during a save      {1000 * during:8.1f} ms (median of {len(times.during)}; {min(times.steps_of_a_save)} or more per save)")
    print(f"ratio of steps          {during / plain:8.3f} of medians, {means:.3f} of means; target 1.10")
    print(f"processor time of steps {during_processor / plain_processor:8.3f} of medians (training thread); load average {os.getloadavg()[0]:.1f}")
    blocked = statistics.median(saved.blocked_seconds for saved in times.background)
    total = statistics.median(saved.seconds for saved in times.background)
    waited = statistics.median(saved.blocked_seconds for saved in times.at_once)
    print(f"save in the background  {1000 * blocked:8.0f} ms blocked, {total:.2f} s in all: training stands still for {blocked / total:.1%} of it")
    print(f"save at once            {1000 * waited:8.0f} ms blocked: {waited / blocked:.1f} times as long")
    cost = blocked + sum(wall for wall, _ in times.during) / len(times.background) - plain * len(times.during) / len(times.background)
    print(f"a save costs training   {1000 * cost:8.0f} ms in the background (the wait, and what its steps took longer); {1000 * waited:.0f} at once")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15, help="steps without a save per round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--disk-mb-per-second", type=float, default=0, help="0: the disk as it is")
    parser.add_argument("--folder", type=Path, default=None, help="where to save (a temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.disk_mb_per_second:
        rate = options.disk_mb_per_second * 1e6
        snapshot.open = lambda path, mode: ThrottledFile(open(path, mode), rate)  # type: ignore[attr-defined]  # noqa: SIM115
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        show(measure(options, Path(folder)), options)


if __name__ == "__main__":
    main()
