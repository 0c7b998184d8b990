"""launchers/pretrain.py verify=resume: whether this run, on this machine, resumes as if nothing had happened.

Four starts of real processes, in a directory beside the run's that is removed afterwards:

    straight   N + M steps
    killed     N steps and a checkpoint, then kill -9 after step N + 1
    resumed    from that checkpoint, in the same layout: everything must be equal, bit for bit
    moved      from a copy of it, in another layout: what was loaded bit for bit, what is trained after it within a tolerance

Findings go to a table and to NAME.verify.json beside the run directory.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pretrain.build import compute_dtype
from pretrain.checkpoint.files import replace_durably
from pretrain.checkpoint.layout import CHECKPOINTS, Layout, step_name
from pretrain.checkpoint.manager import find_checkpoint
from pretrain.checkpoint.resume import versions
from pretrain.checkpoint.zero_reader import ZeroCheckpoint
from pretrain.engine.safe_files import read_safely
from pretrain.engine.zero import OBJECTIVE_FILE
from pretrain.errors import UserError
from pretrain.launch_config import VerifyConfig
from pretrain.parallel.config import ParallelConfig
from pretrain.rules import validate
from pretrain.run_config import RunConfig
from pretrain.verify_worker import RESTORED

ROOT = Path(__file__).resolve().parents[1]
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""Relative: ranks sum in another order, and bf16 rounds what they sum."""
WEIGHT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Relative to the norm of each tensor, after M steps; AdamW's first steps magnify rounding in small gradients."""
OTHERS = (
    ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig(zero_stage=3), ParallelConfig(zero_stage=2), ParallelConfig(),
)  # fmt: skip


class Worker(Protocol):
    """A started process."""

    def wait(self) -> int: ...
    def kill(self) -> None: ...


Launch = Callable[[Path, int, Mapping[str, str]], Worker]
"""Starts pretrain.verify_worker: its specification, the rank, and what the environment is to say besides."""


