"""What a preparation shows: bytes read, tokens per second, and the time left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from data_prep.worker import Report

_LINE_SECONDS = 60
_console = Console(stderr=True, soft_wrap=True, highlight=False)


def say(sentence: str) -> None:
    """One line for the user."""
    _console.print(sentence, markup=False)


class _Lines:
    """A line a minute, for log files."""

    def __init__(self, total_bytes: int, done_bytes: int) -> None:
        self._total, self._done, self._tokens = max(total_bytes, 1), done_bytes, 0
        self._start = self._last = time.monotonic()

    def report(self, read: int, written: int) -> None:
        self._done += read
        self._tokens += written
        now = time.monotonic()
        if now - self._last >= _LINE_SECONDS:
            self._last = now
            say(f"{self._done / self._total:.0%} of the input, {self._tokens:,} tokens, {self._tokens / (now - self._start):,.0f}/s")


@contextmanager
def progress_bar(total_bytes: int, done_bytes: int) -> Iterator[Report]:
    """A bar over input bytes; call the yielded function with (bytes read, tokens written)."""
    if not _console.is_terminal:
        yield _Lines(total_bytes, done_bytes).report
        return
    columns = (SpinnerColumn(), BarColumn(), DownloadColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with Progress(*columns, console=_console, transient=True) as progress:
        task = progress.add_task("tokenise", total=total_bytes, completed=done_bytes, speed="")
        start, tokens = time.monotonic(), 0

        def report(read: int, written: int) -> None:
            nonlocal tokens
            tokens += written
            speed = tokens / max(time.monotonic() - start, 1e-9)
            progress.update(task, advance=read, speed=f"{tokens:,} tokens, {speed:,.0f}/s")

        yield report
