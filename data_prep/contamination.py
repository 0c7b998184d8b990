"""Which items of evaluation sets stand in a corpus, by n-grams of words (data_prep/ngrams.py says how text becomes words).

The n-grams of the evaluation sets are held in memory, in every worker; the corpus streams by, one file per worker at a time. Documents of more than a
million characters are searched in pieces that overlap by 4,096 characters, so that a run of words may be reported as two there.
"""

import json
import shutil
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config import usable_cores
from data_prep.documents import Unit, documents, find_units, pieces
from data_prep.evaluation_items import Item, read_items
from data_prep.ngrams import NgramIndex, Normalization, Passage
from data_prep.report_config import ContaminationConfig
from data_prep.report_tables import show_contamination
from data_prep.scan import Count, Result, finished_report, part_of, scan, write_report
from pretrain.data.files import atomic_writer, file_hash

HITS = "hits.jsonl"
_PIECE, _OVERLAP = 1 << 20, 4096


def report_contamination(config: ContaminationConfig) -> Result:
    """Write and show the report. UserError for what the user can mend."""
    output = Path(config.output)
    files = [config.against] if isinstance(config.against, str) else config.against
    keys = tuple(config.keys) if config.keys else None
    settings = Settings(tuple(files), keys, config.ngram, config.shortest, config.mask_numbers, config.max_hits)
    read_evaluation(settings)  # its mistakes come out before any corpus is read
    units = find_units(config.corpus, tokenizer=config.tokenizer, text_key=config.text_key, output=output)
    request = {
        "settings": {**vars(settings), "text_key": config.text_key},
        "against": {name: file_hash(Path(name)) for name in files},
        "corpus": [[unit.source, unit.path, unit.bytes] for unit in units],
    }
    report = finished_report(output, request)
    if report is None:
        results = scan(units, partial(search, settings), output, workers=config.workers or usable_cores())
        report = {"request": request, **_merged(settings, units, results, output)}
        _merge_hits(units, output)
        write_report(output, report)
    show_contamination(report, output)
    return report


@dataclass(frozen=True)
class Settings:
    """What decides the hits."""

    against: tuple[str, ...]
    keys: tuple[str, ...] | None
    ngram: int
    shortest: int
    mask_numbers: bool
    max_hits: int


@dataclass(frozen=True)
class Evaluation:
    """The items of all sets, and the index of their passages; passage p belongs to item passages[p].item."""

    items: list[Item]
    index: NgramIndex


@lru_cache(maxsize=1)
def read_evaluation(settings: Settings) -> Evaluation:
    """The sets in memory, once per process. UserError for a set that cannot be read."""
    items = [item for number, name in enumerate(settings.against) for item in read_items(Path(name), number, settings.keys)]
    norm = Normalization(settings.mask_numbers)
    passages = [Passage(item.evaluation_set, number, tuple(norm.words(text))) for number, item in enumerate(items) for text in item.texts]
    return Evaluation(items, NgramIndex(passages, settings.ngram, settings.shortest))


def search(settings: Settings, unit: Unit, part: Path, count: Count) -> Result:
    """All hits of one unit: counts here, the list of hits and the found n-grams in files beside `part`."""
    evaluation = read_evaluation(settings)
    searching = _Searching(evaluation, settings, unit)
    with atomic_writer(part.with_suffix(".hits.jsonl")) as hits:
        before = 0
        for document in documents(unit):
            if document is None:
                searching.unreadable += 1
                continue
            for hit in searching.document(document.number, document.text):
                hits.write((json.dumps(hit, ensure_ascii=False) + "\n").encode())
            count(document.position - before, 1)
            before = document.position
    count(unit.bytes - before, 0)
    with atomic_writer(part.with_suffix(".npy")) as stream:
        np.save(stream, np.packbits(searching.found))
    return searching.result()


