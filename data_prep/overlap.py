"""Held-out problems that training problems contain: by the whole question, or by the n-grams of a question."""

from collections.abc import Sequence
from dataclasses import dataclass

from data_prep.ngrams import NgramIndex, Normalization, Passage
from pretrain.data.problems import Problem

NEAR_SHARE = 0.5
"""Share of a held-out question's n-grams, in one training problem, from which on the question counts as contained."""
_SHORTEST = 5


@dataclass(frozen=True)
class Overlap:
    """One contained held-out problem and the training problem that covers most of it; `share` is 1 where the questions are equal."""

    held_out: str
    training: str
    share: float
    exact: bool


def find_overlaps(training: Sequence[Problem], held_out: Sequence[Problem], ngram: int) -> list[Overlap]:
    """Every contained held-out problem, once. Questions are compared after normalisation (data_prep/ngrams.py), numbers as they are."""
    norm = Normalization()
    words = [tuple(norm.words(problem.question)) for problem in held_out]
    equal: dict[tuple[str, ...], list[int]] = {}
    for number, question in enumerate(words):
        equal.setdefault(question, []).append(number)
    index = NgramIndex([Passage(0, number, question) for number, question in enumerate(words)], ngram, _SHORTEST)
    totals = [int(index.distinct[index.first_ngram[i] : index.first_ngram[i + 1]].sum()) for i in range(len(words))]
    best: dict[int, Overlap] = {}
    for problem in training:
        for number in equal.get(tuple(norm.words(problem.question)), ()):
            if number not in best or not best[number].exact:
                best[number] = Overlap(held_out[number].id, problem.id, 1.0, True)
        for number, share in _shares(index, norm.words(f"{problem.question}\n{problem.rationale}"), totals).items():
            if share >= NEAR_SHARE and (number not in best or share > best[number].share):
                best[number] = Overlap(held_out[number].id, problem.id, share, False)
    return [best[number] for number in sorted(best)]


def _shares(index: NgramIndex, words: list[str], totals: list[int]) -> dict[int, float]:
    """Held-out problem -> share of its distinct n-grams among these words."""
    covered: dict[int, set[int]] = {}
    for run in index.runs(words):
        covered.setdefault(run.passage, set()).update(place for place in index.ngrams_of(run) if index.distinct[place])
    return {number: len(places) / totals[number] for number, places in covered.items()}
