"""A small run as a job: how the tests submit it, wait for it, and know its losses from a world that has no Slurm."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
import yaml

from pretrain.compose import command_from_tree
from pretrain.run_config import RunConfig
from pretrain.telemetry.log import read_log
from tests.distributed import run_distributed
from tests.small_run import small_config, train

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = ROOT / "launchers" / "slurm" / "submit.py"
SMALL = (
    "batch.global_sequences=8", "batch.micro_sequences=4", "batch.length=16", "backbone.hidden=32", "backbone.layers=2", "precision=fp32",
    "schedule.warmup_steps=2", "telemetry.log_every=1", "telemetry.wandb=off", "telemetry.peak_tflops=1",
)  # fmt: skip
CLUSTER = ("cluster=local", "nodes=2", "cluster.processes_per_node=1", "poll=0.2")


def words(steps: int, *more: str) -> list[str]:
    """The command line of a run of so many steps on the text that `small_config` makes."""
    data = ("data=custom", "tokenizer=small.model", "data.train={words: {path: train/corpus}}", "data.validation={}")
    return ["+model=mdlm_tiny", "name=small", *data, *SMALL, *CLUSTER, f"duration.steps={steps}", "validation.every=0", *more]


class Cluster(Protocol):
    """What FakeSlurm and RealSlurm have."""

    environment: dict[str, str]


def use(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands that this process starts find a cluster."""
    for name in ("PATH", "SLURM_CONF", "FAKE_SLURM"):
        if name in cluster.environment:
            monkeypatch.setenv(name, cluster.environment[name])


def submit(folder: Path, environment: dict[str, str], *arguments: str, timeout: float = 200) -> "subprocess.CompletedProcess[str]":
    """submit.py as a user starts it."""
    small_config(folder)  # makes text and tokenizer
    return subprocess.run(
        [sys.executable, str(SUBMIT), *arguments], cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


def frozen_run(run: Path) -> RunConfig:
    """The configuration that a submission froze."""
    model = yaml.safe_load((run / "slurm/model/submitted.yaml").read_text())
    del model["defaults"]
    return command_from_tree(model | yaml.safe_load((run / "slurm/data/submitted.yaml").read_text())).run


def uninterrupted_losses(run: Path, ranks: int = 2) -> dict[int, float]:
    """Step -> loss of the same run, trained by forked processes under another root."""
    folder = next(parent.parent for parent in run.parents if parent.name == "runs")
    here = os.getcwd()
    os.chdir(folder)
    try:
        found = frozen_run(run)
        sources = {name: replace(source, path=str(folder / source.path)) for name, source in found.data.train.items()}
        data = replace(found.data, train=sources)
        config = replace(found, root=str(folder / "reference"), data=data, tokenizer=str(folder / found.tokenizer))
        return dict(enumerate(run_distributed(train, ranks, config)[0]["losses"], start=1))
    finally:
        os.chdir(here)


def logged_losses(run: Path) -> dict[int, float]:
    """Step -> loss in the log."""
    return {record["step"]: record["loss_nats_per_token"] for record in read_log(run / "log.jsonl") if record["kind"] == "train"}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind in the log."""
    return [record for record in read_log(run / "log.jsonl") if record.get("event") == kind]


def job_log(run: Path) -> str:
    """What the job printed, all its lives."""
    return "\n".join(path.read_text(errors="replace") for path in sorted((run / "slurm").glob("job_*.log")))


def wait_until(holds: Callable[[], object], what: str, run: Path, seconds: float = 120) -> None:
    """Fails with the job's log when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{job_log(run)[-6000:]}"
        time.sleep(0.2)


def at_step(run: Path, step: int) -> Callable[[], bool]:
    """Whether the log has reached a step."""
    return lambda: max(logged_losses(run), default=0) >= step


def processes_of(run: Path) -> list[psutil.Process]:
    """Every process whose command line names the run's directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and str(run) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
