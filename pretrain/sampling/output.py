"""Samples on the screen and in a file: a progress bar, the texts, one JSON line per sample."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from pretrain.errors import UserError
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.generate import Sample

Decode = Callable[[list[list[int]]], list[str]]


class _TokensPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f} tokens/s")


class SamplingDisplay:
    """A bar over `tokens` tokens on a terminal, nothing in a file; `advance` is a sampler's progress callback."""

    def __init__(self, tokens: int, stream: TextIO, *, what: str = "sampling") -> None:
        columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(), _TokensPerSecond(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(file=stream), disable=not stream.isatty())
        self._task = self._progress.add_task(what, total=tokens)
        self._tokens = 0
        self._start = time.monotonic()

    def __enter__(self) -> "SamplingDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, tokens: int) -> None:
        """Count drawn tokens."""
        self._tokens += tokens
        self._progress.advance(self._task, tokens)

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


def write_samples(path: Path, samples: list[Sample], texts: list[str], config: SamplingConfig, *, sampler: str, step: int) -> None:
    """One JSON object per line: text, ids, network evaluations (nfe), and how it was sampled. Raises UserError when the file cannot be written."""
    settings = dataclasses.asdict(config) | {"sampler": sampler, "step": step}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for sample, text in zip(samples, texts, strict=True):
                record = {"sequence": sample.sequence, "text": text, "ids": sample.ids, "nfe": sample.evaluations, "settings": settings}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"output {path} cannot be written ({error.strerror}); name another file with output=") from error


def summary(samples: list[Sample], tokens_per_second: float, path: Path) -> str:
    """One sentence about a finished command."""
    evaluations = sum(sample.evaluations for sample in samples) / len(samples)
    return (
        f"{len(samples)} sequences of {len(samples[0].ids)} tokens | {tokens_per_second:,.0f} tokens/s | "
        f"{evaluations:.1f} network evaluations (NFE) per sequence | {path}"
    )
