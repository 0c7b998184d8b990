"""The datatrove pipeline of a shard: read its records (bad ones to quarantine), tokenise them, write .bin and .idx.

A datatrove task is a shard, so rank r of any executor writes shard r of the plan. Each document is its text's ids and the end-of-document id.
"""

import functools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_prep import readers
from data_prep.job import Counts, Job, Part, Plan, load_plan, plan_stamp
from pretrain.data.cutting import TooLong, encode_long
from pretrain.data.files import atomic_writer
from pretrain.data.indexed import ShardWriter
from pretrain.data.manifest import shard_record
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.outputs import cannot_write

CUT_CHARACTERS = 1 << 20
"""Longer documents are tokenised in pieces of about this size."""
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 512
_PROGRESS_SECONDS = 0.5


class ReadRecords(PipelineStep):
    """Records of a shard as documents. Bad, empty and filtered ones are counted and go no further; bad ones are listed in the quarantine."""

    name = "records"
    type = "reader"

    def __init__(self, output: Path) -> None:
        super().__init__()
        self.output = output
        self.position = 0
        self.filtered: Counter[str] = Counter()
        self.empty = self.bad = 0
        self.lines: list[int] = []

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields documents whose `id` is FILE:LINE."""
        job = self._begin(rank)
        with atomic_writer(job.file(self.output, ".quarantine.jsonl")) as self._quarantine:
            done = 0
            for piece in job.pieces:
                self.lines.append(0)
                self._piece = piece
                for record in readers.read_records(piece, job.wanted):
                    self.position = done + record.position
                    self.lines[-1] = self._line = record.line
                    if record.text is None:
                        self._leave_out(record)
                    elif not record.text.strip():
                        self.empty += 1
                    else:
                        yield Document(record.text, piece.name)
                done += piece.size
                self.position = done

    def reject(self, reason: str) -> None:
        """List the record that was read last in the quarantine."""
        self.bad += 1
        entry: dict[str, object] = {"file": self._piece.name, "line": self._line, "reason": reason}
        if self._piece.start and self._piece.name.endswith(".jsonl"):
            entry["from"] = self._piece.start
        self._quarantine.write((json.dumps(entry) + "\n").encode())

    def _begin(self, rank: int) -> Job:
        self.position = self.empty = self.bad = 0
        self.filtered, self.lines = Counter(), []
        return load_plan(self.output, plan_stamp(self.output)).jobs[rank]

    def _leave_out(self, record: readers.Record) -> None:
        if record.filtered:
            self.filtered[record.filtered] += 1
        else:
            self.reject(record.reason)


class WriteShard(PipelineStep):
    """Tokenises documents into a shard, and describes it in parts/SHARD.json.

    UserError for unreadable inputs and a full disk; a shard that fails leaves nothing behind but the reason, in parts/SHARD.failed.
    """

    name = "token shard"
    type = "writer"

    def __init__(self, output: Path, reader: ReadRecords) -> None:
        super().__init__()
        self.output, self.reader = output, reader

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Writes shard `rank`."""
        plan = load_plan(self.output, plan_stamp(self.output))
        job = plan.jobs[rank]
        failed = job.file(self.output, ".failed")
        failed.unlink(missing_ok=True)
        try:
            part = self._write(plan, job, data)
            with atomic_writer(job.file(self.output, ".json")) as stream:
                stream.write(json.dumps(asdict(part)).encode())
        except Exception as error:
            with suppress(OSError):  # what made the shard fail may hide its reason too
                failed.write_text(" ".join(str(error).split()) if isinstance(error, UserError) else repr(error))
            raise
        finally:
            data.close()  # a reader that was left in the middle drops its quarantine now
            job.file(self.output, ".progress").unlink(missing_ok=True)
        self.stat_update("tokens", value=part.record.tokens if part.record else 0)

    def _write(self, plan: Plan, job: Job, data: DocumentsPipeline) -> Part:
        prefix, reader = self.output / job.folder / job.shard, self.reader
        try:
            prefix.parent.mkdir(exist_ok=True)
            with ShardWriter(prefix, np.dtype(plan.dtype)) as writer, _Progress(job.file(self.output, ".progress")) as progress:
                _Tokenizing(writer, reader, plan, progress).run(data)
            counts = Counts(documents=writer.documents, empty=reader.empty, bad=reader.bad, filtered=dict(reader.filtered))
            if counts.bad == 0:
                job.file(self.output, ".quarantine.jsonl").unlink()
            record = shard_record(prefix, job.source) if counts.documents else None
            if record is None:  # a memory map of nothing is an error for other readers
                prefix.with_name(job.shard + ".bin").unlink()
                prefix.with_name(job.shard + ".idx").unlink()
        except OSError as error:
            raise UserError(f"{cannot_write(prefix, error)}, then run the same command to continue") from error
        return Part(record=record, counts=counts, lines=tuple(reader.lines))


class _Tokenizing:
    """Batches of documents through the tokenizer into the writer; long documents by themselves, in pieces."""

    def __init__(self, writer: ShardWriter, reader: ReadRecords, plan: Plan, progress: "_Progress") -> None:
        self._writer, self._reader, self._progress = writer, reader, progress
        self._tokenizer = _tokenizer(Path(plan.tokenizer_path), plan.tokenizer.hash)
        self._texts: list[str] = []
        self._characters = 0

    def run(self, data: DocumentsPipeline) -> None:
        for document in data:
            size = len(document.text)
            if size > CUT_CHARACTERS:
                self._flush()
                self._write_long(document.text)
                continue
            self._texts.append(document.text)
            self._characters += size
            if self._characters >= _BATCH_CHARACTERS or len(self._texts) >= _BATCH_DOCUMENTS:
                self._flush()
        self._flush()

    def _write_long(self, text: str) -> None:
        try:
            pieces = list(encode_long(self._tokenizer, text, CUT_CHARACTERS))
        except TooLong as refusal:
            self._reader.reject(str(refusal))
            return
        self._writer.add(np.concatenate([*pieces, np.array([self._tokenizer.eos_id], np.int32)]))

    def _flush(self) -> None:
        if self._texts:
            rows = self._tokenizer.encode(self._texts)
            for row in rows:
                row.append(self._tokenizer.eos_id)
            self._writer.add_all(rows)
        self._progress.report(self._reader.position, self._writer.tokens)
        self._texts, self._characters = [], 0


class _Progress:
    """Two numbers in a file of fixed size, for whoever watches, on this machine or another."""

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0.0

    def __enter__(self) -> "_Progress":
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def report(self, read: int, tokens: int) -> None:
        """At most twice a second."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS_SECONDS
            with suppress(OSError):  # a disk that is full will say so to the shard itself
                os.pwrite(self._file, f"{read:020d} {tokens:020d}\n".encode(), 0)


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, expected: str) -> Tokenizer:
    tokenizer = Tokenizer(path)
    if tokenizer.hash != expected:
        raise UserError(f"{path} is not the tokenizer that the preparation began with (hash {tokenizer.hash[:12]}, not {expected[:12]}); put it back")
    return tokenizer


def pipeline(output: Path) -> list[PipelineStep]:
    """The steps of a shard."""
    reader = ReadRecords(output)
    return [reader, WriteShard(output, reader)]
