"""A prepared corpus as one long stream of tokens, and the windows that samples are cut from.

Documents, each ended by the end-of-document id, follow one another through all shards. Window k of length L starts at token k L.
No index of samples exists: a window is found by bisecting the shards' first tokens, and its documents by bisecting the .idx.
"""

import itertools
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np

from pretrain.data.files import Damaged
from pretrain.data.indexed import IndexedShard, require_ids_below
from pretrain.data.manifest import FILE_NAME, Manifest, verify
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError

OPEN_SHARDS = 200
"""Shards that a process keeps open, over all its corpora; each takes two file descriptors, and 1024 is a usual limit of a process."""
WHOLE = (0, 1)
"""The share of a process that verifies every shard by itself."""


class SourcePath(Protocol):
    """Anything that says where a corpus is (a SourceConfig)."""

    @property
    def path(self) -> str:
        """Folder of the corpus."""
        ...


class _OpenShards:
    """The shards that were read last, of whichever corpus. Safe to use from several threads."""

    def __init__(self) -> None:
        self._shards: OrderedDict[tuple[int, int], IndexedShard] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int], open_it: Callable[[], IndexedShard]) -> IndexedShard:
        """The shard called `key`, opened if it is not there."""
        with self._lock:
            shard = self._shards.pop(key, None)
        shard = shard or open_it()  # a slow file system must not hold up the other threads
        with self._lock:
            self._shards[key] = shard
            if len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)
        return shard

    def forget(self, corpus: int) -> None:
        """Close what a corpus had open."""
        with self._lock:
            for key in [key for key in self._shards if key[0] == corpus]:
                del self._shards[key]


_OPEN = _OpenShards()
_NUMBERS = itertools.count()


class Corpus:
    """Reads token ranges of a prepared folder. Safe to use from several threads."""

    def __init__(self, folder: str | Path, *, name: str | None = None) -> None:
        self.folder = Path(folder)
        self.name = name or self.folder.name
        self.manifest = Manifest.load(self.folder)
        self.tokens = self.manifest.tokens
        self._starts = [0, *accumulate(shard.tokens for shard in self.manifest.shards)]
        self._number = next(_NUMBERS)
        weakref.finalize(self, _OPEN.forget, self._number)

    def read(self, start: int, count: int, *, documents: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + count): int64 ids, and int32 document numbers counted from 0 at the first token.

        documents=False makes them zeros, and spares the search for documents, which touches a page of the .idx per halving.
        UserError names the shard if an id does not belong to the vocabulary. ValueError outside the stream.
        """
        if start < 0 or count <= 0 or start + count > self.tokens:
            raise ValueError(f"tokens [{start}, {start + count}) lie outside [0, {self.tokens})")
        pieces: list[np.ndarray] = []
        numbered: list[np.ndarray] = []
        first_document = 0
        shard_number = bisect_right(self._starts, start) - 1
        while count > 0:
            shard = self._shard(shard_number)
            offset = start - self._starts[shard_number]
            taken = min(count, shard.tokens - offset)
            if taken > 0:
                pieces.append(shard.read(offset, taken))
                require_ids_below(self.manifest.tokenizer.size, pieces[-1], shard.bin_path)
                if documents:
                    numbers = shard.document_numbers(offset, taken)
                    # a document never spans shards, so each piece starts a new one
                    numbered.append(numbers - numbers[0] + first_document)
                    first_document = int(numbered[-1][-1]) + 1
            start, count, shard_number = start + taken, count - taken, shard_number + 1
        tokens = np.concatenate(pieces)
        return tokens, np.concatenate(numbered).astype(np.int32) if documents else np.zeros(tokens.size, np.int32)

    def documents_of(self, start: int, count: int) -> list[tuple[str, int, int]]:
        """(shard file, first document, last document) of every shard that tokens [start, start + count) touch, for audits."""
        found: list[tuple[str, int, int]] = []
        shard_number = bisect_right(self._starts, start) - 1
        while count > 0:
            shard, offset = self._shard(shard_number), start - self._starts[shard_number]
            taken = min(count, shard.tokens - offset)
            if taken > 0:
                numbers = shard.document_numbers(offset, taken)
                found.append((self.manifest.shards[shard_number].file, int(numbers[0]), int(numbers[-1])))
            start, count, shard_number = start + taken, count - taken, shard_number + 1
        return found

    def unigram_entropy(self, block: int = 1 << 20) -> float:
        """Entropy of the token frequencies, in nats per token: what a model that knows only frequencies loses."""
        counts = np.zeros(self.manifest.tokenizer.size, np.int64)
        for number in range(len(self.manifest.shards)):
            shard = self._shard(number)
            for start in range(0, shard.tokens, block):
                ids = shard.read(start, block)
                require_ids_below(counts.size, ids, shard.bin_path)
                counts += np.bincount(ids, minlength=counts.size)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    def _shard(self, number: int) -> IndexedShard:
        return _OPEN.get((self._number, number), lambda: self._open_shard(number))

    def _open_shard(self, number: int) -> IndexedShard:
        record = self.manifest.shards[number]
        shard = IndexedShard(self.folder / record.file)
        if shard.tokens != record.tokens:
            problem = f"{shard.bin_path} holds {shard.tokens} tokens, but the manifest says {record.tokens}; the shard changed after preparation"
            raise Damaged(problem, self.folder)
        return shard


def open_corpora(sources: Mapping[str, SourcePath], tokenizer: Tokenizer, share: tuple[int, int] = WHOLE) -> dict[str, Corpus]:
    """Open every source of a run and verify its shards (sizes, headers, sampled blocks).

    share  (i, n): verify every n-th shard from the i-th on; processes that each take another share, and hear of each other's errors, verify all.

    UserError if there is none, one is missing, empty, changed, or was made with another tokenizer than the run's.
    """
    if not sources:
        raise UserError("no data source is configured; choose one with data=plays, or give data=custom data.train.main.path=FOLDER")
    corpora = {}
    for name, source in sources.items():
        try:
            corpora[name] = _open_corpus(name, source.path, tokenizer, share)
        except UserError as error:
            raise UserError(f"data source '{name}': {error}") from error
    return corpora


def _open_corpus(name: str, path: str, tokenizer: Tokenizer, share: tuple[int, int]) -> Corpus:
    corpus = Corpus(path, name=name)
    made_with = corpus.manifest.tokenizer
    if made_with.hash != tokenizer.hash:
        raise UserError(
            f"{path} was prepared with tokenizer {made_with.name} ({made_with.hash[:12]}), "
            f"but the run uses {tokenizer.name} ({tokenizer.hash[:12]}); set tokenizer= to that one, or prepare the text again in another folder"
        )
    for field, said, is_ in (("size", made_with.size, tokenizer.size), ("eos_id", made_with.eos_id, tokenizer.eos_id)):
        if said != is_:
            raise Damaged(f"{corpus.folder / FILE_NAME} says tokenizer.{field}={said}, and that tokenizer has {is_}", corpus.folder)
    first, step = share
    if shards := corpus.manifest.shards[first::step]:
        verify(corpus.folder, replace(corpus.manifest, shards=shards))
    return corpus
