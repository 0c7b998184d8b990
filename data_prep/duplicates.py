"""Documents that a corpus holds more than once, exactly and nearly, and held-out documents that it holds too.

Each file is read once: its documents' hashes, sizes and MinHash signatures go to disk. Exact groups come from sorting the hashes, a part of
their range at a time; near ones from datatrove's buckets and clusters (data_prep/minhash.py), where an exact duplicate is a near one too.
Memory: 24 bytes per document, 100 bytes per near duplicate, and the largest document.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest

from data_prep.config import usable_cores
from data_prep.documents import Document, Unit, documents, find_units, texts_of
from data_prep.duplicate_groups import Collection, Groups
from data_prep.minhash import MinHash, find_clusters, similarity, write_signatures
from data_prep.ngrams import Normalization
from data_prep.progress import say
from data_prep.report_config import DuplicatesConfig
from data_prep.report_tables import show_duplicates
from data_prep.scan import PARTS, Count, Result, finished_report, part_of, scan, write_report
from pretrain.data.files import atomic_writer
from pretrain.errors import UserError

_SORTED_AT_ONCE = 1 << 24
_EXCERPT = 160


@dataclass(frozen=True)
class Settings:
    """What decides the groups."""

    exact: str
    mask_numbers: bool
    method: MinHash | None


def report_duplicates(config: DuplicatesConfig) -> Result:
    """Write and show the report. UserError for what the user can mend."""
    output, workers = Path(config.output), config.workers or usable_cores()
    find = partial(find_units, tokenizer=config.tokenizer, text_key=config.text_key, output=output)
    own = find(config.corpus)
    held_out = find(config.against, first=len(own)) if config.against is not None else []
    units = own + held_out
    _require_units(config, own, held_out)
    method = MinHash(config.ngram, config.buckets, config.hashes, config.seed) if config.near else None
    settings = Settings(config.exact, config.mask_numbers, method)
    request = {
        "settings": {**vars(settings), "method": vars(method) if method else None, "text_key": config.text_key, "examples": config.examples},
        "corpus": [[unit.source, unit.path, unit.bytes] for unit in own],
        "against": [[unit.source, unit.path, unit.bytes] for unit in held_out],
    }
    report = finished_report(output, request)
    if report is None:
        results = scan(units, partial(describe, settings, output), output, workers=workers)
        report = {"request": request, **_report(config, settings, units, len(held_out), results, output, workers)}
        write_report(output, report)
    show_duplicates(report, output)
    return report


def describe(settings: Settings, output: Path, unit: Unit, part: Path, count: Count) -> Result:
    """One unit: hash, size and number of every document beside `part`, and its signatures."""
    reading = _Reading(settings, unit, count)
    if settings.method is None:
        for _ in reading:
            pass
    else:
        write_signatures(settings.method, output / PARTS, unit.number, iter(reading))
    with atomic_writer(part.with_suffix(".npz")) as stream:
        hashes = np.frombuffer(b"".join(reading.hashes), "<u8").reshape(-1, 2)
        np.savez(stream, hashes=hashes, tokens=np.asarray(reading.tokens, np.int64), numbers=np.asarray(reading.numbers, np.int64))
    return {"documents": len(reading.tokens), "unreadable": reading.unreadable, "too_short": reading.too_short}


@dataclass
class _Reading:
    """Goes through a unit's documents, keeps their hashes and sizes, and hands on their normalised texts."""

    settings: Settings
    unit: Unit
    count: Count
    hashes: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    unreadable: int = 0
    too_short: int = 0

    def __iter__(self) -> Iterator[str]:
        norm, before = Normalization(self.settings.mask_numbers), 0
        for document in documents(self.unit):
            if document is None:
                self.unreadable += 1
                continue
            text = norm.text(document.text)
            self.hashes.append(self._hash(document, text))
            self.tokens.append(document.tokens)
            self.numbers.append(document.number)
            if self.settings.method is not None and text.count(" ") + 1 < self.settings.method.ngram:
                self.too_short += 1
            self.count(document.position - before, 1)
            before = document.position
            yield text

    def _hash(self, document: Document, text: str) -> bytes:
        if self.settings.exact == "token_ids" and document.ids is not None:
            return xxh3_128_digest(document.ids.tobytes())
        return xxh3_128_digest(text.encode())


def _require_units(config: DuplicatesConfig, own: list[Unit], held_out: list[Unit]) -> None:
    if config.exact == "token_ids" and any(unit.tokenizer is None for unit in own + held_out):
        raise UserError("exact=token_ids compares prepared corpora, and raw text is among them; use exact=normalized_text")
    shared = {unit.path for unit in own} & {unit.path for unit in held_out}
    if shared:
        raise UserError(f"{sorted(shared)[0]} is both in corpus and in against; name it in one of them")


