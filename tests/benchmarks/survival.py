"""What a run pays for being looked after: steps with agreement, watchdog, heartbeat, collective record, guard and spikes, against steps without.

    python tests/benchmarks/survival.py                           width 128, 3 blocks, L 64, 32 sequences, fp32
    python tests/benchmarks/survival.py --hidden 256 --rounds 40

Each layout runs in processes of its own over gloo. Steps with and without take turns, in an order that turns too; what counts is the median
over rounds of their ratio in the same round. The comparison of replicas runs once in guard.replicas_every steps, and is timed on its own.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pretrain.backbones.config import BackboneConfig  # noqa: E402
from pretrain.build import build_engine, build_objective  # noqa: E402
from pretrain.data.config import DataConfig  # noqa: E402
from pretrain.data.loader import Loader  # noqa: E402
from pretrain.data.random_text import RandomText  # noqa: E402
from pretrain.engine.config import PrecisionConfig  # noqa: E402
from pretrain.guard import Guard  # noqa: E402
from pretrain.objectives.config import ObjectiveConfig  # noqa: E402
from pretrain.parallel import groups as parallel_groups  # noqa: E402
from pretrain.parallel.config import ParallelConfig  # noqa: E402
from pretrain.preemption import Requests, agreed  # noqa: E402
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig  # noqa: E402
from pretrain.selftest import assumed  # noqa: E402
from pretrain.telemetry.collectives import METHODS, recorded  # noqa: E402
from pretrain.telemetry.config import GuardConfig  # noqa: E402
from pretrain.telemetry.heartbeat import Heartbeat  # noqa: E402
from pretrain.telemetry.watchdog import Watchdog  # noqa: E402
from tests.distributed import run_distributed  # noqa: E402

LAYOUTS = {"alone": (1, ParallelConfig()), "DP2": (2, ParallelConfig()), "TP2": (2, ParallelConfig(tensor=2)), "PP2": (2, ParallelConfig(pipeline=2))}
WARMUP = 3


def run_config(hidden: int, parallel: ParallelConfig) -> RunConfig:
    """MDLM on random text."""
    return RunConfig(
        name="survival", tokenizer="none.model", objective=ObjectiveConfig(name="mdlm"), parallel=parallel,
        backbone=BackboneConfig(kind="dit", hidden=hidden, layers=4, heads=4), data=DataConfig(train={}, loader="plain"),
        batch=BatchConfig(global_sequences=32, micro_sequences=16, length=64), duration=DurationConfig(steps=1000),
        precision=PrecisionConfig(compute="fp32"), guard=GuardConfig(spike_warmup=10),
    )  # fmt: skip


class Recording:
    """Turns the record of collectives on and off."""

    def __init__(self) -> None:
        places = [(dist.ProcessGroup, name) for name in METHODS if hasattr(dist.ProcessGroup, name)] + [(dist.Work, "wait")]
        plain = [vars(owner)[name] for owner, name in places]
        recorded()
        self._places = [(owner, name, before, vars(owner)[name]) for (owner, name), before in zip(places, plain, strict=True)]

    def turn(self, on: bool) -> None:
        for owner, name, plain, wrapper in self._places:
            setattr(owner, name, wrapper if on else plain)


def measure(hidden: int, rounds: int, parallel: ParallelConfig, run_dir: str) -> dict[str, float]:
    """Seconds of a step without, the ratio with, and seconds of a comparison of replicas, on this rank."""
    config = run_config(hidden, parallel)
    groups = parallel_groups.initialize(parallel, seed=1)
    objective = build_objective(config.objective, assumed(config, 257))
    engine = build_engine(config, objective, groups, torch.device("cpu"))
    text = RandomText(config.batch, objective.vocabulary, corrupt=partial(objective.corrupt, evaluation=False), lookahead=0, seed=1, parts=(1.0,))
    recording, plainly = Recording(), engine.accept
    samples: Any = None  # asked for the documents of a bad sample only
    guard = Guard(config.guard, engine, samples, lambda *_: None, "")
    guarded = engine.accept
    watchdog, requests = Watchdog(Path(run_dir), groups.world_rank, groups.world_size, 600), Requests()
    requests.watch(Path(run_dir), groups.world_size)
    heartbeat = Heartbeat(lambda own: [own] * groups.world_size, sampled=False)
    watchdog.start()

    def bare(shard: Any) -> None:
        engine.train_step(shard, 1e-4)

    def whole(shard: Any) -> None:
        heartbeat.begin(last=False)
        watchdog.beat(shard.step, "data")
        assert agreed(engine.agree(shard, requests.votes())) is None
        watchdog.beat(shard.step, "step", [number for batch in shard.micro_batches for number in batch.sample_ids])
        result = engine.train_step(shard, 1e-4)
        heartbeat.end()
        guard.check(shard, result)

    def timed(step: Callable[[Any], None], shard: Any) -> float:
        recording.turn(step is whole)
        engine.accept = guarded if step is whole else plainly
        dist.barrier()
        start = time.perf_counter()
        step(shard)
        return time.perf_counter() - start

    steps = iter(range(1 << 30))
    loader = Loader(text, config.data, config.batch, dp_rank=groups.data.rank, dp_size=groups.data.size, steps=steps, device="cpu")
    ratios, seconds, comparisons = [], [], []
    with loader:
        for number in range(WARMUP + rounds):
            order = (bare, whole) if number % 2 else (whole, bare)
            spent = {step: timed(step, next(loader)) for step in order}
            if number >= WARMUP:
                ratios.append(spent[whole] / spent[bare])
                seconds.append(spent[bare])
        for _ in range(10 if groups.world_size > 1 else 0):
            dist.barrier()
            start = time.perf_counter()
            guard._replicas.compare()
            comparisons.append(time.perf_counter() - start)
    watchdog.close()
    quartiles = statistics.quantiles(ratios, n=4)
    comparison = statistics.median(comparisons) if comparisons else 0.0
    return {"step": statistics.median(seconds), "low": quartiles[0], "ratio": quartiles[1], "high": quartiles[2], "comparison": comparison}


def main() -> None:
    """Every layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    every = GuardConfig().replicas_every
    for name, (ranks, parallel) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = run_distributed(measure, ranks, options.hidden, options.rounds, parallel, folder, timeout=600)[0]
        share = found["comparison"] / found["step"]
        replicas = f"; replicas {1e3 * found['comparison']:.1f} ms = {share:.1%} of a step, {share / every:.4%} of every {every}" if ranks > 1 else ""
        ratio = f"{found['ratio']:.3f} ({found['low']:.3f}-{found['high']:.3f})"
        print(f"{name:6} step {1e3 * found['step']:.1f} ms; looked after {ratio} of it{replicas}", flush=True)


if __name__ == "__main__":
    main()
