"""Documents of prepared corpora (token shards, decoded) and of raw input files, one file at a time: what the reports on a corpus read."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.inputs import find_inputs
from data_prep.readers import Wanted, read_records, whole
from pretrain.data.indexed import IndexedShard
from pretrain.data.manifest import FILE_NAME, Manifest
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError

_BATCH_TOKENS = 1 << 20
_BATCH_DOCUMENTS = 512


@dataclass(frozen=True)
class Unit:
    """What one worker reads: a token shard (`tokenizer` is set) or a raw file.

    number  place among all units of a report.
    source  the corpus that it is from, as it was given, and CORPUS:SOURCE for a prepared one of several sources.
    path    file, or a shard's path without suffix.
    bytes   its size, for progress.
    """

    number: int
    source: str
    path: str
    bytes: int
    tokenizer: str | None
    text_key: str


@dataclass(frozen=True)
class Document:
    """One document.

    number    of a token shard: its number in it, from 0. Of a raw file: its line (row of Parquet), from 1.
    tokens    its size; words where it is raw.
    position  bytes of the unit read so far.
    ids       [T] of a token shard, the end-of-document id included.
    """

    number: int
    text: str
    tokens: int
    position: int
    ids: np.ndarray | None = None


def find_units(corpora: str | Sequence[str], *, tokenizer: str | None, text_key: str, output: Path, first: int = 0) -> list[Unit]:
    """The shards or files of every corpus, numbered from `first`. UserError where a corpus is missing, or a prepared one lacks its tokenizer."""
    units: list[Unit] = []
    for text in [corpora] if isinstance(corpora, str) else corpora:
        folder = Path(text)
        if (folder / FILE_NAME).is_file():
            manifest = Manifest.load(folder)
            _require_tokenizer(folder, manifest, tokenizer)
            several = len({shard.source for shard in manifest.shards}) > 1
            names = [f"{text}:{shard.source}" if several else text for shard in manifest.shards]
            found = [(name, str(folder / s.file), s.bin_bytes, tokenizer) for name, s in zip(names, manifest.shards, strict=True)]
        else:
            found = [(text, str(file.path), file.size, None) for file in find_inputs(text, output)]
        start = first + len(units)
        units += [Unit(start + i, name, path, size, kind, text_key) for i, (name, path, size, kind) in enumerate(found)]
    return units


def documents(unit: Unit) -> Iterator[Document | None]:
    """Every document of a unit; None for a record that cannot be read. UserError for a file that cannot be read to its end."""
    if unit.tokenizer is None:
        for record in read_records(whole(Path(unit.path)), Wanted(unit.text_key)):
            yield None if record.text is None else Document(record.line, record.text, len(record.text.split()), record.position)
        return
    shard, tokenizer = IndexedShard(Path(unit.path)), load_tokenizer(unit.tokenizer)
    start = 0
    while start < shard.documents:
        ids: list[np.ndarray] = []
        waiting = 0
        while start + len(ids) < shard.documents and waiting < _BATCH_TOKENS and len(ids) < _BATCH_DOCUMENTS:
            ids.append(document_ids(shard, start + len(ids)))
            waiting += len(ids[-1])
        texts = tokenizer.decode([one[one != tokenizer.eos_id].tolist() for one in ids])
        for offset, (one, text) in enumerate(zip(ids, texts, strict=True)):
            end = shard.document_end(start + offset)
            yield Document(start + offset, text, len(one), end * shard.dtype.itemsize, one)
        start += len(ids)


def texts_of(unit: Unit, numbers: set[int]) -> dict[int, str]:
    """The texts of some documents of a unit, by their numbers."""
    if unit.tokenizer is not None:
        shard, tokenizer = IndexedShard(Path(unit.path)), load_tokenizer(unit.tokenizer)
        ids = {number: document_ids(shard, number) for number in numbers}
        return {number: tokenizer.decode([one[one != tokenizer.eos_id].tolist()])[0] for number, one in ids.items()}
    found: dict[int, str] = {}
    for document in documents(unit):
        if document is not None and document.number in numbers:
            found[document.number] = document.text
            if len(found) == len(numbers):
                break
    return found


def document_ids(shard: IndexedShard, number: int) -> np.ndarray:
    """[T] int64: the ids of a document, its end-of-document id included."""
    begin = shard.document_end(number - 1) if number else 0
    return shard.read(begin, shard.document_end(number) - begin)


def pieces(text: str, size: int, overlap: int) -> Iterator[str]:
    """A long text in pieces of `size` characters; each begins `overlap` characters before the end of the one before, at white space if there is."""
    start = 0
    while start + size < len(text):
        end = start + size
        yield text[start:end]
        begin = text.find(" ", end - overlap, end)
        start = end - overlap if begin < 0 else begin
    yield text[start:]


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Tokenizer:
    """A tokenizer, once per process."""
    return Tokenizer(path)


def _require_tokenizer(folder: Path, manifest: Manifest, tokenizer: str | None) -> None:
    made_with = manifest.tokenizer
    if tokenizer is None:
        raise UserError(f"{folder} holds token ids, which only its tokenizer can read: add tokenizer=FILE (it was {made_with.name})")
    given = load_tokenizer(tokenizer)
    if given.hash != made_with.hash:
        raise UserError(
            f"{folder} was prepared with tokenizer {made_with.name} ({made_with.hash[:12]}), and tokenizer={tokenizer} is another one "
            f"({given.hash[:12]}); give the one that it was prepared with"
        )
