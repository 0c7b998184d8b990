"""What a run says when it starts or continues, and the frozen record of what it was started with."""

import json
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pretrain.build import compute_dtype
from pretrain.checkpoint.changes import Change, Freedom, pattern
from pretrain.checkpoint.files import remedy, replace_durably
from pretrain.checkpoint.layout import CONFIG, VERSIONS, Layout, TrainState
from pretrain.checkpoint.logical import is_imported
from pretrain.checkpoint.peers import disk_trouble
from pretrain.errors import UserError
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.run_config import RunConfig

PACKAGES = ("torch", "megatron-core", "deepspeed", "transformer-engine", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "numpy", "safetensors")
RATES_AHEAD = "rates_ahead"
"""In TrainState.extras: step -> learning rate at a few steps to come, by which a schedule is noticed that another duration stretched."""
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class ResumeCard:
    """What is continued. Values named `then` are the checkpoint's, `now` what this start computed.

    changes           settings that are not the checkpoint's.
    lr_now            learning rate that the schedule gives for the last step done.
    rates_now         the rates that the schedule now gives for the steps of the state's RATES_AHEAD.
    next_batch_now    fingerprint of the batch about to be read.
    rows_now          rows of the vocabulary.
    optimizer_found   whether AdamW's moments were restored (known after loading).
    """

    checkpoint: Path
    then: TrainState
    changes: list[Change]
    layout_now: Layout
    lr_now: float
    rates_now: dict[str, float]
    next_batch_now: str
    rows_now: int
    optimizer_found: bool = True

    @property
    def differences(self) -> list[str]:
        """What makes the steps to come other than they were to be: settings, the learning rate, the text."""
        course = [change for change in self.changes if change.freedom is Freedom.COURSE]
        found = [str(change) for change in course]
        if not any(change.key.startswith("schedule.") for change in course):
            found += self._rates()
        if self.next_batch_now != self.then.next_batch and not any(change.key.startswith(("seed", "data.", "sft.")) for change in course):
            moved = [str(change) for change in self.changes if change.key.startswith(("data.train.", "sft.train"))]
            found.append(f"{', '.join(moved) or 'the data'} now gives another text: the next batch is not the one that was to follow")
        if not self.optimizer_found:
            found.append("the optimizer's moments were not found and start from zero")
        return found

    @property
    def same_files(self) -> bool:
        """Whether this run's engine can read DeepSpeed's own files: of the same layout, type and groups of parameters, and with the optimizer's
        constants, which DeepSpeed would restore with the moments."""
        changed = any(change.key.startswith("optimizer.") or change.key == "precision.compute" for change in self.changes)
        return self.then.layout == self.layout_now and not changed and not is_imported(self.checkpoint)

    def require_legal(self, resume: str) -> None:
        """Raises UserError naming what changed, if this is another run, or (without resume=changed) another course of it."""
        fixed = [str(change) for change in self.changes if change.freedom is Freedom.FIXED]
        if self.rows_now != self.then.rows:
            fixed.append(f"rows of the vocabulary: {self.then.rows} -> {self.rows_now}")
        if fixed:
            raise UserError(
                f"{self.checkpoint} belongs to another run ({'; '.join(fixed)}), and a run keeps its network, objective and batch: "
                "set them back, or choose another name="
            )
        if self.differences and resume != "changed":
            raise UserError(
                f"{self.checkpoint} does not go on as it was ({'; '.join(self.differences)}): set that back, as {self.checkpoint / CONFIG} "
                "has it, continue all the same with resume=changed, or choose another name="
            )

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
            *(("changed", str(change)) for change in self.changes if change.freedom is Freedom.FREE and pattern(change.key) not in _UNSAID),
        ]
        lines = ["Resuming", *(f"  {label:<14} {value}" for label, value in rows), *(f"  warning: {difference}" for difference in self.differences)]
        return "\n".join(lines)

    def _rates(self) -> list[str]:
        """Learning rates that are not what they were, or were to be."""
        last, ahead = self.then.step - 1, self.then.extras.get(RATES_AHEAD, {})
        pairs = [(last, self.then.lr, self.lr_now), *((int(step), then, self.rates_now.get(step, then)) for step, then in ahead.items())]
        lengths = [str(change) for change in self.changes if change.key.startswith("duration.") and change.key not in _UNSAID]
        why = ", ".join(lengths) or "the schedule"
        for step, then, now in pairs:
            if abs(now - then) > 1e-6 * abs(then):
                verb = "was done" if step == last else "was to be done"
                return [f"{why} now gives learning rate {now:.6g} for step {step + 1:,}, which {verb} with {then:.6g}"]
        return []


_UNSAID = ("resume", "duration.stop_after", "data.validation.*.weight")
"""Keys that every start may change, and one without effect."""


def meant(config: RunConfig, vocabulary: Vocabulary, tokenizer_hash: str) -> dict[str, Any]:
    """What settings stand for here, which leave that to the machine, to a file or to another setting (MEANT)."""
    return {
        "tokenizer": tokenizer_hash[:12],
        "precision.compute": str(compute_dtype(config)).removeprefix("torch."),
        "objective.mask_id": vocabulary.mask_id,
        "backbone.ffn": config.backbone.ffn_width,
        "backbone.kv_heads": config.backbone.kv_groups,
    }


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
        trouble = str(disk_trouble(error))
        raise UserError(f"the run directory {run_dir} cannot be written: {trouble}; {remedy(trouble, run_dir)}, or choose another root=") from None


def _record(path: Path, text: str) -> None:
    if path.exists():
        earlier = path.read_text(errors="replace")
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
