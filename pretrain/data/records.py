"""JSON files as dataclasses: every key and type checked, the first mistake as field, value and rule."""

import json
import reprlib
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")


class Malformed(Exception):
    """What is wrong with a record, as the end of a sentence that begins with the file's name."""


def read_record(kind: type[T], path: Path) -> T:
    """A JSON file as an instance of the dataclass `kind`. Raises Malformed, and FileNotFoundError where there is none."""
    try:
        return typed_record(kind, parse(path.read_bytes()))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Malformed(f"cannot be read ({error.strerror or error})") from error


def parse(content: bytes) -> Any:
    """The JSON value of a file. Raises Malformed."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not JSON ({error})" if content.strip() else "is empty") from error


def typed_record(kind: type[T], value: Any) -> T:
    """A JSON value as an instance of the dataclass `kind`, without conversions and without unknown keys. Raises Malformed."""
    try:
        # Back to JSON, because pydantic's strict mode takes an array for a tuple and an object for a dataclass only from there.
        record: T = _adapter(kind).validate_json(json.dumps([value]), strict=True)[0]  # type: ignore[arg-type]  # a class is hashable
        return record
    except ValidationError as error:
        raise Malformed(_first(error)) from error


@cache
def _adapter(kind: Hashable) -> TypeAdapter[list[Any]]:
    """Building one takes thirty times as long as reading a record, and files of problems have hundreds of thousands."""
    return TypeAdapter(list[kind], config=ConfigDict(extra="forbid"))  # type: ignore[valid-type]  # a dataclass alone takes no config


def shown(value: Any) -> str:
    """A value of a record, shortened."""
    return reprlib.repr(list(value) if isinstance(value, tuple) else value)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:]).lstrip(".")
    if first["type"] == "json_invalid":  # json takes half of a surrogate pair for a character
        return f"holds text that is not Unicode ({first['ctx']['error']})"
    if first["type"] == "missing":
        return f"has no field {path}"
    if first["type"] == "unexpected_keyword_argument":
        return f"has the unknown field {path}={shown(first['input'])}"
    expected = first["msg"].removeprefix("Input should be ")
    return f"says {path}={shown(first['input'])}, which must be {expected}" if path else f"holds {shown(first['input'])}, which must be {expected}"
