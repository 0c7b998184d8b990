"""Weights & Biases as a mirror of log.jsonl. Whatever goes wrong with it is reported once and never stops a run."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pretrain.errors import UserError
from pretrain.optional import require
from pretrain.redaction import redact
from pretrain.telemetry.config import TelemetryConfig


def check_credentials(settings: TelemetryConfig) -> None:
    """Refuse `wandb: online` without an API key before anything is allocated; UserError names the ways out."""
    if settings.wandb != "online":
        return
    wandb = require("wandb", "telemetry.wandb=online", "pip install wandb")
    if not wandb.login(prompt=False, verify=False):
        raise UserError(
            "telemetry.wandb=online needs a Weights & Biases API key and none was found: run `wandb login` or set WANDB_API_KEY, "
            "or use telemetry.wandb=offline (upload later with `wandb sync`) or telemetry.wandb=off"
        )


class WandbSink:
    """One wandb run, with its files in the run directory and `tokens` as the x-axis of every metric.

    A resumed run goes on under the same id. Steps are not passed to wandb, which would drop records after a rewind: it shows them at
    their token count, and log.jsonl stays the truth.
    """

    def __init__(
        self, settings: TelemetryConfig, run_dir: Path, *, run_name: str, config: Mapping[str, object], complain: Callable[[str], None]
    ) -> None:
        self._complain = complain
        self._run: Any = None
        if settings.wandb != "off":
            mode = settings.wandb
            self._guard(lambda: self._open(mode, redact(settings.wandb_project), run_dir, run_name, dict(config)))

    def log(self, values: Mapping[str, object]) -> None:
        """Mirror one record; nested lists (t-bins) become one metric per bin."""
        if self._run is not None:
            self._guard(lambda: self._run.log(_flat(values)))

    def close(self) -> None:
        """Flush. Offline runs are uploaded later with `wandb sync`."""
        if self._run is not None:
            self._guard(lambda: self._run.finish())
            self._run = None

    def _open(self, mode: Literal["offline", "online"], project: str, run_dir: Path, run_name: str, config: dict[str, object]) -> None:
        import wandb

        self._run = wandb.init(
            mode=mode,
            project=project,
            dir=str(run_dir),
            id=_run_id(run_dir),
            name=run_name,
            config=config,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, init_timeout=60),
        )
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")

    def _guard(self, action: Callable[[], object]) -> None:
        """A mirror that breaks is dropped: nothing that wandb raises (it has exceptions outside its own hierarchy too) may stop training."""
        try:
            action()
        except Exception as error:
            self._run = None
            self._complain(f"wandb is off from here on ({type(error).__name__}: {error}); log.jsonl is complete without it")


def _run_id(run_dir: Path) -> str:
    """The id kept in the run directory, so that a resume continues it and a directory that was moved aside does not lend its id to the next run."""
    path = run_dir / "wandb" / "run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(hashlib.blake2b(os.urandom(16), digest_size=5).hexdigest())
    return path.read_text().strip()


def _flat(values: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if key == "t_bins" and isinstance(value, list):
            for entry in value:
                name = f"t_{entry['low']:.1f}_{entry['high']:.1f}"
                flat |= {f"{name}/{field}": number for field, number in entry.items() if field not in ("low", "high")}
        else:
            flat[key] = value
    return flat
