"""What a preparation shows: bytes read, tokens per second, and the time left."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

_LINE_SECONDS = 60


class Display(Protocol):
    """Takes sums over the shards of this run."""

    def show(self, read: int, tokens: int) -> None:
        """Input bytes read and tokens written since the start."""
        ...


def say(sentence: str) -> None:
    """One line for the user."""
    _console().print(sentence, markup=False)


def _console() -> Console:
    return Console(file=sys.stderr, soft_wrap=True, highlight=False)


def spelled_time(seconds: float) -> str:
    """Hours, minutes and seconds, the largest two."""
    hours, minutes = divmod(round(seconds) // 60, 60)
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {round(seconds) % 60} s" if minutes else f"{round(seconds)} s"


class _Lines:
    """A line a minute, for log files."""

    def __init__(self, console: Console, total_bytes: int) -> None:
        self._console, self._total = console, max(total_bytes, 1)
        self._start = self._last = time.monotonic()

    def show(self, read: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self._last >= _LINE_SECONDS:
            self._last = now
            seconds = now - self._start
            left = f"{spelled_time(seconds * (self._total - read) / read)} left" if read else "no estimate yet"
            sentence = f"{read / self._total:.0%} of the input, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, {left}"
            self._console.print(sentence, markup=False)


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self._start = progress, task, time.monotonic()

    def show(self, read: int, tokens: int) -> None:
        speed = tokens / max(time.monotonic() - self._start, 1e-9)
        self._progress.update(self._task, completed=read, speed=f"{tokens:,} tokens, {speed:,.0f} tokens/s")


@contextmanager
def display(total_bytes: int) -> Iterator[Display]:
    """A bar over the input bytes that are left, or lines where no terminal is."""
    console = _console()  # of this moment: datatrove's messages to the terminal are switched off while shards run here
    if not console.is_terminal:
        yield _Lines(console, total_bytes)
        return
    columns = (SpinnerColumn(), BarColumn(), DownloadColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, progress.add_task("tokenise", total=total_bytes, speed=""))
