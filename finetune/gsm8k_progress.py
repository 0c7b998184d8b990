"""What a person sees while problems are answered: rate, time to go and running accuracy; a bar on a terminal, a line a minute elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pretrain.telemetry.progress import duration

_LINE_SECONDS = 60.0


class EvaluationDisplay:
    """`show` after every batch. done: problems that an earlier start has answered; they have no part in the rate."""

    def __init__(self, total: int, done: int, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._first, self._stream, self._clock = total, done, stream, clock
        self._start = self._last = clock()
        console = Console(file=stream)
        columns = (TextColumn("gsm8k"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[figures]}"))
        self._bar = Progress(*columns, console=console) if stream.isatty() else None
        self._task = self._bar.add_task("gsm8k", total=total, completed=done, figures="") if self._bar is not None else None

    def __enter__(self) -> "EvaluationDisplay":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, correct: int, tokens: int) -> None:
        """done: problems answered in all, correct: of them by the strict extractor; tokens: generated since this start."""
        now = self._clock()
        seconds, new = max(now - self._start, 1e-9), done - self._first
        left = duration(seconds / new * (self._total - done)) if new else "-"
        figures = f"{new / seconds:.2f} problems/s, {tokens / seconds:,.0f} tokens/s | ETA {left} | strict so far {100 * correct / max(done, 1):.1f}%"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, figures=figures)
        elif done == self._total or now - self._last >= _LINE_SECONDS:
            self._last = now
            print(f"problem {done}/{self._total} | {figures}", file=self._stream, flush=True)