def _report(
    config: DuplicatesConfig, settings: Settings, units: list[Unit], held_out: int, results: list[Result], output: Path, workers: int
) -> Result:
    collection, hashes_D2 = _collect(units, held_out, output)
    exact = Groups(collection, config.examples)
    _exact_groups(exact, hashes_D2)
    norm = Normalization(settings.mask_numbers)
    report: Result = {
        "documents": sum(result["documents"] for result in results),
        "unreadable": sum(result["unreadable"] for result in results),
        "exact": {**exact.report(), "largest": _examples(exact, units, norm, None)},
    }
    if settings.method is not None:
        say("reading done; comparing signatures")
        near = Groups(collection, config.examples)
        for folder in ("pairs", "clusters"):
            shutil.rmtree(output / PARTS / folder, ignore_errors=True)  # of a comparison that was cut off
        members = find_clusters(settings.method, output / PARTS, workers)
        near.add_sorted(members[:, 2], collection.first_U[members[:, 0]] + members[:, 1])
        report["near"] = {
            **near.report(),
            "similarity_at_which_half_is_found": settings.method.half,
            "too_short_for_a_shingle": sum(result["too_short"] for result in results),
            "largest": _examples(near, units, norm, settings.method),
        }
    return report


def _collect(units: list[Unit], held_out: int, output: Path) -> tuple[Collection, np.ndarray]:
    """All documents, and their hashes [D, 2] in a file that is mapped, not read."""
    parts = [np.load(part_of(output, unit).with_suffix(".npz")) for unit in units]
    first_U = np.concatenate(([0], np.cumsum([len(part["tokens"]) for part in parts], dtype=np.int64)))
    with atomic_writer(output / PARTS / "hashes.bin") as stream:
        for part in parts:
            stream.write(np.ascontiguousarray(part["hashes"]).tobytes())
    total = int(first_U[-1])
    if not total:
        raise UserError("the corpus holds no readable document; give files with text")
    hashes_D2 = np.memmap(output / PARTS / "hashes.bin", "<u8", "r", shape=(total, 2))
    own, others = units[: len(units) - held_out], units[len(units) - held_out :]
    names = list(dict.fromkeys(unit.source for unit in own)) + [f"{name} (against)" for name in dict.fromkeys(unit.source for unit in others)]
    places = [names.index(unit.source) for unit in own] + [names.index(f"{unit.source} (against)") for unit in others]
    against = len({unit.source for unit in others})
    tokens, numbers = (np.concatenate([part[key] for part in parts]) for key in ("tokens", "numbers"))
    return Collection(names, against, np.asarray(places, np.int64), first_U, tokens, numbers), hashes_D2


def _exact_groups(groups: Groups, hashes_D2: np.ndarray) -> None:
    """Sort by hash, a part of the range of hashes at a time."""
    parts = -(-len(hashes_D2) // _SORTED_AT_ONCE)
    for part in range(parts):
        chosen = np.flatnonzero(hashes_D2[:, 0] % parts == part) if parts > 1 else np.arange(len(hashes_D2))
        rows = hashes_D2[chosen]
        order = np.lexsort((chosen, rows[:, 1], rows[:, 0]))
        groups.add_sorted(rows[order], chosen[order])


def _examples(groups: Groups, units: list[Unit], norm: Normalization, method: MinHash | None) -> list[Result]:
    """The largest groups with their first members; of near ones, the similarity of the first two."""
    shown = groups.shown()
    collection = groups.collection
    wanted: dict[int, set[int]] = {}
    for _, members in shown:
        for document in members[:2]:
            wanted.setdefault(collection.unit_of(document), set()).add(int(collection.numbers_D[document]))
    texts = {unit: texts_of(units[unit], numbers) for unit, numbers in wanted.items()}
    examples = []
    for size, members in shown:
        first, second = (norm.text(texts[collection.unit_of(document)][int(collection.numbers_D[document])]) for document in members[:2])
        places = [{"file": units[collection.unit_of(document)].path, "document": int(collection.numbers_D[document])} for document in members]
        example: Result = {"documents": size, "members": places, "text": first[:_EXCERPT]}
        if method is not None:
            example |= {"similarity_of_the_first_two": similarity(method, first, second), "text_of_the_second": second[:_EXCERPT]}
        examples.append(example)
    return examples
