"""Groups of equal or similar documents, counted: how much of a corpus is redundant, across which sources, and what leaks into held-out text."""

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

MEMBERS_SHOWN = 5


@dataclass(frozen=True)
class Collection:
    """All documents of a report, unit after unit.

    sources     names; the last `against` of them are held-out corpora.
    source_U    source of each unit.
    first_U     [U + 1] number of each unit's first document among all.
    tokens_D    tokens of each document.
    numbers_D   number of each document within its unit.
    """

    sources: list[str]
    against: int
    source_U: np.ndarray
    first_U: np.ndarray
    tokens_D: np.ndarray
    numbers_D: np.ndarray

    @property
    def source_D(self) -> np.ndarray:
        """Source of each document."""
        return np.repeat(self.source_U, np.diff(self.first_U))

    def unit_of(self, document: int) -> int:
        """Unit that a document is from."""
        return int(np.searchsorted(self.first_U, document, side="right")) - 1


@dataclass
class Groups:
    """Counts over groups; `add` each once. A corpus document is redundant if an earlier one of its group is in the corpus too."""

    collection: Collection
    keep: int
    groups: int = 0
    redundant: Counter[int] = field(default_factory=Counter)
    redundant_tokens: Counter[int] = field(default_factory=Counter)
    leaked: Counter[int] = field(default_factory=Counter)
    leaked_tokens: Counter[int] = field(default_factory=Counter)
    across: Counter[tuple[int, int]] = field(default_factory=Counter)
    largest: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._source_D = self.collection.source_D
        self._trained = len(self.collection.sources) - self.collection.against

    def add(self, documents: np.ndarray) -> None:
        """One group: two or more numbers of documents among all, in their order."""
        sources = self._source_D[documents]
        own = sources < self._trained
        if not own.any():
            return  # duplicates within held-out text alone
        self.groups += 1
        for document, source in zip(documents[own][1:].tolist(), sources[own][1:].tolist(), strict=True):
            self.redundant[source] += 1
            self.redundant_tokens[source] += int(self.collection.tokens_D[document])
        for document, source in zip(documents[~own].tolist(), sources[~own].tolist(), strict=True):
            self.leaked[source] += 1
            self.leaked_tokens[source] += int(self.collection.tokens_D[document])
        for pair in combinations(sorted(set(sources.tolist())), 2):
            self.across[pair] += 1
        if self.keep:
            entry = (len(documents), -int(documents[0]), tuple(documents[:MEMBERS_SHOWN].tolist()))
            if len(self.largest) < self.keep:
                heapq.heappush(self.largest, entry)
            else:
                heapq.heappushpop(self.largest, entry)

    def add_sorted(self, labels: np.ndarray, documents: np.ndarray) -> None:
        """All groups of documents with equal labels ([N] or [N, K], sorted); a label that stands alone is no group."""
        if len(documents) == 0:
            return
        rows = labels.reshape(len(documents), -1)
        new = np.concatenate(([True], (rows[1:] != rows[:-1]).any(axis=1)))
        starts = np.flatnonzero(new)
        sizes = np.diff(np.append(starts, len(documents)))
        for start, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
            self.add(np.sort(documents[start : start + size]))

    def report(self) -> dict[str, Any]:
        """The counts with names and shares."""
        names, collection = self.collection.sources, self.collection
        documents = np.bincount(self._source_D, minlength=len(names))
        tokens = np.bincount(self._source_D, weights=collection.tokens_D, minlength=len(names)).astype(np.int64)
        trained, held_out = range(self._trained), range(self._trained, len(names))
        return {
            "groups": self.groups,
            "redundant_documents": self.redundant.total(),
            "redundant_tokens": self.redundant_tokens.total(),
            "share_of_documents": self.redundant.total() / max(int(documents[: self._trained].sum()), 1),
            "share_of_tokens": self.redundant_tokens.total() / max(int(tokens[: self._trained].sum()), 1),
            "sources": {names[s]: _share(documents[s], tokens[s], self.redundant[s], self.redundant_tokens[s]) for s in trained},
            "leaked": {names[s]: _share(documents[s], tokens[s], self.leaked[s], self.leaked_tokens[s]) for s in held_out},
            "across_sources": [{"sources": [names[a], names[b]], "groups": count} for (a, b), count in self.across.most_common()],
        }

    def shown(self) -> list[tuple[int, tuple[int, ...]]]:
        """(size, first documents) of the largest groups, largest first."""
        return [(size, members) for size, _, members in sorted(self.largest, reverse=True)]


def _share(documents: np.integer, tokens: np.integer, found: int, found_tokens: int) -> dict[str, Any]:
    counts = {"documents": int(documents), "tokens": int(tokens), "found_documents": found, "found_tokens": found_tokens}
    return {**counts, "share_of_documents": found / max(int(documents), 1), "share_of_tokens": found_tokens / max(int(tokens), 1)}
