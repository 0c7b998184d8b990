"""Word problems with worked answers, one JSON object per line: what the GSM8K readers and generators write, and fine-tuning reads."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from pretrain.data.records import Malformed, parse, typed_record
from pretrain.errors import UserError

MARK = "####"
"""What GSM8K writes before a final answer."""
_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?%?")
_RATIO = re.compile(r"(-?\d+)/(\d+)")
_MOST_DIGITS = 400


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem.

    id         unique within its file.
    source     the data set or file that it is from.
    question   its text.
    rationale  the worked answer without the final line; calculator annotations `<<48/2=24>>` are kept. May be empty.
    answer     the final answer as its source writes it, a number.
    template   of generated problems: which template it is an instance of.
    """

    id: str
    source: str
    question: str
    rationale: str
    answer: str
    template: int | None = None


def answer_value(answer: str) -> Fraction | None:
    """The number that a data set's answer writes: sign, dollar, thousands commas, decimals, per cent sign (a unit), or a ratio a/b.

    None for anything else.
    """
    text = answer.strip()
    if len(text) > _MOST_DIGITS:
        return None
    if ratio := _RATIO.fullmatch(text):
        return Fraction(int(ratio[1]), int(ratio[2])) if int(ratio[2]) else None
    if not _NUMBER.fullmatch(text) or not any(character.isascii() and character.isdigit() for character in text):
        return None
    return Fraction(re.sub(r"[$,%]", "", text))


def problem_lines(problems: Iterable[Problem]) -> bytes:
    """A file of problems."""
    return b"".join((json.dumps(asdict(problem), ensure_ascii=False) + "\n").encode() for problem in problems)


def read_problem_file(path: Path) -> list[Problem]:
    """A file of problems back. UserError, naming the line, for anything else."""
    problems = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if line.strip():
                problems.append(_problem(path, number, line))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give a file of problems that you may read") from error
    return problems


def _problem(path: Path, number: int, line: bytes) -> Problem:
    try:
        return typed_record(Problem, parse(line))
    except Malformed as error:
        raise UserError(
            f"line {number} of {path} {error}; give a file that launchers/prepare_data.py gsm8k or gsm_symbolic wrote (make one with: "
            f"python launchers/prepare_data.py gsm8k input={path} output=problems.jsonl)"
        ) from error
