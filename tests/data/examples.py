"""Small text, tokenizers and prepared corpora for the data tests."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.config import TokenizeConfig, TrainTokenizerConfig
from data_prep.prepare import prepare
from data_prep.train_tokenizer import train_tokenizer
from pretrain.data.config import DataConfig, SourceConfig
from pretrain.data.corpus import Corpus
from pretrain.objectives.base import Corrupted
from pretrain.parallel.noise import Noise

WORDS = ("the", "king", "sleeps", "and", "no", "man", "wakes", "him;", "night", "falls\n", "on", "23", "ships,", "Øre", "café")


def text(words: int, seed: int) -> str:
    """Words in a random order."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """One document per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in texts), encoding="utf-8")
    return path


def sentencepiece_file(folder: Path, *, byte_fallback: bool = True) -> Path:
    """A model of a few pieces."""
    source = write_jsonl(folder / "for_tokenizer.jsonl", [text(200, seed) for seed in range(5)])
    size = 320 if byte_fallback else 60
    config = TrainTokenizerConfig(input=str(source), output=str(folder / "small.model"), vocab_size=size, byte_fallback=byte_fallback)
    return train_tokenizer(config)


def prepared(folder: Path, tokenizer: Path, texts: Sequence[str], *, files: int = 1, **options: object) -> Corpus:
    """A corpus of these documents, over as many shards as files."""
    for number in range(files):
        write_jsonl(folder / "text" / f"{number}.jsonl", texts[number::files])
    output = folder / "corpus"
    settings = {"workers": 1, "shard_bytes": 1 if files > 1 else 1 << 30} | options
    prepare(TokenizeConfig(input=str(folder / "text"), tokenizer=str(tokenizer), output=str(output), **settings))  # type: ignore[arg-type]
    return Corpus(output)


def data_config(**values: object) -> DataConfig:
    """Two sources, 3 to 1, with a plain loader."""
    settings = {"train": {"a": SourceConfig(path="", weight=3), "b": SourceConfig(path="", weight=1)}, "loader": "plain"} | values
    return DataConfig(**settings)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Batch:
    """Sizes of a global batch."""

    global_sequences: int = 8
    micro_sequences: int = 2
    length: int = 16


def corrupt(tokens: np.ndarray, documents: np.ndarray, noise: Noise) -> Corrupted:
    """Arrays of every type that an objective may hand out."""
    masked = noise.stream("mask").random(tokens.size) < noise.stratified_time()
    return Corrupted(
        inputs={"ids": np.where(masked, 0, tokens), "documents": documents, "positions": np.arange(tokens.size), "conditioning": np.float32(0.5)},
        targets={"ids": tokens, "masked": masked, "weight": np.array(noise.stratified_time())},
        count=int((documents >= 0).sum()),
        t=noise.stratified_time(),
    )
