"""The answer that a model's text gives, by three extractors, and how they score.

strict    what follows the last `####` on its line must be one number, with its currency or unit and nothing else.
flexible  the first of these that there is: the last \\boxed{…}; the last `####`; the last "answer is", "answer:" or "answer =". There the number
          after the line's last "=", or else the line's first number. Without any of them: the last number of the text.
last      the last number of the text.

All three read a text up to where the model goes on to ask itself another question ("Question:" or "Q:" at the start of a line). Numbers are exact
fractions (finetune/numerals.py), and answers are equal where these are.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from finetune.accuracy import Accuracy, accuracy
from finetune.numerals import find_numbers, parse_quantity, plain
from pretrain.data.problems import MARK
from pretrain.errors import UserError

Extractor = Literal["strict", "flexible", "last"]
EXTRACTORS: tuple[Extractor, ...] = ("strict", "flexible", "last")
_NEXT_QUESTION = re.compile(r"^\s*(?:\*\*)?(?:Question|Q)\s*(?:\d+\s*)?:", re.IGNORECASE | re.MULTILINE)
_PHRASE = re.compile(r"\banswer\b[^\n.\d]{0,60}?(?:\bis\b|:|=)", re.IGNORECASE)


@dataclass(frozen=True)
class Answers:
    """What each extractor found; None: no number."""

    strict: Fraction | None
    flexible: Fraction | None
    last: Fraction | None

    def __getitem__(self, extractor: Extractor) -> Fraction | None:
        return {"strict": self.strict, "flexible": self.flexible, "last": self.last}[extractor]

    @property
    def agree(self) -> bool:
        """Whether all three found the same."""
        return self.strict == self.flexible == self.last


@dataclass(frozen=True)
class Disagreement:
    """A text whose extractors differ."""

    number: int
    answers: Answers
    expected: Fraction
    text: str


@dataclass(frozen=True)
class Scores:
    """Accuracy by each extractor over the same texts; `correct` has one entry per text."""

    accuracy: dict[Extractor, Accuracy]
    correct: dict[Extractor, list[bool]]
    disagreements: list[Disagreement]
    unanswered: dict[Extractor, int]


def extract(text: str) -> Answers:
    """The answers of one text."""
    own = _NEXT_QUESTION.split(text, maxsplit=1)[0] if not _NEXT_QUESTION.match(text) else text
    numbers = find_numbers(plain(own))
    last = numbers[-1].value if numbers else None
    marked = _after_mark(own)
    flexible = _boxed(own)
    for line in (marked, _after_phrase(own)):
        if flexible is None and line is not None:
            flexible = _stated(line)
    return Answers(parse_quantity(marked) if marked is not None else None, last if flexible is None else flexible, last)


def score(texts: Sequence[str], expected: Sequence[str], *, confidence: float = 0.95) -> Scores:
    """Score one text per expected answer. UserError for an expected answer that is not a number. ValueError for unequal lengths."""
    values = []
    for number, answer in enumerate(expected):
        value = parse_quantity(answer)
        if value is None:
            raise UserError(f"the expected answer {answer!r} of problem {number} is not a number; mend the problems")
        values.append(value)
    found = [extract(text) for text in texts]
    correct = {name: [answers[name] == value for answers, value in zip(found, values, strict=True)] for name in EXTRACTORS}
    return Scores(
        accuracy={name: accuracy(sum(correct[name]), len(values), confidence=confidence) for name in EXTRACTORS},
        correct=correct,
        disagreements=[
            Disagreement(number, answers, values[number], texts[number]) for number, answers in enumerate(found) if not answers.agree
        ],
        unanswered={name: sum(answers[name] is None for answers in found) for name in EXTRACTORS},
    )


def _after_mark(text: str) -> str | None:
    """The rest of the line after the last mark."""
    before, mark, after = text.rpartition(MARK)
    return after.lstrip("#").lstrip(" \t").split("\n", 1)[0] if mark else None


def _after_phrase(text: str) -> str | None:
    """The rest of the line after the last "answer is" and the like, or the next line where nothing is left."""
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return None
    lines = [line for line in text[matches[-1].end() :].split("\n") if re.search(r"[^\s*_$:]", line)]
    return lines[0] if lines else None


def _boxed(text: str) -> Fraction | None:
    """The number in the last \\boxed{…}, braces balanced."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return _stated(text[begin:end])
    return _stated(text[begin:])  # cut off


def _stated(line: str) -> Fraction | None:
    """The number after the last "=" of a line, or else its first one."""
    line = plain(line)
    if "=" in line and (results := find_numbers("=" + line.rpartition("=")[2])):
        return results[0].value
    numbers = find_numbers(line)
    return numbers[0].value if numbers else None
