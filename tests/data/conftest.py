"""A tokenizer and two corpora, made once."""

from pathlib import Path

import pytest

from pretrain.data.corpus import Corpus
from pretrain.data.tokenizer import Tokenizer
from tests.data.examples import prepared, sentencepiece_file, text


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_file(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(model_file: Path) -> Tokenizer:
    return Tokenizer(model_file)


@pytest.fixture(scope="session")
def corpora(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Corpus]:
    """Documents of a few words, so that windows hold several; `a` has three shards."""
    return {
        "a": prepared(tmp_path_factory.mktemp("a"), model_file, [text(1 + seed % 9, seed) for seed in range(60)], files=3),
        "b": prepared(tmp_path_factory.mktemp("b"), model_file, [text(40, seed) for seed in range(5)]),
    }
