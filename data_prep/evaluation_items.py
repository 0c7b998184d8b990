"""Items of evaluation sets: JSON lines or Parquet rows, and the texts in them that a corpus should not hold."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.data.gsm8k_readers import file_lines, parquet_rows
from pretrain.errors import UserError

USUAL_KEYS = ("question", "rationale", "answer")


@dataclass(frozen=True)
class Item:
    """One item: number of its set, its name (`id` where it has one, or else the line), and its texts."""

    evaluation_set: int
    name: str
    texts: tuple[str, ...]


def read_items(path: Path, evaluation_set: int, keys: tuple[str, ...] | None) -> list[Item]:
    """All items of a file. UserError, naming the line, for what is no JSON object or lacks the keys: an evaluation set must be whole."""
    items = []
    try:
        for number, line in enumerate(parquet_rows(path) if path.suffix == ".parquet" else file_lines(path), start=1):
            if line.strip():
                items.append(_item(line, f"line {number} of {path}", number, evaluation_set, keys))
    except OSError as error:
        raise UserError(f"evaluation set {path} cannot be read ({error.strerror or error}); give a file that you may read") from error
    if not items:
        raise UserError(f"evaluation set {path} holds no item; give a JSON lines or Parquet file")
    return items


def _item(line: bytes, place: str, number: int, evaluation_set: int, keys: tuple[str, ...] | None) -> Item:
    try:
        value = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}); give evaluation sets as JSON lines or Parquet") from error
    if not isinstance(value, dict):
        raise UserError(f"{place} is a JSON {type(value).__name__}, where an object is needed")
    wanted = keys or tuple(key for key in USUAL_KEYS if key in value)
    if not wanted:
        raise UserError(f"{place} has none of {', '.join(USUAL_KEYS)}; it has {', '.join(list(value)[:8])}: set keys=[…] to those that hold text")
    texts = [text for key in wanted for text in _texts(value, key, place)]
    name = value.get("id")
    return Item(evaluation_set, str(name) if isinstance(name, str | int) else str(number), tuple(texts))


def _texts(value: dict[str, Any], key: str, place: str) -> list[str]:
    """The string at a dotted key, or the strings of a list there."""
    found: Any = value
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            raise UserError(f"{place} has no key {key}; it has {', '.join(list(value)[:8])}")
        found = found[part]
    listed = found if isinstance(found, list) else [found]
    if not all(isinstance(text, str) for text in listed):
        raise UserError(f"{key} in {place} is neither a string nor a list of strings; name keys that hold text")
    return listed
