"""What a run says when it starts or continues, and the frozen record of what it was started with."""

import dataclasses
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from pretrain.backbones.config import BackboneConfig
from pretrain.checkpoint.files import replace_durably
from pretrain.checkpoint.layout import CONFIG, VERSIONS, Layout, TrainState
from pretrain.checkpoint.peers import disk_trouble
from pretrain.errors import UserError

PACKAGES = ("torch", "megatron-core", "deepspeed", "transformer-engine", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "numpy", "safetensors")
OBJECTIVE = "objective"
"""Name of the objective in TrainState.extras."""
ENGINE = "engine"
"""In TrainState.extras: type and parameter groups of the engine that wrote the ZeRO files."""
RATES_AHEAD = "rates_ahead"
"""In TrainState.extras: step -> learning rate at a few steps to come, by which a changed schedule is noticed."""
_FREE = ("recompute", "vocab_multiple")
"""What may change in a backbone without changing the network (its padded rows are compared by themselves)."""
_ROOT = Path(__file__).resolve().parents[2]


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """16 hexadecimal digits that identify the values, shapes and types of CPU or device tensors in order."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ResumeCard:
    """What is continued. Values named `then` are the checkpoint's, `now` what this start computed.

    lr_now            learning rate that the schedule gives for the last step done; None: not compared.
    next_batch_now    fingerprint of the batch about to be read.
    optimizer_found   whether AdamW's moments were restored.
    rates_now         the rates that the schedule now gives for the steps of the state's RATES_AHEAD.
    """

    checkpoint: Path
    then: TrainState
    layout_now: Layout
    lr_now: float | None
    next_batch_now: str
    optimizer_found: bool
    rates_now: dict[str, float] = field(default_factory=dict)

    @property
    def differences(self) -> list[str]:
        """What does not continue as it was: the schedule or the data changed under the run."""
        found = []
        if self.lr_now is not None and abs(self.lr_now - self.then.lr) > 1e-6 * abs(self.then.lr):
            found.append(f"the schedule now gives learning rate {self.lr_now:.6g} for the last step, which was done with {self.then.lr:.6g}")
        for step, then in self.then.extras.get(RATES_AHEAD, {}).items():
            now = self.rates_now.get(step, then)
            if abs(now - then) > 1e-6 * abs(then):
                found.append(f"the schedule now gives learning rate {now:.6g} for step {int(step) + 1:,}, where it was to be {then:.6g}")
                break
        if self.next_batch_now != self.then.next_batch:
            found.append("the next batch is not the one that would have followed: data, mixture, noise or batch size changed")
        if not self.optimizer_found:
            found.append("the optimizer's moments were not found and start from zero")
        return found

    def render(self) -> str:
        """Lines for a terminal and a log."""
        same = self.then.layout == self.layout_now
        rows = [
            ("checkpoint", str(self.checkpoint)),
            ("step", f"{self.then.step:,}"),
            ("tokens", f"{self.then.tokens:,}"),
            ("learning rate", f"{self.then.lr:.6g}"),
            ("data position", f"sample {self.then.samples:,}, next batch {self.next_batch_now}"),
            ("layout", str(self.layout_now) if same else f"{self.then.layout} -> {self.layout_now}"),
            ("optimizer", "found" if self.optimizer_found else "not found"),
        ]
        lines = ["Resuming", *(f"  {label:<14} {value}" for label, value in rows), *(f"  warning: {difference}" for difference in self.differences)]
        return "\n".join(lines)


def require_same_network(folder: Path, state: TrainState, backbone: BackboneConfig, rows: int, objective: str) -> None:
    """Raises UserError naming what differs, if a checkpoint holds another network than the configuration's, or was trained on another objective."""
    then = {OBJECTIVE: state.extras.get(OBJECTIVE, objective), "vocabulary rows": state.rows}
    now = {OBJECTIVE: objective, "vocabulary rows": rows}
    for key, value in dataclasses.asdict(backbone).items():
        if key not in _FREE:
            then[f"backbone.{key}"], now[f"backbone.{key}"] = state.backbone.get(key), value
    for key, value in now.items():
        if then[key] != value:
            raise UserError(f"{folder} was trained with {key}={then[key]}, and the configuration says {value}; set it back, or choose another name=")


def versions() -> dict[str, str]:
    """Version of this program (with the git commit it runs from, "+changes" if that has uncommitted ones) and of the libraries that matter."""
    found = {"pretrain": _program()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def freeze_run(run_dir: Path, config_yaml: str) -> None:
    """Record the resolved configuration and the versions in the run directory; on the writer only, at every start.

    An earlier, different record is kept under the next free number (config.1.yaml, versions.1.json, …). Raises UserError if the disk refuses.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for name, text in ((CONFIG, config_yaml), (VERSIONS, json.dumps(versions(), indent=2) + "\n")):
            _record(run_dir / name, text)
    except OSError as error:
        raise UserError(f"the run directory {run_dir} cannot be written: {disk_trouble(error)}; choose another root= or free space") from None


def _record(path: Path, text: str) -> None:
    if path.exists():
        earlier = path.read_text()
        if earlier == text:
            return
        number = 1
        while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        replace_durably(kept, earlier)
    replace_durably(path, text)


def _program() -> str:
    try:
        version = metadata.version("pretrain")
    except metadata.PackageNotFoundError:
        version = "unpackaged"
    if not (_ROOT / ".git").exists():
        return version
    try:
        commit = subprocess.run(["git", "-C", str(_ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        status = subprocess.run(["git", "-C", str(_ROOT), "status", "--porcelain"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version} {commit}{'+changes' if status.strip() else ''}"
