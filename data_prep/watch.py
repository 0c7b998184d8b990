"""What every shard has reported, from small files in output/parts, whoever writes them: other processes, or other machines."""

import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.job import PARTS, Job
from data_prep.progress import Display


@dataclass
class Watch:
    """Bytes read and tokens written over the jobs that wait; `finished` are the numbers of those whose part has appeared."""

    output: Path
    waiting: dict[int, Job]
    done_bytes: int = 0
    tokens: int = 0
    finished: set[int] = field(default_factory=set)
    _read: dict[int, int] = field(default_factory=dict)
    _tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def over(cls, output: Path, jobs: Iterable[Job]) -> "Watch":
        """Nothing of these has been seen."""
        return cls(output, {job.number: job for job in jobs})

    def look(self) -> None:
        """Read what is new."""
        names = set(os.listdir(self.output / PARTS))
        for number, job in self.waiting.items():
            if number in self.finished:
                continue
            if job.file(self.output, ".json").name in names:
                self.finished.add(number)
                self._read[number], self._tokens[number] = job.size, _tokens_of(job.file(self.output, ".json"))
            elif job.file(self.output, ".progress").name in names:
                read = _progress(job.file(self.output, ".progress"))
                if read is not None:
                    self._read[number], self._tokens[number] = min(read[0], job.size), read[1]
        self.done_bytes, self.tokens = sum(self._read.values()), sum(self._tokens.values())

    def failures(self) -> list[str]:
        """Why shards failed, in their order."""
        paths = (job.file(self.output, ".failed") for number, job in self.waiting.items() if number not in self.finished)
        return [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.exists()]


def _progress(path: Path) -> tuple[int, int] | None:
    try:
        read, tokens = path.read_text().split()
        return int(read), int(tokens)
    except (OSError, ValueError):  # gone, or written this moment
        return None


def _tokens_of(path: Path) -> int:
    try:
        record = json.loads(path.read_bytes())["record"]
        return int(record["tokens"]) if record else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


@contextmanager
def shown(watch: Watch, display: Display, seconds: float) -> Iterator[None]:
    """Looks every so many seconds, from a thread, and shows what is there."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            try:
                watch.look()
            except OSError:  # a file system that fails now may answer the next time; the shards themselves will say
                continue
            display.show(watch.done_bytes, watch.tokens)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
