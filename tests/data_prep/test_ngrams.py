"""Shared n-grams against a direct comparison of all positions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.ngrams import NgramIndex, Normalization, Passage, Run, ngram_hashes, word_hashes

WORDS = st.lists(st.sampled_from("abc"), max_size=14)


def brute(words: list[str], passages: list[list[str]], n: int, shortest: int) -> tuple[set[tuple[int, str]], dict[int, int]]:
    """(found n-grams as (passage, text), longest common run per passage of at least n words), by looking everywhere."""
    found, longest = set(), {}
    for number, passage in enumerate(passages):
        length = min(n, len(passage))
        if len(passage) < shortest or not length:
            continue
        for i in range(len(words)):
            for j in range(len(passage)):
                run = 0
                while i + run < len(words) and j + run < len(passage) and words[i + run] == passage[j + run]:
                    run += 1
                if run >= length:
                    found.add((number, " ".join(passage[j : j + length])))
                    longest[number] = max(longest.get(number, 0), run)
    return found, longest


@settings(max_examples=300)
@given(WORDS, st.lists(WORDS, max_size=4), st.integers(1, 5), st.integers(1, 3))
def test_runs_are_what_a_direct_comparison_finds(words: list[str], passages: list[list[str]], n: int, shortest: int) -> None:
    index = NgramIndex([Passage(0, number, tuple(passage)) for number, passage in enumerate(passages)], n, shortest)
    expected, longest = brute(words, passages, n, shortest)
    found = set()
    for run in index.runs(words):
        passage = passages[run.passage]
        assert words[run.start : run.start + run.length] == passage[run.passage_start : run.passage_start + run.length]
        starts = range(run.passage_start, run.passage_start + run.length - run.n + 1)
        found |= {(run.passage, " ".join(passage[start : start + run.n])) for start in starts}
        assert run.length <= longest[run.passage]
    assert found == expected
    long_enough = [passage for passage in passages if len(passage) >= shortest]
    grams = [{tuple(p[i : i + min(n, len(p))]) for i in range(len(p) - min(n, len(p)) + 1)} for p in long_enough]
    assert index.distinct.sum() == sum(map(len, grams))


def test_a_run_goes_on_as_far_as_the_words_agree() -> None:
    index = NgramIndex([Passage(0, 0, tuple(["a", "b", "c", "d", "e", "f"])), Passage(0, 1, tuple(["x", "y", "z"]))], 4, 2)
    assert index.runs(list("qabcdexyzfabcd")) == [Run(1, 0, 6, 3, 3), Run(0, 0, 1, 5, 4), Run(0, 0, 10, 4, 4)]


def test_a_colliding_hash_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.ngrams.ngram_hashes", lambda hashes, n: ngram_hashes(hashes, n) & 1)
    index = NgramIndex([Passage(0, 0, tuple(["a", "b", "c", "d"]))], 2, 1)
    assert index.runs(["e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"]) == []


def test_equal_ngrams_have_equal_hashes_wherever_they_stand() -> None:
    hashes = ngram_hashes(word_hashes(["a", "b", "c", "a", "b", "c", "b", "a"]), 3).tolist()
    assert hashes[0] == hashes[3] and len(set(hashes)) == 5
    assert ngram_hashes(word_hashes(["a"]), 2).size == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Héllo,  WORLD!\nIt's", "hello world it s"),
        ("cost <<5*3=15>>15 $1,000.50", "cost 15 1 000 50"),
        ("naïve café", "naive cafe"),
        ("a<<b", "a b"),
        ("", ""),
        ("…", ""),
    ],
)
def test_normalization(text: str, words: str) -> None:
    assert Normalization().words(text) == words.split()
    assert Normalization().text(words) == words


def test_masked_numbers() -> None:
    assert Normalization(mask_numbers=True).words("3 apples, 4.5 pears and 1,000 plums") == ["0", "apples", "0", "pears", "and", "0", "plums"]
