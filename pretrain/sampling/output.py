"""Samples on the screen and in a file: a progress bar, the texts, one JSON line per sample."""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from pretrain.hf_model.sampling_network import Snapshot
from pretrain.outputs import cannot_write
from pretrain.sampling.generate import Sample
from pretrain.sampling.view import Viewer

Decode = Callable[[list[list[int]]], list[str]]

LINES = 20
"""Pictures of a whole command where there is no terminal to redraw."""
LINE_WIDTH = 200


class _TokensPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f} tokens/s")


class SamplingDisplay:
    """A bar over `tokens` tokens on a terminal, nothing in a file; `advance` is a sampler's progress callback, `watch` its other one.

    viewer  draws what is watched: below the bar on a terminal, as lines otherwise.
    """

    def __init__(self, tokens: int, stream: TextIO, *, what: str = "sampling", viewer: Viewer | None = None) -> None:
        columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(), _TokensPerSecond(), TimeRemainingColumn())
        console = Console(file=stream)
        self._terminal, self._stream, self._viewer, self._total = stream.isatty(), stream, viewer, tokens
        self._progress = Progress(*columns, console=console, disable=not self._terminal)
        self._live = Live(self._progress, console=console, transient=False) if self._terminal and viewer is not None else None
        self._task = self._progress.add_task(what, total=tokens)
        self._tokens = self._step = self._lines = 0
        self._batch = -1
        self._start = time.monotonic()

    def __enter__(self) -> "SamplingDisplay":
        (self._live or self._progress).start()
        return self

    def __exit__(self, *_: object) -> None:
        (self._live or self._progress).stop()

    def advance(self, tokens: int) -> None:
        """Count drawn tokens."""
        self._tokens += tokens
        self._progress.advance(self._task, tokens)

    def watch(self, snapshot: Snapshot) -> None:
        """Draw a step, if anybody looks; without a terminal, a step for each part of the work."""
        if self._viewer is None:
            return
        first = int(snapshot.sequences_B[0])
        self._step = self._step + 1 if first == self._batch else 1
        self._batch = first
        if self._live is not None:
            self._live.update(Group(self._viewer.panel(snapshot, self._step), self._progress))
        elif self._tokens * LINES >= self._total * (self._lines + 1):
            self._lines = self._tokens * LINES // self._total
            text = self._viewer.text(snapshot)
            shown = text if len(text) <= LINE_WIDTH else text[: LINE_WIDTH - 1] + "…"
            print(f"sequence {first + 1}, step {self._step} | {self._tokens}/{self._total} tokens | {shown}", file=self._stream, flush=True)

    @property
    def tokens_per_second(self) -> float:
        """Drawn tokens over the time since the start."""
        return self._tokens / max(time.monotonic() - self._start, 1e-9)


def text_of(ids: Iterable[int], decode: Decode, eos_id: int) -> str:
    """The documents of a sequence, with an empty line where one ends and the next begins."""
    documents: list[list[int]] = [[]]
    for token in ids:
        if token == eos_id:
            documents.append([])
        else:
            documents[-1].append(token)
    return "\n\n".join(text for text in decode(documents) if text.strip())


class SampleWriter:
    """A file of samples, which grows beside its final place and moves there when the last one is written.

    In a .txt file the texts stand below a line each that numbers them. Otherwise every line is a JSON object: text, ids, network evaluations
    (nfe), and how it was sampled.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises UserError when the file cannot be written."""
        self.path, self._settings = path, dict(settings)
        self._growing = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._growing.open("w", encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from error

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            os.replace(self._growing, self.path)

    def write(self, sample: Sample, prompt: str, text: str) -> None:
        """Add one. Raises UserError when the file cannot be written."""
        try:
            self._file.write(self._entry(sample, prompt, text) + "\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._growing, error) from error

    def _entry(self, sample: Sample, prompt: str, text: str) -> str:
        if self.path.suffix == ".txt":
            return f"--- sample {sample.sequence + 1} | {sample.evaluations} network evaluations (NFE)\n{text}\n"
        record = {"sequence": sample.sequence, "prompt": prompt, "text": text, "ids": sample.ids, "nfe": sample.evaluations}
        return json.dumps(record | {"settings": self._settings}, ensure_ascii=False)


def summary(sequences: int, tokens: int, evaluations: int, tokens_per_second: float, path: Path) -> str:
    """One sentence about a finished command; `tokens` and `evaluations` are those of all sequences, prompts included."""
    return (
        f"{sequences} sequences of {tokens / sequences:g} tokens | {tokens_per_second:,.0f} tokens/s | "
        f"{evaluations / sequences:.1f} network evaluations (NFE) per sequence | {path}"
    )
