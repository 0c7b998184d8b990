"""What the records of an evaluation come to: scores with their intervals, the baseline beside them, and how outputs ended."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from finetune.accuracy import Accuracy, accuracy
from finetune.answers import EXTRACTORS, Extractor
from finetune.gsm8k_samples import Record
from pretrain.data.files import atomic_writer

DISAGREEMENTS = "disagreements.jsonl"
_SHOWN, _WIDTH = 3, 160


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Giving one answer to every problem: the most frequent one of the problems in `source`."""

    answer: str
    source: str
    accuracy: Accuracy


@dataclass(frozen=True, kw_only=True)
class Report:
    """Counts are of problems unless they say otherwise; every problem counts in every score, whatever became of its output.

    too_long     prompts without room in the context: counted as wrong.
    truncated    asked, and no EOS when the context was full.
    flooded      EOS at once: an empty output.
    masked       outputs in which masks were left.
    unanswered   where an extractor found no number.
    disagreeing  where the extractors differ.
    """

    accuracy: dict[Extractor, Accuracy]
    baseline: Baseline
    too_long: int
    truncated: int
    flooded: int
    masked: int
    unanswered: dict[Extractor, int]
    disagreeing: int
    tokens: int
    evaluations: int
    seconds: float

    @property
    def problems(self) -> int:
        """How many were scored."""
        return self.accuracy["strict"].total

    def lines(self) -> list[str]:
        """For a person."""
        answered = self.problems - self.too_long
        rates = [("no EOS", self.truncated), ("masks left", self.masked), ("EOS at once", self.flooded)]
        ends = ", ".join(f"{what} {_percent(count, answered)}" for what, count in rates)
        numbers = ", ".join(f"{name} {self.unanswered[name]}" for name in EXTRACTORS)
        return [
            *(f"{name:9}{self.accuracy[name]}" for name in EXTRACTORS),
            f"baseline {self.baseline.accuracy}: always {self.baseline.answer}, the most frequent answer of {self.baseline.source}",
            f"outputs: {ends}; prompts that do not fit the context (counted as wrong): {self.too_long}",
            f"without a number: {numbers}; extractors disagree on {self.disagreeing}",
        ]


def report(records: Sequence[Record], baseline: Baseline, confidence: float) -> Report:
    """ValueError without records."""
    asked = [record for record in records if record.fits]
    return Report(
        accuracy={name: accuracy(sum(record.correct[name] for record in records), len(records), confidence=confidence) for name in EXTRACTORS},
        baseline=baseline,
        too_long=len(records) - len(asked),
        truncated=sum(not record.ended for record in asked),
        flooded=sum(record.ended and record.tokens == 1 for record in asked),
        masked=sum(record.masked > 0 for record in asked),
        unanswered={name: sum(record.answer(name) is None for record in records) for name in EXTRACTORS},
        disagreeing=sum(not record.agree for record in records),
        tokens=sum(record.tokens for record in asked),
        evaluations=sum(record.nfe for record in asked),
        seconds=sum(record.seconds for record in asked),
    )


def write_disagreements(folder: Path, records: Sequence[Record]) -> list[str]:
    """All of them into a file; the first few as lines for a person."""
    found = [record for record in records if not record.agree]
    keys = ("item", "id", "gold", "answers", "correct", "output")
    with atomic_writer(folder / DISAGREEMENTS) as stream:
        for record in found:
            stream.write((json.dumps({key: asdict(record)[key] for key in keys}, ensure_ascii=False) + "\n").encode())
    return [_shown(record) for record in found[:_SHOWN]]


def _shown(record: Record) -> str:
    answers = ", ".join(f"{name} {record.answers[name] or 'none'}" for name in EXTRACTORS)
    text = " ".join(record.output.split())
    end = text if len(text) <= _WIDTH else f"…{text[-_WIDTH:]}"
    return f"  {record.id}: {answers}; right is {record.gold}; output {end!r}"


def _percent(count: int, total: int) -> str:
    return f"{100 * count / total:.1f}% ({count})" if total else f"{count}"
