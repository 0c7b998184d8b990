"""One shard: read its files, tokenise, write .bin and .idx, and say what was dropped. Runs in a process of its own.

Each document is its text's ids and the end-of-document id. A finished shard leaves parts/SHARD.json, which goes last.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_prep.readers import read_records
from pretrain.data.files import Damaged, atomic_writer
from pretrain.data.indexed import ShardWriter
from pretrain.data.manifest import ShardRecord, shard_record, verify_shard
from pretrain.data.records import Malformed, read_record
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.outputs import cannot_write

PARTS = "parts"
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 512

Report = Callable[[int, int], None]
"""(input bytes read, tokens written) since the last call."""


@dataclass(frozen=True)
class Job:
    """One shard to write: (path, name for messages) of its files."""

    number: int
    files: tuple[tuple[Path, str], ...]
    output: Path
    tokenizer: Path
    text_key: str
    dtype: str

    @property
    def shard(self) -> str:
        """Name of the shard's files, without suffix."""
        return f"shard_{self.number:05d}"

    @property
    def part(self) -> Path:
        """Where the finished shard is described."""
        return self.output / PARTS / f"{self.shard}.json"

    @property
    def quarantine(self) -> Path:
        """Bad records of this shard."""
        return self.output / PARTS / f"{self.shard}.quarantine.jsonl"


@dataclass(frozen=True)
class Part:
    """A finished shard and its counts; `record` is None where no document was left."""

    record: ShardRecord | None
    documents: int
    empty: int
    bad: int


def load_part(job: Job, ids: int) -> Part | None:
    """The part that an earlier run with a tokenizer of `ids` ids finished, or None. Damaged where it, or its shard, is no longer whole."""
    try:
        part = read_record(Part, job.part)
    except FileNotFoundError:
        return None
    except Malformed as error:
        raise Damaged(f"{job.part} {error}", job.output) from error
    if min(part.documents, part.empty, part.bad) < 0 or part.documents != (part.record.documents if part.record else 0):
        raise Damaged(f"{job.part} counts {part.documents} documents, which its shard does not hold", job.output)
    if part.record is not None:
        if part.record.file != job.shard:
            raise Damaged(f"{job.part} describes {part.record.file}", job.output)
        verify_shard(job.output, part.record, dtype=job.dtype, ids=ids)
    return part


def run_job(job: Job, report: Report) -> Part:
    """Write one shard. UserError for unreadable inputs and a full disk; a shard that fails leaves nothing behind but what was finished."""
    prefix = job.output / job.shard
    try:
        with atomic_writer(job.quarantine) as quarantine, ShardWriter(prefix, np.dtype(job.dtype)) as writer:
            counts = _Tokenizing(job, writer, quarantine, report).run()
        if counts["bad"] == 0:
            job.quarantine.unlink()
        record = shard_record(prefix) if counts["documents"] else None
        if record is None:  # a memory map of nothing is an error for other readers
            prefix.with_name(job.shard + ".bin").unlink()
            prefix.with_name(job.shard + ".idx").unlink()
    except OSError as error:
        raise UserError(f"{cannot_write(prefix, error)}, then run the same command to continue") from error
    part = Part(record, **counts)
    with atomic_writer(job.part) as stream:
        stream.write(json.dumps(asdict(part)).encode())
    return part


class _Tokenizing:
    def __init__(self, job: Job, writer: ShardWriter, quarantine: BinaryIO, report: Report) -> None:
        self._job, self._writer, self._quarantine, self._report = job, writer, quarantine, report
        self._tokenizer = _tokenizer(job.tokenizer)
        self._texts: list[str] = []
        self._characters = 0
        self._unreported = 0
        self._counts = {"documents": 0, "empty": 0, "bad": 0}

    def run(self) -> dict[str, int]:
        for path, name in self._job.files:
            before = 0
            for record in read_records(path, self._job.text_key):
                self._unreported += record.position - before
                before = record.position
                if record.text is None:
                    self._reject(name, record.line, record.reason)
                elif not record.text.strip():
                    self._counts["empty"] += 1
                else:
                    self._accept(record.text)
        self._flush()
        return self._counts

    def _accept(self, text: str) -> None:
        self._counts["documents"] += 1
        self._texts.append(text)
        self._characters += len(text)
        if self._characters >= _BATCH_CHARACTERS or len(self._texts) >= _BATCH_DOCUMENTS:
            self._flush()

    def _reject(self, name: str, line: int, reason: str) -> None:
        self._counts["bad"] += 1
        self._quarantine.write((json.dumps({"file": name, "line": line, "reason": reason}) + "\n").encode())

    def _flush(self) -> None:
        before = self._writer.tokens
        for ids in self._tokenizer.encode(self._texts) if self._texts else ():
            ids.append(self._tokenizer.eos_id)
            self._writer.add(ids)
        self._report(self._unreported, self._writer.tokens - before)
        self._texts, self._characters, self._unreported = [], 0, 0


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(path)
