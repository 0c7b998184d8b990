"""Speed of one training step on this machine, and where its time goes.

    python tests/benchmarks/step.py                      mdlm_tiny in fp32 and bf16
    python tests/benchmarks/step.py +model=ar_tiny batch.micro_sequences=64

One process. Tokens are random, so no corpus is needed: reading files is not measured, noising, stacking and moving batches are. MFU is counted
against a matrix product measured in the same run. The profile comes from steps of its own, since profiling slows them down; its shares are
of those steps' wall time. The bare loop is the same network and loss with torch's AdamW and clipping, without DeepSpeed, schedules and statistics.
"""

import contextlib
import os
import platform as machine
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

import pretrain.engine.zero as zero  # noqa: E402
from pretrain.build import build_engine, build_network, build_objective  # noqa: E402
from pretrain.compose import command_from_arguments  # noqa: E402
from pretrain.data.batch import BatchShard  # noqa: E402
from pretrain.data.loader import Loader  # noqa: E402
from pretrain.data.random_text import RandomText  # noqa: E402
from pretrain.engine.loss import training_loss  # noqa: E402
from pretrain.objectives.base import Objective  # noqa: E402
from pretrain.parallel import groups as parallel_groups  # noqa: E402
from pretrain.parallel import platform  # noqa: E402
from pretrain.parallel.groups import Groups  # noqa: E402
from pretrain.rules import run_flops_per_token  # noqa: E402
from pretrain.run_config import RunConfig  # noqa: E402
from pretrain.selftest import assumed  # noqa: E402
from pretrain.telemetry.throughput import measure_matmul_peak  # noqa: E402

WARMUP, MEASURED, PROFILED = 2, 20, 3
PATIENCE = 15.0
"""Seconds after which four measured steps are enough."""
TOKENIZER_SIZE = 256
MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn", "_addmm_activation")
ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")


def batches(config: RunConfig, objective: Objective, device: torch.device) -> Loader:
    """The product's loader over random text."""
    text = RandomText(
        config.batch, objective.vocabulary, corrupt=partial(objective.corrupt, evaluation=False), lookahead=objective.lookahead, seed=config.seed,
        parts=objective.parts,
    )  # fmt: skip
    return Loader(text, config.data, config.batch, dp_rank=0, dp_size=1, steps=iter(range(1 << 30)), device=device)


def timed(step: Callable[[BatchShard], object], loader: Iterator[BatchShard], device: torch.device) -> float:
    """Median seconds of a step, with the wait for its batch."""
    seconds: list[float] = []
    for i in range(WARMUP + MEASURED):
        if sum(seconds) > PATIENCE and len(seconds) >= 4:
            break
        start = time.perf_counter()
        step(next(loader))
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= WARMUP:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def bare_step(network: torch.nn.Module, engine: zero.Engine, chunk: int) -> Callable[[BatchShard], None]:
    """Forward, backward, clip and update, with nothing of the engine but its loss function and what the objective adds to a batch."""
    objective, optimizer = engine.objective, torch.optim.AdamW(network.parameters(), lr=1e-4)

    def step(shard: BatchShard) -> None:
        count = sum(int(batch.count_B.sum()) for batch in shard.micro_batches)
        for batch in engine.prepared(shard, evaluation=False):
            logits_LBv = network(objective.network_input(batch.inputs, engine.vocab))
            training_loss(objective, logits_LBv, batch.targets, engine.vocab, scale=1 / count, chunk=chunk)[0].backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def labelled(engine: zero.Engine) -> Iterator[None]:
    """Name the loss and the optimizer in profiles."""

    def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with record_function(name):
                return function(*arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for owner, attribute, name in (
            (zero, "training_loss", "part: loss"),
            (engine.optimizer, "step", "part: optimizer"),
            (engine, "_reduce", "part: optimizer"),
        ):
            stack.enter_context(patch.object(owner, attribute, named(name, getattr(owner, attribute))))
        yield


def shares(step: Callable[[BatchShard], object], loader: Iterator[BatchShard], engine: zero.Engine, device: torch.device) -> dict[str, float]:
    """Part -> share of the wall time of PROFILED steps; on CUDA the shares are of device time."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    start = time.perf_counter()
    with labelled(engine), profile(activities=activities) as recorded:
        for _ in range(PROFILED):
            with record_function("part: data"):
                shard = next(loader)
            step(shard)
    wall = (time.perf_counter() - start) * 1e6
    result = dict.fromkeys(("matrix products", "attention", "loss", "optimizer", "data"), 0.0)
    for event in recorded.key_averages():
        own, whole = (event.self_device_time_total, event.device_time_total) if cuda else (event.self_cpu_time_total, event.cpu_time_total)
        if event.key.startswith("part: "):
            result[event.key.removeprefix("part: ")] += (event.cpu_time_total if event.key == "part: data" else whole) / wall
        elif any(name in event.key for name in ATTENTION):
            result["attention"] += own / wall
        elif any(name in event.key for name in MATRIX):
            result["matrix products"] += own / wall
    return result | {"the rest": 1 - sum(result.values())}


def report(config: RunConfig, groups: Groups, compute: Literal["fp32", "bf16"], device: torch.device) -> None:
    """Measure one precision and print it."""
    config = replace(config, precision=replace(config.precision, compute=compute))
    vocabulary = assumed(config, TOKENIZER_SIZE + config.objective.has_mask)
    objective = build_objective(config.objective, vocabulary)
    engine = build_engine(config, objective, groups, device)
    step = partial(engine.train_step, lr=1e-4)
    dtype = torch.float32 if compute == "fp32" else torch.bfloat16
    peak = measure_matmul_peak(dtype, device)
    with batches(config, objective, device) as loader:
        seconds = timed(step, loader, device)
    network = build_network(config, objective, groups, device)
    with batches(config, objective, device) as loader:
        bare = timed(bare_step(network, engine, config.precision.loss_chunk), loader, device)
    with batches(config, objective, device) as loader:  # last: a profiler that has run once may slow what follows
        parts = shares(step, loader, engine, device)
    tokens = config.batch.global_sequences * config.batch.length
    flops = run_flops_per_token(config, vocabulary.model_size) * tokens / seconds
    print(f"\n{config.name}, {compute}: {tokens / seconds:,.0f} tokens/s, {1e3 * seconds:.1f} ms per step of {tokens} tokens")
    print(f"  {flops / 1e9:.1f} GFLOP/s of a measured {peak / 1e9:.1f} (fastest {compute} matrix product of this run): MFU {flops / peak:.1%}")
    print("  time: " + ", ".join(f"{name} {share:.1%}" for name, share in parts.items()))
    print(f"  bare loop: {1e3 * bare:.1f} ms per step; the engine adds {seconds / bare - 1:.1%}")


def main() -> None:
    """Both precisions, one after the other."""
    if not any(argument.startswith("+model=") for argument in sys.argv[1:]):
        sys.argv.insert(1, "+model=mdlm_tiny")
    command = command_from_arguments()
    if command is None:
        return
    device = platform.device()
    groups = parallel_groups.initialize(command.run.parallel, seed=command.run.seed)
    print(f"{machine.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, {device}")
    for compute in ("fp32", "bf16"):
        report(command.run, groups, compute, device)
    parallel_groups.shutdown()


if __name__ == "__main__":
    main()
