"""Which records of a source stay: dotted keys looked up in a JSON object, and values compared as they are written (numbers by value).

A key reaches inside objects (`meta.redpajama_set_name`); one that holds a dot itself is found too (`{"meta.set": …}` before `{"meta": {"set": …}}`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from data_prep.config import Filters
from pretrain.errors import spelled


class Missing(Exception):
    """A record lacks a key: the end of a sentence."""


def look_up(record: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key. Raises Missing."""
    if key in record:
        return record[key]
    found = _inside(record, key)
    if found is None:
        top = ", ".join(map(repr, list(record)[:8])) or "none"
        inner = record.get(key.partition(".")[0])
        deeper = f", and inside {', '.join(map(repr, list(inner)[:8]))}" if isinstance(inner, Mapping) else ""
        raise Missing(f"no key {key!r}; it has {top}{deeper}")
    return found[0]


def _inside(record: Mapping[str, Any], key: str) -> tuple[Any] | None:
    """The value, in a tuple of its own: it may be null."""
    if key in record:
        return (record[key],)
    parts = key.split(".")
    for count in range(1, len(parts)):
        inner = record.get(".".join(parts[:count]))
        if isinstance(inner, Mapping) and (found := _inside(inner, ".".join(parts[count:]))) is not None:
            return found
    return None


def spelled_filters(filters: Filters) -> dict[str, tuple[str, ...]]:
    """Dotted key -> values as they are written, sorted: equal filters look equal."""
    listed = {key: values if isinstance(values, list) else [values] for key, values in sorted(filters.items())}
    return {key: tuple(sorted({_written(value) for value in values})) for key, values in listed.items()}


def _written(value: Any) -> str:
    """A value as it is written; equal numbers are written alike."""
    number = float(value) if isinstance(value, Decimal) else value  # of a Parquet column
    return str(int(number)) if isinstance(number, float) and number.is_integer() else spelled(number)


@dataclass(frozen=True)
class RecordFilter:
    """Dotted key -> values, as `spelled_filters` makes them."""

    keep: dict[str, tuple[str, ...]]
    drop: dict[str, tuple[str, ...]]

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that is looked at."""
        return (*self.keep, *self.drop)

    def reason(self, record: Mapping[str, Any]) -> str:
        """`KEY=VALUE` that takes the record out, or "" where it stays. Raises Missing where a key is not there."""
        for key, values in self.keep.items():
            if (found := _written(look_up(record, key))) not in values:
                return f"{key}={found}"
        for key, values in self.drop.items():
            if (found := _written(look_up(record, key))) in values:
                return f"{key}={found}"
        return ""
