"""What the tasks `gsm8k` and `gsm_symbolic` of launchers/prepare_data.py take. Values are checked when one is made. No torch here."""

from dataclasses import dataclass
from typing import Literal

from data_prep.config import require_paths, require_range
from pretrain.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Gsm8kConfig:
    """Published GSM8K data as one file of problems (pretrain/data/problems.py), and what was found on the way in OUTPUT.report.json.

    input             files to read, in this order.
    kind              original: JSON lines or Parquet with `question` and `answer`; augmented: lines `question||solution #### answer` (Deng et al.).
    output            file of problems to write, NAME.jsonl; bad lines are listed in NAME.jsonl.quarantine.jsonl with file, line and reason.
    max_bad_fraction  share of bad lines above which nothing is written.
    against           held-out problems: files of problems or original GSM8K files; null: no check of overlap.
    max_overlap       share of the held-out problems that the input may contain, above which nothing is written. A held-out problem is contained where
                      its normalised question is one of the input's, or at least half of its question's n-grams stand in one problem of the input.
    ngram             words of an n-gram of that check.
    """

    input: str | list[str]
    output: str
    kind: Literal["original", "augmented"] = "original"
    max_bad_fraction: float = 0.001
    against: str | list[str] | None = None
    max_overlap: float = 0.01
    ngram: int = 13

    def __post_init__(self) -> None:
        require_paths(input=self.input, output=self.output)
        if self.against is not None:
            require_paths(against=self.against)
        require_range("max_bad_fraction", self.max_bad_fraction, 0, 1, "use for example 0.001")
        require_range("max_overlap", self.max_overlap, 0, 1, "use for example 0.01")
        require_range("ngram", self.ngram, 2, 100, "use for example 13")
        if not self.output.endswith(".jsonl"):
            raise UserError(f"output={self.output} must end in .jsonl, for example {self.output}.jsonl")


@dataclass(frozen=True, kw_only=True)
class GsmSymbolicConfig:
    """GSM8K-style problems from the templates of the PyPI package reasoning-gym: train.jsonl, test.jsonl (problems) and text.jsonl to pretrain on.

    output      folder to write.
    count       problems to train on.
    test_count  held-out problems: other instances of the same templates; no question of theirs is in train.jsonl or text.jsonl.
    text_count  further problems as plain text, one per line under the key `text`; 0: no text.jsonl.
    templates   template numbers (0 to 99, without 15 that the package's authors mark as broken); null: all, or the first `easiest`.
    easiest     use only so many templates, those with the fewest reasoning steps; null: all.
    difficulty  1 is GSM8K's; larger widens the range of the numbers where a template allows it.
    seed        another seed gives other problems.
    """

    output: str
    count: int = 2000
    test_count: int = 200
    text_count: int = 0
    templates: list[int] | None = None
    easiest: int | None = None
    difficulty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_paths(output=self.output)
        require_range("count", self.count, 1, 10_000_000, "use for example 2000")
        require_range("test_count", self.test_count, 0, 1_000_000, "use for example 200")
        require_range("text_count", self.text_count, 0, 10_000_000, "use for example 2000, or leave it out")
        require_range("easiest", self.easiest, 1, 100, "use for example 10")
        require_range("difficulty", self.difficulty, 1, 10, "use 1 for the numbers of GSM8K")
        require_range("seed", self.seed, 0, None, "use for example 0")
        if self.templates is not None and (not self.templates or len(set(self.templates)) < len(self.templates)):
            raise UserError(f"templates={self.templates} must name at least one template, and each once; leave it out for all")
        if self.templates is not None and self.easiest is not None:
            raise UserError(f"templates and easiest={self.easiest} both choose templates; give one of them")