@dataclass
class _Searching:
    evaluation: Evaluation
    settings: Settings
    unit: Unit
    documents: int = 0
    unreadable: int = 0
    touched_documents: int = 0
    words: int = 0
    hits: dict[int, int] = field(default_factory=dict)  # item -> number of hits
    longest: dict[int, int] = field(default_factory=dict)  # item -> words of its longest run

    def __post_init__(self) -> None:
        self.found = np.zeros(len(self.evaluation.index.distinct), bool)
        self._norm = Normalization(self.settings.mask_numbers)

    def document(self, number: int, text: str) -> list[Result]:
        """The hits to list of one document."""
        self.documents += 1
        listed: list[Result] = []
        touched = False
        for piece in pieces(text, _PIECE, _OVERLAP):
            words = self._norm.words(piece)
            self.words += len(words)
            for run in self.evaluation.index.runs(words):
                touched = True
                item_number = self.evaluation.index.passages[run.passage].item
                self.found[list(self.evaluation.index.ngrams_of(run))] = True
                self.hits[item_number] = self.hits.get(item_number, 0) + 1
                self.longest[item_number] = max(self.longest.get(item_number, 0), run.length)
                if self.hits[item_number] <= self.settings.max_hits:
                    listed.append(self._hit(self.evaluation.items[item_number], number, run.length, words[run.start : run.start + run.length]))
        self.touched_documents += touched
        return listed

    def _hit(self, item: Item, document: int, length: int, words: list[str]) -> Result:
        where = {"source": self.unit.source, "file": self.unit.path, "document": document}
        return {"set": self.settings.against[item.evaluation_set], "item": item.name, **where, "words": length, "text": " ".join(words)}

    def result(self) -> Result:
        """The counts."""
        counts = {"documents": self.documents, "unreadable": self.unreadable, "touched_documents": self.touched_documents, "words": self.words}
        return {**counts, "hits": {str(item): n for item, n in self.hits.items()}, "longest": {str(item): n for item, n in self.longest.items()}}


def _merged(settings: Settings, units: list[Unit], results: list[Result], output: Path) -> Result:
    """The report of all units together."""
    evaluation = read_evaluation(settings)
    found = np.zeros(len(evaluation.index.distinct), bool)
    hits, longest = np.zeros(len(evaluation.items), np.int64), np.zeros(len(evaluation.items), np.int64)
    sources: dict[str, Result] = {}
    for unit, result in zip(units, results, strict=True):
        found |= np.unpackbits(np.load(part_of(output, unit).with_suffix(".npy")), count=len(found)).astype(bool)
        source = sources.setdefault(unit.source, {"documents": 0, "unreadable": 0, "touched_documents": 0, "words": 0, "items": set()})
        for key in ("documents", "unreadable", "touched_documents", "words"):
            source[key] += result[key]
        for item, number in result["hits"].items():
            hits[int(item)] += number
            source["items"].add(int(item))
        for item, length in result["longest"].items():
            longest[int(item)] = max(longest[int(item)], length)
    sets = [_set_report(number, name, evaluation, found, hits, longest) for number, name in enumerate(settings.against)]
    return {"sets": sets, "sources": {name: {**source, "items": len(source["items"])} for name, source in sources.items()}}


def _set_report(number: int, name: str, evaluation: Evaluation, found: np.ndarray, hits: np.ndarray, longest: np.ndarray) -> Result:
    index = evaluation.index
    totals, seen = np.zeros(len(evaluation.items), np.int64), np.zeros(len(evaluation.items), np.int64)
    short = 0
    for p, passage in enumerate(index.passages):
        if passage.evaluation_set == number:
            places = slice(int(index.first_ngram[p]), int(index.first_ngram[p + 1]))
            totals[passage.item] += int(index.distinct[places].sum())
            seen[passage.item] += int((index.distinct[places] & found[places]).sum())
            short += index.lengths[p] == 0
    own = [i for i, item in enumerate(evaluation.items) if item.evaluation_set == number]
    items: list[dict[str, Any]] = [
        {"item": evaluation.items[i].name, "share": float(seen[i] / totals[i]), "longest_run": int(longest[i]), "hits": int(hits[i])}
        for i in own
        if seen[i]
    ]
    return {
        "set": name,
        "items": len(own),
        "items_not_searched": int((totals[own] == 0).sum()),
        "texts_too_short": int(short),
        "items_touched": len(items),
        "items_half_found": sum(item["share"] >= 0.5 for item in items),
        "ngrams": int(totals[own].sum()),
        "ngrams_found": int(seen[own].sum()),
        "longest_run": max((item["longest_run"] for item in items), default=0),
        "touched": sorted(items, key=lambda item: (-item["share"], item["item"])),
    }


def _merge_hits(units: list[Unit], output: Path) -> None:
    with atomic_writer(output / HITS) as merged:
        for unit in units:
            with part_of(output, unit).with_suffix(".hits.jsonl").open("rb") as part:
                shutil.copyfileobj(part, merged)
