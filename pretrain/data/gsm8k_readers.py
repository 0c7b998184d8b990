"""The two published forms of GSM8K training data, line by line, bad lines with their reason.

original   Cobbe et al. 2021: JSON lines (or Parquet rows) with `question` and `answer`; the answer is a worked solution with calculator annotations
           <<48/2=24>>, and a last line `#### 72`.
augmented  Deng et al. 2023 ("Implicit Chain of Thought Reasoning via Knowledge Distillation"): lines `question||<<48/2=24>> <<24+48=72>> #### 72`.

A byte-order mark and blank lines are passed over. Of a key that a JSON object repeats, the last value counts, as in Python's json.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pretrain.data.problems import MARK, Problem, answer_value
from pretrain.errors import UserError

Kind = Literal["original", "augmented"]
_SEPARATOR = "||"
_SUFFIXES = {"original": (".jsonl", ".json", ".parquet"), "augmented": (".txt", ".jsonl")}


class BadLine(Exception):
    """Why a line is not a problem."""


@dataclass(frozen=True)
class Line:
    """One line of an input: a problem, or (problem is None) why it is none."""

    file: str
    line: int
    problem: Problem | None
    reason: str = ""


def read_problems(path: Path, kind: Kind) -> Iterator[Line]:
    """Every non-empty line of a file, counted from 1. UserError for a file that cannot be read or is of another kind."""
    if not path.name.endswith(_SUFFIXES[kind]):
        endings = " or ".join(_SUFFIXES[kind])
        raise UserError(f"input {path} is not a file of the kind {kind}, which ends in {endings}; unpack it, or name another kind=")
    parser: Callable[[bytes], tuple[str, str, str]] = _augmented if kind == "augmented" else _original
    try:
        lines = parquet_rows(path) if path.suffix == ".parquet" else file_lines(path)
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                yield _line(path, number, content, parser)
    except OSError as error:
        raise UserError(f"input {path} cannot be read ({error.strerror or error}); give a file that you may read") from error


def _line(path: Path, number: int, content: bytes, parser: Callable[[bytes], tuple[str, str, str]]) -> Line:
    try:
        question, rationale, answer = parser(content)
        _require_characters(question, rationale)
    except BadLine as bad:
        return Line(str(path), number, None, str(bad))
    problem = Problem(id=f"{path.stem}-{number}", source=path.stem, question=question, rationale=rationale, answer=answer)
    return Line(str(path), number, problem)


def _original(line: bytes) -> tuple[str, str, str]:
    try:
        value = json.loads(_text(line))
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadLine(f"a JSON {type(value).__name__}, where an object with the keys 'question' and 'answer' is needed")
    for key in ("question", "answer"):
        if key not in value:
            raise BadLine(f"no key {key!r}; it has {', '.join(map(repr, list(value)[:8])) or 'none'}")
        if not isinstance(value[key], str):
            raise BadLine(f"{key!r} is {'null' if value[key] is None else f'a {type(value[key]).__name__}'}, not a string")
    return _checked(value["question"], value["answer"])


def _augmented(line: bytes) -> tuple[str, str, str]:
    text = _text(line)
    if text.count(_SEPARATOR) != 1:
        raise BadLine(f"{text.count(_SEPARATOR)} times {_SEPARATOR!r}, where one must stand between question and solution")
    return _checked(*text.split(_SEPARATOR))


def _checked(question: str, solution: str) -> tuple[str, str, str]:
    """(question, rationale, answer)."""
    if not question.strip():
        raise BadLine("the question is empty")
    if solution.count(MARK) != 1:
        raise BadLine(f"no {MARK} before a final answer" if MARK not in solution else f"{solution.count(MARK)} times {MARK}, where one must be")
    rationale, answer = (part.strip() for part in solution.split(MARK))
    if not answer:
        raise BadLine(f"nothing after {MARK}")
    if answer_value(answer) is None:
        raise BadLine(f"the answer {answer[:40]!r} is not a number")
    return question.strip(), rationale, answer


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start}") from error


def _require_characters(*texts: str) -> None:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadLine("the text holds a lone surrogate, which is no character") from error


def file_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, their ends included."""
    with path.open("rb") as stream:
        yield from stream


def parquet_rows(path: Path) -> Iterator[bytes]:
    """Rows as JSON lines: how the data set's page on Hugging Face ships it."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield json.dumps(row, default=str).encode()
    except arrow.ArrowException as error:
        raise UserError(f"{path} is damaged or not Parquet ({error}); copy it again, or leave it out of the input") from error
