"""What a person sees while a run goes on: a bar on a terminal, one line per record in a file."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

STRAGGLING = 1.2
"""A rank whose own time is this many times the median's is worth a word."""


class ProgressDisplay:
    """`advance` after every step, `show` for every record, `note` for sentences. Writes to `stream` (standard output).

    total_steps   the schedule's, which steps are shown out of.
    first_step    where this start begins.
    last_step     where it leaves, which the ETA is of; None: at the end of the schedule.
    clock         seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        stream: TextIO | None = None,
        *,
        last_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._total = total_steps
        self._first, self._last = first_step, total_steps if last_step is None else last_step
        self._clock = clock
        self._start = clock()
        self._bar: Progress | None = None
        if self._stream.isatty():
            texts = (TextColumn("{task.fields[figures]}"), TextColumn("ETA {task.fields[eta]}"))
            self._bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), *texts, console=Console(file=self._stream))
            self._task = self._bar.add_task("train", total=total_steps, completed=first_step, figures="", eta="-")
            self._bar.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, eta=self._eta(step))

    def show(self, step: int, record: Mapping[str, object]) -> None:
        """The figures of a training record."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures(record), eta=self._eta(step))
        else:
            self.note(f"step {step}/{self._total} | {figures(record)} | ETA {self._eta(step)}")

    def note(self, sentence: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.console.print(sentence, markup=False, highlight=False)
        else:
            print(sentence, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def _eta(self, step: int) -> str:
        done = step - self._first
        if done <= 0:
            return "-"
        return duration((self._clock() - self._start) / done * (self._last - step))


def figures(record: Mapping[str, object]) -> str:
    """The part of a training record that a person follows. The likelihood term goes under its label, never under a name that says more."""
    label = str(record.get("nelbo_label", "likelihood term")).replace("_", " ")
    formats = (
        ("loss_nats_per_token", "loss {:.4f} nats/token"),
        ("nelbo_nats_per_token", f"{label} {{:.4f}}"),
        ("lr", "lr {:.2e}"),
        ("gradient_norm", "grad norm {:.3f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("tflops_per_second", "{:.3g} TFLOP/s per rank"),
        ("mfu", "MFU {:.1%}"),
    )
    parts = [text.format(record[key]) for key, text in formats if isinstance(record.get(key), int | float)]
    return " | ".join([*parts, *_straggler(record)])


def _straggler(record: Mapping[str, object]) -> list[str]:
    """The slowest rank, where it is much slower than the others."""
    slowest, median, share = (record.get(key) for key in ("slowest_rank_seconds", "median_rank_seconds", "waiting_share"))
    if isinstance(slowest, float) and isinstance(median, float) and isinstance(share, float) and slowest > STRAGGLING * median:
        return [f"rank {record['slowest_rank']} is slow: the others wait {share:.0%} of the time"]
    return []


def duration(seconds: float) -> str:
    """1h02m, 3m05s, 12s."""
    whole = int(max(seconds, 0) + 0.5)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
