"""Training a sentencepiece model."""

from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from data_prep.config import TrainTokenizerConfig
from data_prep.train_tokenizer import train_tokenizer
from pretrain.errors import UserError
from tests.data.examples import text, write_jsonl


def config(folder: Path, name: str = "a.model", **options: object) -> TrainTokenizerConfig:
    source = write_jsonl(folder / "text.jsonl", [text(200, seed) for seed in range(4)])
    settings = {"input": str(source), "output": str(folder / name), "vocab_size": 60, "byte_fallback": False} | options
    return TrainTokenizerConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    size = 60 if kind == "bpe" else 36
    first, second = (train_tokenizer(config(tmp_path, name, kind=kind, vocab_size=size)).read_bytes() for name in ("a.model", "b.model"))
    assert first == second


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_special_ids_are_fixed_and_text_comes_back(tmp_path: Path, byte_fallback: bool) -> None:
    path = train_tokenizer(config(tmp_path, byte_fallback=byte_fallback, vocab_size=310 if byte_fallback else 60))
    model = SentencePieceProcessor(model_file=str(path))
    assert (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()) == (0, 1, 2, 3)
    known = "  the  king\n\ncafé Øre 23"
    assert model.decode(model.encode(known)) == known
    unknown = "猫"
    assert (0 in model.encode(unknown)) is not byte_fallback
    assert (model.decode(model.encode(unknown)) == unknown) is byte_fallback


def test_again_is_quick_and_other_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = train_tokenizer(config(tmp_path))
    before = path.read_bytes()
    train_tokenizer(config(tmp_path))
    assert "already trained" in capsys.readouterr().err and path.read_bytes() == before
    with pytest.raises(UserError, match="other text or settings"):
        train_tokenizer(config(tmp_path, vocab_size=61))


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer of 5000 pieces .* choose vocab_size=128"):
        train_tokenizer(config(tmp_path, vocab_size=5000))
    with pytest.raises(UserError, match="no tokenizer of 100 pieces .* need 286"):
        train_tokenizer(config(tmp_path, vocab_size=100, byte_fallback=True))
    with pytest.raises(UserError, match=r"must end in \.model"):
        train_tokenizer(config(tmp_path, "a.json"))


def test_max_bytes_takes_from_all_files(tmp_path: Path) -> None:
    sources = [str(write_jsonl(tmp_path / f"{name}.jsonl", [name * 40] * 500)) for name in "xyz"]
    path = train_tokenizer(config(tmp_path, input=sources, max_bytes=20_000, vocab_size=12))
    model = SentencePieceProcessor(model_file=str(path))
    assert all(0 not in model.encode(name) for name in "xyz")
