"""The problems that a model is scored on: any form of GSM8K, every answer a number, or one sentence that says which line is not."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

from finetune.accuracy import Accuracy, accuracy
from finetune.numerals import parse_quantity
from pretrain.data.gsm8k_readers import read_problems
from pretrain.data.problems import Problem, read_problem_file
from pretrain.errors import UserError

_FORMS = "GSM8K's test.jsonl or .parquet, Deng et al.'s .txt, or a file of launchers/prepare_data.py gsm8k or gsm_symbolic"


def read_evaluation_problems(path: Path, key: str = "data") -> list[Problem]:
    """Every problem of a file, whatever its form. `key`: what the command line calls the file.

    Raises UserError, naming the line, for a file that is none, and for an answer that is not a number.
    """
    problems = read_problem_file(path) if _is_problem_file(path, key) else _published(path, key)
    if not problems:
        raise UserError(f"{key}={path} holds no problem; give {_FORMS}")
    for problem in problems:
        if parse_quantity(problem.answer) is None:
            shown = f"the answer {problem.answer!r} of problem {problem.id} in {key}={path}"
            raise UserError(f"{shown} is not a number; mend the file, or leave the problem out")
    return problems


def first_problems(path: Path, count: int) -> list[Problem]:
    """The problems that are shown as shots. Raises UserError where the file has fewer."""
    problems = read_evaluation_problems(path, "shots_data")
    if len(problems) < count:
        raise UserError(f"shots={count} asks for more problems than the {len(problems)} of shots_data={path}; use shots={len(problems)}")
    return problems[:count]


def answer_number(problem: Problem) -> Fraction:
    """The number that a problem's answer is; the reader has made sure of it."""
    value = parse_quantity(problem.answer)
    assert value is not None
    return value


def majority_baseline(problems: list[Problem], counted: list[Problem], confidence: float) -> tuple[str, Accuracy]:
    """The most frequent answer of `counted` (the smallest of several), and what share of `problems` it answers."""
    counts = Counter(answer_number(problem) for problem in counted)
    most = max(counts.values())
    answer = min(value for value, count in counts.items() if count == most)
    return str(answer), accuracy(sum(answer_number(problem) == answer for problem in problems), len(problems), confidence=confidence)


def _is_problem_file(path: Path, key: str) -> bool:
    """Whether the first line has what files of problems have and the published forms have not."""
    if path.suffix in (".parquet", ".txt"):
        return False
    try:
        with path.open("rb") as stream:
            return b'"rationale"' in next((line for line in stream if line.strip()), b"")
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read ({error.strerror or error}); give a file that you may read") from error


def _published(path: Path, key: str) -> list[Problem]:
    if path.suffix not in (".jsonl", ".json", ".parquet", ".txt"):
        raise UserError(f"{key}={path} is no file of problems; give {_FORMS}")
    problems = []
    for line in read_problems(path, "augmented" if path.suffix == ".txt" else "original"):
        if line.problem is None:
            raise UserError(f"line {line.line} of {key}={path} is not a problem: {line.reason}; mend the line, or give {_FORMS}")
        problems.append(line.problem)
    return problems
