"""Word n-grams that two texts share: the normalisation, a vectorised rolling hash, and an index of evaluation items that fits in memory.

Normalisation (datatrove's `simplify_text`): lower case, punctuation and symbols to spaces, runs of white space to one space, diacritics
dropped; calculator annotations `<<…>>` are removed first. Numbers stay as they are unless `mask_numbers`, which makes each of them 0, so that a
problem with other numbers matches too. Words are what white space separates: text in scripts without spaces is compared by whole phrases.

Hash: each word has 64 bits (xxHash); an n-gram is their polynomial modulo 2^64 in an odd base, computed for all positions at once. A hit
of the hash counts only where the words are equal, so no collision is ever reported.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from datatrove.utils.text import TextNormConfig, simplify_text
from xxhash import xxh3_64_intdigest

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Normalization:
    """How text becomes words; `mask_numbers` replaces each number by 0."""

    mask_numbers: bool = False

    def text(self, text: str) -> str:
        """The normalised text: words with one space between."""
        plain = _ANNOTATION.sub(" ", text) if "<<" in text else text
        # ASCII has no diacritics, and looking for them costs more than everything else
        return simplify_text(plain, TextNormConfig(norm_numbers=self.mask_numbers, norm_unicode_diacritics=not plain.isascii()))

    def words(self, text: str) -> list[str]:
        """The words of a text."""
        return self.text(text).split()


def word_hashes(words: Sequence[str]) -> np.ndarray:
    """[W] uint64, one per word."""
    return np.fromiter((xxh3_64_intdigest(word.encode(errors="surrogatepass")) for word in words), np.uint64, len(words))


def ngram_hashes(hashes_W: np.ndarray, n: int) -> np.ndarray:
    """[W - n + 1] uint64: the hash of every n words in a row; empty where there are fewer."""
    count = len(hashes_W) - n + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    total = np.zeros(count, np.uint64)
    for offset in range(n):
        total *= _BASE
        total += hashes_W[offset : offset + count]
    return total


@dataclass(frozen=True)
class Passage:
    """One field of an evaluation item: which set and item it belongs to, and its words."""

    evaluation_set: int
    item: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """Words [start, start + length) of a document equal words [passage_start, …) of a passage: as many n-grams in a row as possible."""

    passage: int
    passage_start: int
    start: int
    length: int
    n: int


class NgramIndex:
    """All n-grams of some passages, to be looked up in documents.

    A passage of fewer than n words, but at least `shortest`, is one n-gram of its own length; a shorter one is not searched for.
    An n-gram that a passage repeats is looked up at its first place only.

    lengths       words of each passage's n-grams; 0: too short.
    first_ngram   [P + 1]: number of each passage's first n-gram among all.
    distinct      [N] bool: whether n-gram number i is the first of its kind in its passage.
    """

    def __init__(self, passages: Sequence[Passage], n: int, shortest: int) -> None:
        self.passages = passages
        self.lengths = [min(n, len(passage.words)) if len(passage.words) >= shortest else 0 for passage in passages]
        counts = [len(passage.words) - length + 1 if length else 0 for passage, length in zip(passages, self.lengths, strict=True)]
        self.first_ngram = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self.distinct = np.zeros(int(self.first_ngram[-1]), bool)
        self._tables = {length: self._table(length) for length in sorted(set(self.lengths) - {0})}

    def runs(self, words: Sequence[str]) -> list[Run]:
        """Every maximal run of words of a document that a passage has too."""
        hashes_W = word_hashes(words)
        found: list[Run] = []
        for n, (keys, starts, places) in self._tables.items():
            at = self._candidates(ngram_hashes(hashes_W, n), keys)
            near = ((position, int(place)) for position, key in at for place in places[starts[key] : starts[key + 1]])
            matches = [(position, place) for position, place in near if self._equal(words, position, place, n)]
            found += self._joined(matches, n)
        return found

    def ngrams_of(self, run: Run) -> range:
        """Numbers of the passages' n-grams that a run covers."""
        first = int(self.first_ngram[run.passage]) + run.passage_start
        return range(first, first + run.length - run.n + 1)

    def _table(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distinct hashes, sorted; where each one's places start; the places (numbers of n-grams), grouped by hash."""
        hashes, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for number, passage in enumerate(self.passages):
            if self.lengths[number] == n:
                once, first = np.unique(ngram_hashes(word_hashes(passage.words), n), return_index=True)
                hashes.append(once)
                places.append(first + self.first_ngram[number])
        all_hashes, all_places = np.concatenate(hashes), np.concatenate(places)
        self.distinct[all_places] = True
        order = np.argsort(all_hashes, kind="stable")
        keys, starts = np.unique(all_hashes[order], return_index=True)
        return keys, np.append(starts, len(order)), all_places[order]

    @staticmethod
    def _candidates(hashes: np.ndarray, keys: np.ndarray) -> list[tuple[int, int]]:
        """(position, key) of hashes that are keys."""
        at = np.minimum(np.searchsorted(keys, hashes), len(keys) - 1)
        positions = np.flatnonzero(keys[at] == hashes)
        return list(zip(positions.tolist(), at[positions].tolist(), strict=True))

    def _passage_of(self, place: int) -> tuple[int, int]:
        passage = int(np.searchsorted(self.first_ngram, place, side="right")) - 1
        return passage, place - int(self.first_ngram[passage])

    def _equal(self, words: Sequence[str], position: int, place: int, n: int) -> bool:
        passage, start = self._passage_of(place)
        return tuple(words[position : position + n]) == self.passages[passage].words[start : start + n]

    def _joined(self, matches: list[tuple[int, int]], n: int) -> list[Run]:
        """Matches (position in the document, n-gram) as maximal runs: both grow by one inside a run, which stays in one passage."""
        open_runs: dict[tuple[int, int], Run] = {}  # (next position, next n-gram of the passage) -> the run so far
        done: list[Run] = []
        for position, place in matches:
            passage, start = self._passage_of(place)
            before = open_runs.pop((position, place), None)
            if before is not None and before.passage != passage:
                done.append(before)
                before = None
            run = Run(passage, start, position, n, n) if before is None else Run(passage, before.passage_start, before.start, before.length + 1, n)
            open_runs[position + 1, place + 1] = run
        return sorted([*done, *open_runs.values()], key=lambda run: (run.start, run.passage, run.passage_start))