def processes(spec: Path, rank: int, environment: Mapping[str, str]) -> Worker:
    """A Python process of its own; what it prints goes beside the specification."""
    command = [sys.executable, "-m", "pretrain.verify_worker", str(spec), str(rank)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (spec.parent / f"rank_{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env={**os.environ, **environment, "PYTHONPATH": path}, stdout=log, stderr=subprocess.STDOUT)


@dataclass(frozen=True)
class Finding:
    """One comparison. difference: the largest found, 0 for equality of things that are no numbers; tolerance 0: must be equal bit for bit."""

    start: str
    what: str
    compared: int
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.difference <= self.tolerance


def run(config: RunConfig, terms: VerifyConfig, launch: Launch = processes) -> bool:
    """Whether every comparison passed, having printed and written them. Raises UserError where it cannot be tried."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("verify=resume starts its ranks itself: start it with python instead of torchrun, and say verify_ranks=")
    ranks = terms.verify_ranks or max(2, config.parallel.model_ranks)
    validate(config, world_size=ranks)
    other = _other_layout(config, terms.verify_layout, ranks)
    place = config.directory.with_name(f"{config.name}.verify")
    shutil.rmtree(place, ignore_errors=True)
    begun = time.monotonic()
    try:
        starts = Starts(config, terms.verify_steps, ranks, place, launch)
        findings = starts.findings(other)
    finally:
        if not terms.verify_keep:
            shutil.rmtree(place, ignore_errors=True)
    passed = all(finding.passed for finding in findings)
    layouts = {"resumed": str(_layout(config.parallel, ranks)), "moved": str(_layout(other.parallel, ranks))}
    _show(findings, layouts)
    report = config.directory.with_name(f"{config.name}.verify.json")
    record = {
        "verdict": "passed" if passed else "failed", "steps": terms.verify_steps, "ranks": ranks, "layouts": layouts,
        "precision": str(compute_dtype(config)).removeprefix("torch."), "seconds": round(time.monotonic() - begun, 1), "versions": versions(),
        "comparisons": [dataclasses.asdict(finding) | {"passed": finding.passed} for finding in findings],
    }  # fmt: skip
    replace_durably(report, json.dumps(record, indent=1) + "\n")
    kept = f"; the runs are kept in {place}" if terms.verify_keep else ""
    print(f"resume {record['verdict']}: {sum(f.passed for f in findings)} of {len(findings)} comparisons, {record['seconds']} s; {report}{kept}")
    return passed


def _other_layout(config: RunConfig, wanted: ParallelConfig | None, ranks: int) -> RunConfig:
    """The run in another layout for as many ranks. Raises UserError if that is illegal, or none of those tried is legal."""
    for parallel in (wanted,) if wanted else OTHERS:
        data = max(ranks // parallel.model_ranks, 1)
        batch = config.batch
        micro = math.gcd(batch.micro_sequences, max(batch.global_sequences // data, 1))
        moved = replace(config, parallel=parallel, batch=replace(batch, micro_sequences=micro))
        with contextlib.nullcontext() if wanted else contextlib.suppress(UserError):
            validate(moved, world_size=ranks)
            if _layout(parallel, ranks) != _layout(config.parallel, ranks):
                return moved
    raise UserError(f"verify_ranks={ranks} allows no other layout of this run that is known here; name one with verify_layout=, or more ranks")


def _layout(parallel: ParallelConfig, ranks: int) -> Layout:
    return Layout.of(parallel, ranks // parallel.model_ranks)


class Starts:
    """The starts of a verification, and what they left."""

    def __init__(self, config: RunConfig, steps: Sequence[int], ranks: int, place: Path, launch: Launch) -> None:
        self.before, self.after = steps
        self.ranks, self.place, self.launch = ranks, place, launch
        self.last = self.before + self.after
        self.config = replace(
            config, root=str(place / "runs"), resume="auto", data=replace(config.data, validation={}),
            duration=replace(config.duration, stop_after=self.last), validation=replace(config.validation, every=0),
            checkpoint=replace(config.checkpoint, every=self.before, keep=0, milestone_tokens=None), telemetry=replace(config.telemetry, wandb="off"),
        )  # fmt: skip
        self.dtype = compute_dtype(config)

    def findings(self, other: RunConfig) -> list[Finding]:
        """Make every start, compare."""
        straight = self.start("straight", self.config)
        self.start("killed", self.config, kill_at=self.before + 1)
        for name in ("resumed", "moved"):
            shutil.copytree(self.directory("killed"), self.directory(name))
        resumed = self.start("resumed", self.config)
        moved = self.start("moved", replace(self.config, parallel=other.parallel, batch=other.batch))
        return self._compare("resumed", straight, resumed, exact=True) + self._compare("moved", straight, moved, exact=False)

    def directory(self, name: str) -> Path:
        """Of one start's run."""
        return self.place / "runs" / name

    def start(self, name: str, config: RunConfig, kill_at: int | None = None) -> list[dict[str, Any]]:
        """Every rank's process to its end; what they saw, joined by step. Raises UserError if one ended otherwise than it should."""
        evidence = self.place / name
        evidence.mkdir(parents=True)
        tree = {"config": dataclasses.asdict(replace(config, name=name)), "evidence": str(evidence), "kill_at": kill_at}
        spec = evidence / "spec.json"
        spec.write_text(json.dumps(tree))
        print(f"{name}: {self.ranks} ranks, {_layout(config.parallel, self.ranks)}", flush=True)
        port = _free_port()
        workers = [self.launch(spec, rank, self._environment(rank, port)) for rank in range(self.ranks)]
        try:
            codes = [worker.wait() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(code != (0 if kill_at is None else -9) for code in codes):
            said = "\n".join(log.read_text(errors="replace").strip()[-2000:] for log in sorted(evidence.glob("rank_*.log")))
            raise UserError(f"the start called {name} ended with exit codes {codes}, so nothing can be compared; its ranks said:\n{said}")
        return _joined([evidence / f"rank_{rank}.jsonl" for rank in range(self.ranks)])

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }  # fmt: skip

    # ---- comparisons --------------------------------------------------------------------------------------------------------------

    def _compare(self, name: str, straight: list[dict[str, Any]], seen: list[dict[str, Any]], *, exact: bool) -> list[Finding]:
        want = straight[self.before :]
        losses = 0.0 if exact else LOSS_TOLERANCE[self.dtype]
        loaded = self._tensors(self._checkpoint("killed", self.before)), self._tensors(find_checkpoint(self.place / name / RESTORED).folder)
        ended = self._tensors(self._checkpoint("straight", self.last)), self._tensors(self._checkpoint(name, self.last))
        return [
            Finding(name, "loaded masters, moments, objective", len(loaded[0]), _distance(*loaded), 0.0),
            Finding(name, "steps", self.after, float([one["step"] for one in seen] != [one["step"] for one in want]), 0.0),
            Finding(name, "learning rates", self.after, _unequal(want, seen, "lr"), 0.0),
            Finding(name, "text (documents and windows)", self.after, _unequal(want, seen, "text"), 0.0),
            Finding(name, "samples with their noise", sum(len(one["samples"]) for one in want), _unequal(want, seen, "samples"), 0.0),
            Finding(name, "losses, nats/token (relative)", self.after, _relative(want, seen, "loss"), losses),
            Finding(name, "gradient norms (relative)", self.after, _relative(want, seen, "norm"), 10 * losses),
            Finding(name, "masters, moments, objective at the end", len(ended[0]), _distance(*ended), 0.0 if exact else WEIGHT_TOLERANCE[self.dtype]),
        ]

    def _checkpoint(self, name: str, step: int) -> Path:
        return find_checkpoint(self.directory(name) / CHECKPOINTS / step_name(step)).folder

    @staticmethod
    def _tensors(folder: Path) -> dict[str, Tensor]:
        source = ZeroCheckpoint(folder)
        found = {f"{name}/{key}": source.tensor(name, key) for name in source.table for key in source.keys}
        if (folder / OBJECTIVE_FILE).is_file():
            found |= _leaves("objective", read_safely(folder / OBJECTIVE_FILE))
        return found | {"step": torch.tensor(float(source.step))}


def _leaves(prefix: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {prefix: value.detach().double()}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: leaf for key, item in items for name, leaf in _leaves(f"{prefix}/{key}", item).items()}


def _distance(want: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """0 where all are equal bit for bit; otherwise the largest difference in units of a tensor's norm. inf: another set of tensors."""
    if want.keys() != got.keys():
        return math.inf
    far = [0.0]
    for name, tensor in want.items():
        if not torch.equal(tensor, got[name]):
            difference = float((got[name].double() - tensor.double()).norm() / max(float(tensor.double().norm()), 1e-30))
            far.append(max(difference, sys.float_info.min) if math.isfinite(difference) else math.inf)
    return max(far)


def _unequal(want: list[dict[str, Any]], seen: list[dict[str, Any]], key: str) -> float:
    """How many steps differ in something that must be the same."""
    return float(abs(len(want) - len(seen)) + sum(one[key] != other[key] for one, other in zip(want, seen, strict=False)))


def _relative(want: list[dict[str, Any]], seen: list[dict[str, Any]], key: str) -> float:
    if len(want) != len(seen):
        return math.inf
    differences = [abs(other[key] - one[key]) / max(abs(one[key]), 1e-30) for one, other in zip(want, seen, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _joined(paths: list[Path]) -> list[dict[str, Any]]:
    """Steps as all ranks saw them: the samples of each, the rest from the first rank."""
    steps: dict[int, dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            steps.setdefault(one["step"], one | {"samples": {}})["samples"] |= one["samples"]
    return [steps[step] for step in sorted(steps)]


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _show(findings: list[Finding], layouts: dict[str, str]) -> None:
    table = Table("start", "layout", "compared", "number", "largest difference", "allowed", "")
    for f in findings:
        verdict = "passed" if f.passed else "FAILED"
        table.add_row(f.start, layouts[f.start], f.what, str(f.compared), f"{f.difference:.3g}", f"{f.tolerance:g}", verdict)
    Console(width=150).print(table)
