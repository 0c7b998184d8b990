"""Rank files of tiktoken, against the library, and everything that can be wrong with them and the JSON beside."""

import json
import shutil
from pathlib import Path

import pytest
from tiktoken import Encoding
from tiktoken.load import load_tiktoken_bpe

from pretrain.data.cut_rules import PATTERNS
from pretrain.data.tokenizer import Tokenizer, vocabulary_for
from pretrain.errors import UserError
from tests.data.examples import text
from tests.data.tokenizer_examples import tiktoken_ranks

TEXTS = [text(30, 1), "", "a <|end|> b", "two  spaces\n\nand\ttab", "日本語 \N{SLIGHTLY SMILING FACE}"]


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    return tiktoken_ranks(tmp_path, "small", "cl100k")


def test_ids_are_the_librarys_and_text_comes_back(ranks: Path) -> None:
    tokenizer = Tokenizer(ranks)
    library = Encoding("small", pat_str=PATTERNS["cl100k"], mergeable_ranks=load_tiktoken_bpe(str(ranks)), special_tokens={})
    assert tokenizer.encode(TEXTS) == [library.encode_ordinary(document) for document in TEXTS]
    assert tokenizer.decode(tokenizer.encode(TEXTS)) == TEXTS
    assert (tokenizer.size, tokenizer.eos_id, tokenizer.special_ids) == (275, 273, {"eos": 273})
    assert tokenizer.decode([[273, 97]]) == ["a"] and not tokenizer.emits(273) and tokenizer.piece(273) == "<|end|>"


def test_a_reserved_token_may_be_the_mask(ranks: Path) -> None:
    assert vocabulary_for(Tokenizer(ranks), True, 128, mask_id=274).model_size == 275
    assert vocabulary_for(Tokenizer(ranks), True, 128).mask_id == 275
    for mask, reason in ((273, "eos token"), (97, "text may use")):
        with pytest.raises(UserError, match=reason):
            vocabulary_for(Tokenizer(ranks), True, 128, mask_id=mask)


def test_the_hash_covers_the_settings(ranks: Path, tmp_path: Path) -> None:
    before = Tokenizer(ranks).hash
    beside = Path(f"{ranks}.json")
    beside.write_text(json.dumps(json.loads(beside.read_text()) | {"pattern": "gpt2"}))
    assert Tokenizer(ranks).hash != before


def test_a_model_file_of_ranks_is_known_by_its_content(ranks: Path, tmp_path: Path) -> None:
    llama = tmp_path / "tokenizer.model"
    shutil.copy(ranks, llama)
    shutil.copy(f"{ranks}.json", f"{llama}.json")
    assert Tokenizer(llama).encode(TEXTS) == Tokenizer(ranks).encode(TEXTS)


def test_openais_files_are_known_by_name(ranks: Path, tmp_path: Path) -> None:
    shutil.copy(ranks, tmp_path / "r50k_base.tiktoken")
    assert Tokenizer(tmp_path / "r50k_base.tiktoken").eos_id == 50256


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (None, "holds ranks only; write small.tiktoken.json next to it, such as"),
        ("{", "small.tiktoken.json cannot be read .*it must be like"), ("[]", "must hold a pattern and special_tokens"),
        ({"pattern": 5}, "must hold a pattern"), ({"special_tokens": {"a": -1}}, "must give every special token an id"),
        ({"special_tokens": {"a": True}}, "must give every special token an id"),
        ({"eos_token": "<|eos|>"}, "eos_token='<|eos|>', which is not one of"),
        ({"patern": "x"}, "unknown key patern; did you mean pattern"), ({"pattern": "("}, "pattern or ranks do not serve"),
        ({"special_tokens": {"<|end|>": 5}, "eos_token": "<|end|>"}, "special token '<|end|>' has the id 5 of a token of text"),
        ({"eos_token": KeyError}, "no end-of-document token"),
    ],
)  # fmt: skip
def test_settings_that_do_not_serve(ranks: Path, change: object, sentence: str) -> None:
    beside = Path(f"{ranks}.json")
    raw = json.loads(beside.read_text())
    if isinstance(change, dict):
        beside.write_text(json.dumps({key: value for key, value in (raw | change).items() if value is not KeyError}))
    elif isinstance(change, str):
        beside.write_text(change)
    else:
        beside.unlink()
    with pytest.raises(UserError, match=sentence):
        Tokenizer(ranks)


@pytest.mark.parametrize("damage", ["half a line", "lines lost", "doubled", "no base64", "not enough bytes"])
def test_ranks_that_are_damaged(ranks: Path, damage: str) -> None:
    lines = ranks.read_bytes().splitlines(keepends=True)
    content = {
        "half a line": b"".join(lines[:-1]) + lines[-1][:2],
        "lines lost": b"".join(lines[:100] + lines[101:]),
        "doubled": b"".join([*lines, lines[0].replace(b" 0", b" 5")]),
        "no base64": b"!!!! 0\n" + b"".join(lines[1:]),
        "not enough bytes": b"".join(lines[:200]),
    }[damage]
    ranks.write_bytes(content)
    with pytest.raises(UserError, match=r"small.tiktoken \(.*\) cannot be loaded"):
        Tokenizer(ranks)
