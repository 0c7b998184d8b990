"""Text in pieces has the ids of the uncut text, for every family of tokenizers, on text made to break it."""

import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data import cutting
from pretrain.data.cutting import TooLong, encode_long
from pretrain.data.tokenizer import Tokenizer
from tests.data.examples import text
from tests.data.tokenizer_examples import PROVEN, UNPROVEN

ADVERSARIAL = [
    text(300, 3),
    "the  king   sleeps \n\n  and \n wakes\t him ; no\r\nman\r\n\r\n falls  ",
    "   leading and trailing   ",
    "a" * 200,
    "aaaa aaaa  aaaa" * 20,
    "the king " * 30 + "\N{NO-BREAK SPACE}the\N{IDEOGRAPHIC SPACE}king\N{EN QUAD}sleeps\N{ZERO WIDTH SPACE}and\N{LINE SEPARATOR}no\x85man\x1c",
    "e\N{COMBINING ACUTE ACCENT} \N{COMBINING ACUTE ACCENT}e x \N{COMBINING DIAERESIS}y ﬁ ﬁ½ Å ① ㎏ king x\N{COMBINING ACUTE ACCENT} y" * 5,
    "▁the▁king ▁ sleeps▁▁ and ▁▁no" * 8,
    "日本語テキスト。\n中文文本。\n日本語 テキスト\n" * 8,
    "can't won't I'll he'd 'S 'LL it 's we 've\n's" * 8,
    "x=1;y=22;z=333 4444 55555\n#!/bin/sh\n// a\n/b\n\n/c d" * 6,
    "</s> <s> <unk> <0x0A> <|end|> </s>the king</s> the" * 6,
    "\x00the\x00 king\x00\n\x00 \x07 \ufeff\ufeff the \ufffd \U0010ffff\U0001f600\u200d\U0001f600 a\u0301 b" * 5,
    "I\N{LATIN CAPITAL LETTER I WITH DOT ABOVE} ΣΑΣ σας ẞ ǅ king " * 8,
    " \n \n" * 40,
]
nasty = st.text(st.sampled_from("ab eThk \n\t'.1▁é日\u0301\u3000ﬁ\x00</s>"), max_size=80)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("families")
    return {name: Tokenizer(make(folder, f"t{number}")) for number, (name, make) in enumerate((PROVEN | UNPROVEN).items())}


def pieces(tokenizer: Tokenizer, document: str, size: int) -> list[list[int]]:
    return [piece.tolist() for piece in encode_long(tokenizer, document, size)]


@pytest.mark.parametrize("name", PROVEN)
def test_what_is_proven_is_cut_and_equal(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.cut_rule is not None
    assert len(pieces(tokenizer, text(300, 3), 50)) > 10
    for document in ADVERSARIAL:
        [whole] = tokenizer.encode([document])
        for size in (1, 2, 5, 17, 64):
            assert sum(pieces(tokenizer, document, size), []) == whole, (document, size)


@pytest.mark.parametrize("name", UNPROVEN)
def test_what_is_not_proven_stays_whole_up_to_the_bound(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.cut_rule is None
    for document in ADVERSARIAL:
        assert pieces(tokenizer, document, 5) == tokenizer.encode([document])


@settings(max_examples=400, deadline=None)
@given(document=nasty, size=st.integers(1, 30))
@pytest.mark.parametrize("name", PROVEN)
def test_any_text_in_pieces_has_the_ids_of_the_whole(name: str, document: str, size: int, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    assert sum(pieces(tokenizer, document, size), []) == tokenizer.encode([document])[0]


def test_beyond_the_bound_a_cut_is_verified(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "UNCUT_CHARACTERS", 300)
    for name in ("sentencepiece unigram", "byte-level, odd pattern", "tiktoken, odd pattern"):
        tokenizer, document = tokenizers[name], text(400, 1)
        found = pieces(tokenizer, document, 100)
        assert len(found) > 3 and max(map(len, found)) < 301
        assert sum(found, []) == tokenizer.encode([document])[0]


def test_text_without_a_place_to_cut_is_refused(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "UNCUT_CHARACTERS", 300)
    monkeypatch.setattr(cutting, "_same", lambda *_: False)
    for name in ("sentencepiece unigram", "byte-level"):
        with pytest.raises(TooLong, match="a document of 1000 characters that can neither be cut"):
            pieces(tokenizers[name], "a" * 1000, 100)


def test_added_tokens_that_touch_a_place_forbid_it(tmp_path: Path) -> None:
    """A token of text that ends in a space, or takes spaces along, could be cut in two."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as HuggingFace

    for number, token in enumerate([AddedToken("the king"), AddedToken("king", lstrip=True), AddedToken("king", rstrip=True)]):
        path = PROVEN["byte-level"](tmp_path, f"added{number}")
        model = HuggingFace.from_file(str(path))
        model.add_tokens([token])
        model.save(str(path))
        assert Tokenizer(path).cut_rule is None


@pytest.mark.slow
def test_long_documents_take_little_memory(tokenizers: dict[str, Tokenizer]) -> None:
    """Ten million characters: the tokenizers alone would take a hundred bytes for each. And five million without a single space."""
    words = text(2000, 5) + " "
    document = words * (10_000_000 // len(words))
    for name in ("sentencepiece bpe, Llama 2", "byte-level"):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        count = sum(len(piece) for piece in encode_long(tokenizers[name], document, 1 << 18))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kilobytes"
        [one, two] = tokenizers[name].encode([words, words * 2])
        assert abs(count - len(one) - (document.count(words) - 1) * (len(two) - len(one))) <= 1
    [whole] = tokenizers["sentencepiece bpe, plain"].encode(["ab" * 1000])
    solid = np.concatenate(list(encode_long(tokenizers["sentencepiece bpe, plain"], "ab" * 2_500_000, 1 << 18)))
    assert len(solid) == 2500 * len(whole)
