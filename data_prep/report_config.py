"""What the tasks `contamination` and `duplicates` of launchers/prepare_data.py take. Values are checked when one is made. No torch here."""

from dataclasses import dataclass
from typing import Literal

from data_prep.config import require_paths, require_range
from pretrain.errors import UserError


def _require_workers(workers: int | None) -> None:
    require_range("workers", workers, 1, 4096, "leave it out for one per core")


@dataclass(frozen=True, kw_only=True)
class ContaminationConfig:
    """Which evaluation items stand in a corpus: report.json and hits.jsonl in the folder `output`, and a table.

    corpus        prepared folders, or raw input files or folders (data_prep/inputs.py).
    against       evaluation files, JSON lines or Parquet; GSM8K as it is published needs no further setting.
    output        folder to write; the same command continues what was cut off.
    tokenizer     the tokenizer of prepared corpora; null for raw text.
    keys          dotted keys of an item whose texts are looked for, each on its own; null: question, rationale and answer, where there are.
    text_key      key or column of raw text.
    ngram         words of an n-gram. An item's text of fewer words counts as one n-gram of its own length,
    shortest      unless it has fewer words than this: then it is not looked for, and counted.
    mask_numbers  compare with every number replaced by 0: finds problems whose numbers were changed.
    max_hits      hits listed per item and file of the corpus; all are counted.
    workers       processes; null: one per core that this process may use.
    """

    corpus: str | list[str]
    against: str | list[str]
    output: str
    tokenizer: str | None = None
    keys: list[str] | None = None
    text_key: str = "text"
    ngram: int = 13
    shortest: int = 8
    mask_numbers: bool = False
    max_hits: int = 5
    workers: int | None = None

    def __post_init__(self) -> None:
        require_paths(corpus=self.corpus, against=self.against, output=self.output)
        require_range("ngram", self.ngram, 2, 100, "use for example 13")
        require_range("shortest", self.shortest, 1, 100, "use for example 8")
        require_range("max_hits", self.max_hits, 0, None, "use for example 5")
        _require_workers(self.workers)
        if self.shortest > self.ngram:
            raise UserError(f"shortest={self.shortest} must not exceed ngram={self.ngram}; use for example shortest={min(8, self.ngram)}")
        if self.keys == []:
            raise UserError("keys is an empty list; name the keys that hold an item's text, or leave it out")


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """Documents that a corpus holds more than once: report.json in the folder `output`, and a table.

    corpus        prepared folders, or raw input files or folders; each is a source of the report.
    against       further corpora, for example validation text: the report says which of their documents the corpus holds too. null: none.
    output        folder to write; the same command continues what was cut off.
    tokenizer     the tokenizer of prepared corpora; null for raw text.
    text_key      key or column of raw text.
    exact         what makes two documents equal: normalized_text (data_prep/ngrams.py), or token_ids (prepared corpora of one tokenizer).
    near          whether near duplicates are looked for (MinHash LSH, Broder 1997; the stages of datatrove).
    ngram         words of a shingle. Similarity is the Jaccard index of two documents' sets of shingles.
    buckets       b: bands of the signature. A pair of similarity s is found with probability 1 - (1 - s^r)^b,
    hashes        r: hashes per band. With 14 and 8 half of the pairs are found at 0.68.
    mask_numbers  compare with every number replaced by 0.
    seed          of the hash functions.
    examples      clusters that the report shows.
    workers       processes; null: one per core that this process may use.
    """

    corpus: str | list[str]
    output: str
    against: str | list[str] | None = None
    tokenizer: str | None = None
    text_key: str = "text"
    exact: Literal["normalized_text", "token_ids"] = "normalized_text"
    near: bool = True
    ngram: int = 5
    buckets: int = 14
    hashes: int = 8
    mask_numbers: bool = False
    seed: int = 1
    examples: int = 10
    workers: int | None = None

    def __post_init__(self) -> None:
        require_paths(corpus=self.corpus, output=self.output)
        if self.against is not None:
            require_paths(against=self.against)
        require_range("ngram", self.ngram, 1, 100, "use for example 5")
        require_range("buckets", self.buckets, 1, 1000, "use for example 14")
        require_range("hashes", self.hashes, 1, 100, "use for example 8")
        require_range("seed", self.seed, 0, 2**32 - 1, "use for example 1")
        require_range("examples", self.examples, 0, 1000, "use for example 10")
        _require_workers(self.workers)
