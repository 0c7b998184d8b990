"""Exported tokenizers against the libraries that trained with the originals: sentencepiece itself, and tokenizers."""

from pathlib import Path

import pytest

from data_prep.config import TrainTokenizerConfig
from data_prep.train_tokenizer import train_tokenizer
from pretrain.convert.tokenizer_files import tokenizer_file, write_tokenizer
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.convert.trained import write_tokenizer as write_words
from tests.data.examples import text, write_jsonl

TEXTS = [text(30, seed) for seed in range(40)] + ["  two  spaces ", "\n\nnew\n line", "café Øre 234 zzz 漢字 ▁ x", "", " "]


@pytest.mark.parametrize(("kind", "byte_fallback"), [("bpe", True), ("bpe", False), ("unigram", True), ("unigram", False)])
def test_sentencepiece_ids_and_texts_are_equal(tmp_path: Path, kind: str, byte_fallback: bool) -> None:
    from transformers import AutoTokenizer

    source = write_jsonl(tmp_path / "text.jsonl", [text(200, seed) for seed in range(5)])
    size = (290 if kind == "unigram" else 320) if byte_fallback else 38
    train_tokenizer(
        TrainTokenizerConfig(input=str(source), output=str(tmp_path / "t.model"), vocab_size=size, byte_fallback=byte_fallback, kind=kind)  # type: ignore[arg-type]
    )
    original, folder = Tokenizer(tmp_path / "t.model"), tmp_path / "out"
    folder.mkdir()
    write_tokenizer(original, folder, length=64)
    loaded = AutoTokenizer.from_pretrained(folder)
    for words in TEXTS:
        ids = original.encode([words])[0]
        assert loaded(words, add_special_tokens=False)["input_ids"] == ids, words
        if original.special_ids["unk"] not in ids:  # sentencepiece writes a sign for it, transformers skips it
            assert loaded.decode(ids, skip_special_tokens=True) == original.decode([ids])[0]
    assert (loaded.eos_token_id, len(loaded)) == (original.eos_id, original.size)
    assert Tokenizer(tokenizer_file(folder)).hash == original.hash


def test_a_tokenizer_json_goes_along_as_it_is(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_words(tmp_path / "tokenizer.json")
    original, folder = Tokenizer(tmp_path / "tokenizer.json"), tmp_path / "out"
    folder.mkdir()
    write_tokenizer(original, folder, length=64)
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    words = "the queen sing </s> loud"
    assert AutoTokenizer.from_pretrained(folder)(words, add_special_tokens=False)["input_ids"] == original.encode([words])[0]
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has neither tokenizer\.model nor tokenizer\.json"):
        tokenizer_file(folder)
