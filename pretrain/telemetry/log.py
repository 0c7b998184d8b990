"""The log of a run: log.jsonl is the source of truth; the progress display and wandb show what goes into it.

One JSON object per line, with `kind` (run, train, validation or event), `step` (optimizer steps finished) and `time` (Unix seconds).
Units are in the names, and no secrets are in the values (pretrain.redaction). Training records carry at least `tokens` (input tokens
consumed since step 0) and usually loss_nats_per_token, nelbo_nats_per_token, nelbo_label, lr, gradient_norm, tokens_per_second,
tflops_per_second (per rank), mfu, peak_memory_gib and t_bins.
Numbers that are not finite are written as the strings "nan", "inf" and "-inf", so that every line is valid JSON and float() reads them back.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from pretrain.errors import UserError
from pretrain.redaction import redact, redacted
from pretrain.telemetry.config import TelemetryConfig
from pretrain.telemetry.progress import ProgressDisplay
from pretrain.telemetry.wandb_sink import WandbSink, check_credentials

LOG_NAME = "log.jsonl"
KINDS = ("run", "train", "validation", "event")


class RunLog:
    """The log of `run_dir`. Every rank makes one; only the one with `is_main` writes or shows anything.

    label         what the training NELBO may be called (exact, bound, estimate, not_a_likelihood); a record's own `nelbo_label` wins.
    resumed_step  the checkpoint's step, or None for a start from scratch: records of later steps are dropped, because they will be made again.
    total_steps   of the schedule; last_step is where this start leaves, earlier with duration.stop_after.
    config        the composed configuration, written into the log and to wandb.
    facts         what a reader wants to know first: parameters, FLOPs per token and how they are counted, the peak and its source, layout.

    Raises UserError when wandb is asked to be online without an API key, or the log cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_main: bool,
        settings: TelemetryConfig,
        label: str,
        resumed_step: int | None,
        total_steps: int,
        last_step: int,
        run_name: str,
        config: Mapping[str, object],
        facts: Mapping[str, object] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._label, config = label, redacted(config)
        self._file: TextIO | None = None
        self._path = run_dir / LOG_NAME
        if not is_main:
            return
        check_credentials(settings)
        first_step = resumed_step or 0
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            truncate_after(self._path, first_step)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"the log {self._path} cannot be written ({error.strerror}); free space or choose another run root") from error
        self._display = ProgressDisplay(total_steps, first_step, stream, last_step=last_step)
        self._wandb = WandbSink(settings, run_dir, run_name=run_name, config=config, complain=lambda text: self.event(first_step, "wandb", text))
        opening = {"run_name": run_name, "resumed_step": resumed_step, "total_steps": total_steps, "nelbo_label": label}
        self._write("run", first_step, opening | dict(facts or {}) | {"config": dict(config)})

    def train(self, step: int, record: Mapping[str, object]) -> None:
        """Figures of the steps since the last record."""
        if self._file is None:
            return
        assert "tokens" in record, "a training record carries the tokens consumed"
        full = {"nelbo_label": self._label} | dict(record) if "nelbo_nats_per_token" in record else dict(record)
        self._write("train", step, full)
        self._display.show(step, full)
        self._wandb.log({f"train/{key}" if key != "tokens" else key: value for key, value in full.items()})

    def validation(self, step: int, record: Mapping[str, object]) -> None:
        """A pass over the held-out set: nelbo_nats_per_token, its ci95_nats_per_token (half-width), perplexity and nelbo_label among others;
        its `summary`, where it has one, is what a person is shown."""
        if self._file is None:
            return
        full = {"nelbo_label": self._label} | dict(record)
        self._write("validation", step, full)
        sentence = full.get("summary") or " | ".join(_spoken(key, value) for key, value in full.items())
        self._display.note(f"validation at step {step} | {sentence}")
        self._wandb.log({f"validation/{key}" if key != "tokens" else key: value for key, value in full.items()})

    def event(self, step: int, kind: str, message: str, figures: Mapping[str, object] | None = None) -> None:
        """Something that happened once: a checkpoint, a resume card, a warning. figures: what of it is to be read by programs."""
        if self._file is None:
            return
        message = redact(message)
        self._write("event", step, {"event": kind, "message": message} | dict(figures or {}))
        self._display.note(f"[{kind}] {message}")

    def say(self, sentence: str) -> None:
        """A line for whoever watches, of what the records hold in full."""
        if self._file is not None:
            self._display.note(redact(sentence))

    def advance(self, step: int) -> None:
        """Move the progress bar; costs nothing where there is none."""
        if self._file is not None:
            self._display.advance(step)

    def rewind(self, step: int) -> None:
        """Drop the records of later steps, which will be made again. Raises UserError if the log cannot be written."""
        if self._file is None:
            return
        try:
            self._file.close()
            truncate_after(self._path, step)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"the log {self._path} cannot be written ({error.strerror}); free space and start the run again: it resumes") from error

    def close(self) -> None:
        """Finish the display, wandb and the file. Safe to call twice."""
        if self._file is None:
            return
        self._display.close()
        self._wandb.close()
        self._file.close()
        self._file = None

    def _write(self, kind: str, step: int, record: Mapping[str, object]) -> None:
        """One line, flushed at once: a kill loses at most the line that it interrupts."""
        assert self._file is not None
        line = json.dumps(_finite({"kind": kind, "step": step, "time": time.time()} | redacted(record)), allow_nan=False, default=str)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"the log {self._path} cannot be written ({error.strerror}); free space and start the run again: it resumes") from error


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log. A last line that a kill tore is left out; any other bad line is a UserError with its number.

    Numbers that were not finite are the strings that `_finite` made of them: read figures with `number`.
    """
    bad: tuple[int, str] | None = None
    try:
        if not path.exists():
            return
        with path.open(encoding="utf-8", errors="replace") as lines:
            for place, line in enumerate(lines, start=1):
                if bad is not None:
                    raise UserError(f"line {bad[0]} of {path} {bad[1]}; remove that line, or start the run with resume=fresh")
                record, problem = _record(line)
                if problem:
                    bad = (place, problem)
                else:
                    yield record
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give the directory of a run, runs/NAME") from error
    if bad is not None and line.endswith("\n"):  # a kill leaves no line end
        raise UserError(f"line {bad[0]} of {path} {bad[1]}; remove that line, or start the run with resume=fresh")


def _record(line: str) -> tuple[dict[str, Any], str]:
    """The record of a line, or what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}, "is not a JSON record"
    if not isinstance(record, dict):
        return {}, "is not a JSON record"
    step, kind = record.get("step"), record.get("kind")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return {}, f"says step={step!r}, which must be a number of steps"
    if kind not in KINDS:
        return {}, f"says kind={kind!r}, which must be {', '.join(KINDS[:-1])} or {KINDS[-1]}"
    return record, ""


def number(record: Mapping[str, Any], key: str, path: Path) -> float:
    """A figure of a record of the log `path`, nan and inf among them. Raises UserError where it is missing or no number."""
    value = record.get(key)
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise UserError(
            f"the {record['kind']} record of step {record['step']} in {path} says {key}={value!r}, which must be a number; "
            "remove that line, or start the run with resume=fresh"
        ) from None


def truncate_after(path: Path, step: int) -> None:
    """Drop the records of later steps (and a torn last line), atomically: the log is either the old one or the new one."""
    if not path.exists():
        return
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as out:
        for record in read_log(path):
            if record["step"] <= step:
                out.write(json.dumps(record) + "\n")
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _spoken(key: str, value: object) -> str:
    return f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}"
