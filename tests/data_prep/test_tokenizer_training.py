"""Training a sentencepiece model."""

import re
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from data_prep.config import TrainTokenizerConfig
from data_prep.train_tokenizer import train_tokenizer
from pretrain.data.tokenizer import Tokenizer
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
    with pytest.raises(UserError, match="was trained with other vocab_size, kind; choose another output, or remove it"):
        train_tokenizer(config(tmp_path, vocab_size=61, kind="unigram"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.model.json", b"{", "a.model.json is not JSON .*, so nobody knows what .*a.model was trained from"),
        ("a.model.json", b"[]", r"a.model.json holds \[\], which must be an object"),
        ("a.model.json", b'{"text_key": "text"}', "a.model.json has no field"),
        ("a.model.json", None, "a.model exists, and no a.model.json says what it was trained from"),
        ("a.model", b"cut", "a.model is no longer the tokenizer that was trained; remove it, and run the same command"),
    ],
)
def test_a_broken_result_is_named_and_the_way_out_works(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    before = train_tokenizer(config(tmp_path)).read_bytes()
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        train_tokenizer(config(tmp_path))
    (tmp_path / "a.model").unlink()
    assert train_tokenizer(config(tmp_path)).read_bytes() == before


def test_another_tokenizer_in_its_place(tmp_path: Path) -> None:
    train_tokenizer(config(tmp_path)).write_bytes(train_tokenizer(config(tmp_path, "b.model", vocab_size=50)).read_bytes())
    with pytest.raises(UserError, match="a.model has 50 pieces and was trained with 60"):
        train_tokenizer(config(tmp_path))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(("size", "byte_fallback"), [(5000, False), (5000, True), (10, False), (270, True)])
def test_a_size_that_cannot_be_names_one_that_works(tmp_path: Path, kind: str, size: int, byte_fallback: bool) -> None:
    with pytest.raises(UserError, match=f"^no tokenizer of {size} pieces .* vocab_size=[0-9]+") as caught:
        train_tokenizer(config(tmp_path, vocab_size=size, kind=kind, byte_fallback=byte_fallback))
    advised = [int(number) for number in re.findall("vocab_size=([0-9]+)", str(caught.value))]
    assert len(advised) == (2 if size == 270 else 1)
    for number, pieces in enumerate(advised):
        made = config(tmp_path, f"{number}.model", vocab_size=pieces, kind=kind, byte_fallback=byte_fallback and number == 0)
        assert Tokenizer(train_tokenizer(made)).size == pieces


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"vocab_size": 99999999999}, r"vocab_size=99999999999 must lie in \[6, "),
        ({"vocab_size": -5}, "vocab_size=-5 must lie in"),
        ({"vocab_size": 0}, "vocab_size=0 must lie in"),
        ({"vocab_size": 100, "byte_fallback": True}, r"vocab_size=100 must lie in \[262, .*byte_fallback=false"),
        ({"max_bytes": -1}, "max_bytes=-1 must be at least 1"),
        ({"max_bytes": 0}, "max_bytes=0 must be at least 1"),
        ({"output": "a.json"}, r"must end in \.model, for example tokenizer\.model"),
        ({"output": ""}, "output='' holds an empty path"),
        ({"input": []}, "input is an empty list"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        train_tokenizer(config(tmp_path, **settings))


def test_an_output_that_cannot_be_written_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.train_tokenizer._train", lambda *_: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.model").mkdir()
    cases = [("file/a.model", "a file is in the way"), ("folder.model", "a folder has that name"), ("a" * 300 + ".model", "choose a shorter name")]
    for name, sentence in cases:
        with pytest.raises(UserError, match=sentence):
            train_tokenizer(config(tmp_path, name))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b"", "1 empty and 0 unreadable"),
        ("empty.jsonl", b"", "0 empty and 0 unreadable"),
        ("blank.txt", b" \n\t\n  ", "1 empty and 0 unreadable"),
    ],
)
def test_input_without_text_is_said_to_be_so(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"^the input holds no text: {sentence}.*; give files with text$"):
        train_tokenizer(config(tmp_path, input=str(tmp_path / name)))


@pytest.mark.parametrize(("name", "reason"), [("binary.txt", "not UTF-8: byte 0x80"), ("binary.jsonl", "not JSON"), ("other.jsonl", "no key 'text'")])
def test_a_file_that_cannot_be_read_is_not_left_out_in_silence(tmp_path: Path, name: str, reason: str) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["some words to learn from"] * 9)
    (tmp_path / name).write_bytes(b'{"content": "x"}\n' * 300 if name == "other.jsonl" else bytes(range(256)))
    with pytest.raises(UserError, match=rf"the first (record|[0-9]+ records) of .*{name} cannot be read \({reason}.*set text_key"):
        train_tokenizer(config(tmp_path, input=[str(good), str(tmp_path / name)]))


def test_every_character_of_the_text_is_a_piece(tmp_path: Path) -> None:
    """Form feeds, and what else str.splitlines ends a line at, as well: without byte pieces they would become <unk>."""
    strange = "\x0c\x0b\x1c\x85\u2028\r"
    source = write_jsonl(tmp_path / "strange.jsonl", [f"a{character}b" for character in strange] * 3)
    model = SentencePieceProcessor(model_file=str(train_tokenizer(config(tmp_path, input=str(source), vocab_size=13))))
    assert 0 not in model.encode(strange) and model.decode(model.encode(strange)) == strange


def test_max_bytes_takes_from_all_files(tmp_path: Path) -> None:
    sources = [str(write_jsonl(tmp_path / f"{name}.jsonl", [name * 40] * 500)) for name in "xyz"]
    path = train_tokenizer(config(tmp_path, input=sources, max_bytes=20_000, vocab_size=12))
    model = SentencePieceProcessor(model_file=str(path))
    assert all(0 not in model.encode(name) for name in "xyz")
