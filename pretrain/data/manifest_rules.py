"""What the fields of a manifest must say, one by one and about each other: a table, and the first rule that a manifest breaks.

Types and names of fields are checked before (records.py); what the files hold is checked after (manifest.verify).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.data.records import shown

if TYPE_CHECKING:
    from pretrain.data.manifest import Manifest

Rule = tuple[str, Callable[..., bool], Callable[..., str]]
"""(field, whether it holds, the rule that completes `FIELD=VALUE must …`): both functions take the manifest, and for items of lists the item too."""

COUNTS = ("documents", "empty", "bad", "filtered")
FORMAT_VERSION = 2
_HASH, _SAMPLE, _NAME = (re.compile(pattern) for pattern in ("[0-9a-f]{64}", "[0-9a-f]{32}", "[A-Za-z0-9][A-Za-z0-9._-]*"))
_DTYPES = ("uint16", "int32")
_COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?|unknown")


def _is_hash(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text) is not None


def _itemsize(m: Manifest) -> int:
    return np.dtype(m.dtype).itemsize


SHARD_RULES: tuple[Rule, ...] = (
    ("file", lambda m, s: _is_hash(_NAME, s.file), lambda m, s: "be the name of a file in that folder, without its suffix"),
    ("source", lambda m, s: s.source in m.request.sources, lambda m, s: f"be one of the sources {', '.join(m.request.sources)}"),
    ("tokens", lambda m, s: s.tokens >= 1, lambda m, s: "be at least 1"),
    ("documents", lambda m, s: 1 <= s.documents <= s.tokens, lambda m, s: f"lie between 1 and the shard's {s.tokens} tokens"),
    ("bin_bytes", lambda m, s: s.bin_bytes == s.tokens * _itemsize(m), lambda m, s: f"be {s.tokens * _itemsize(m)}, its tokens in {m.dtype}"),
    ("idx_bytes", lambda m, s: s.idx_bytes >= 1, lambda m, s: "be at least 1"),
    ("bin_hash", lambda m, s: _is_hash(_HASH, s.bin_hash), lambda m, s: "be 64 hexadecimal digits"),
    ("idx_hash", lambda m, s: _is_hash(_HASH, s.idx_hash), lambda m, s: "be 64 hexadecimal digits"),
    ("sample", lambda m, s: _is_hash(_SAMPLE, s.sample), lambda m, s: "be 32 hexadecimal digits"),
)

INPUT_RULES: tuple[Rule, ...] = (
    ("name", lambda m, i: bool(i.name), lambda m, i: "name a file"),
    ("bytes", lambda m, i: i.bytes >= 0, lambda m, i: "not be negative"),
    ("sample", lambda m, i: _is_hash(_SAMPLE, i.sample), lambda m, i: "be 32 hexadecimal digits"),
)

REQUESTED_RULES: tuple[Rule, ...] = (
    ("text_key", lambda m, r: bool(r.text_key), lambda m, r: "name a key"),
    ("keep", lambda m, r: all(r.keep.values()), lambda m, r: "give values for every key"),
    ("drop", lambda m, r: all(r.drop.values()), lambda m, r: "give values for every key"),
    ("inputs", lambda m, r: bool(r.inputs), lambda m, r: "name at least one file"),
)


def _of(m: Manifest, source: str, field: str) -> int:
    return sum(getattr(shard, field) for shard in m.shards if shard.source == source)


def _filters_hold(m: Manifest) -> bool:
    for name, source in m.sources.items():
        asked = m.request.sources[name]
        if any(count < 1 or key.partition("=")[0] not in asked.keep | asked.drop for key, count in source.filtered.items()):
            return False
    return True


def _sum(m: Manifest, field: str) -> int:
    values = (getattr(source, field) for source in m.sources.values())
    return sum(sum(value.values()) if isinstance(value, dict) else value for value in values)


def _counted(key: str) -> tuple[Callable[..., bool], Callable[..., str]]:
    return lambda m: m.counts[key] == _sum(m, key), lambda m: f"be the {_sum(m, key)} {key} of the sources"


SOURCE_RULES: tuple[Rule, ...] = (
    ("empty", lambda m, s: s.empty >= 0, lambda m, s: "not be negative"),
    ("bad", lambda m, s: s.bad >= 0, lambda m, s: "not be negative"),
)

RULES: tuple[Rule, ...] = (
    ("tokenizer.name", lambda m: bool(m.tokenizer.name.strip()), lambda m: "name the tokenizer's file"),
    ("tokenizer.hash", lambda m: _is_hash(_HASH, m.tokenizer.hash), lambda m: "be 64 hexadecimal digits"),
    ("dtype", lambda m: m.dtype in _DTYPES, lambda m: f"be {' or '.join(_DTYPES)}"),
    ("tokenizer.size", lambda m: 1 <= m.tokenizer.size <= np.iinfo(m.dtype).max, lambda m: f"lie between 1 and what {m.dtype} holds"),
    ("tokenizer.eos_id", lambda m: 0 <= m.tokenizer.eos_id < m.tokenizer.size, lambda m: f"be one of the tokenizer's {m.tokenizer.size} ids"),
    ("request.format_version", lambda m: m.request.format_version == FORMAT_VERSION, lambda m: f"be {FORMAT_VERSION}"),
    ("request.tokenizer", lambda m: m.request.tokenizer == m.tokenizer.hash, lambda m: f"be tokenizer.hash, {m.tokenizer.hash[:12]}…"),
    ("request.shard_bytes", lambda m: m.request.shard_bytes >= 1, lambda m: "be at least 1"),
    ("request.sources", lambda m: bool(m.request.sources), lambda m: "name at least one source"),
    ("shards", lambda m: bool(m.shards), lambda m: "name at least one shard"),
    ("shards", lambda m: len({s.file for s in m.shards}) == len(m.shards), lambda m: "name each file once"),
    ("tokens", lambda m: m.tokens == sum(s.tokens for s in m.shards), lambda m: f"be the {sum(s.tokens for s in m.shards)} tokens of its shards"),
    (
        "documents",
        lambda m: m.documents == sum(s.documents for s in m.shards),
        lambda m: f"be the {sum(s.documents for s in m.shards)} documents of its shards",
    ),
    (
        "sources",
        lambda m: sorted(m.sources) == sorted(m.request.sources),
        lambda m: f"count the sources that were asked for, {', '.join(m.request.sources)}",
    ),
    (
        "sources",
        lambda m: all(source.tokens == _of(m, name, "tokens") for name, source in m.sources.items()),
        lambda m: "count the tokens of each source's shards",
    ),
    (
        "sources",
        lambda m: all(source.documents == _of(m, name, "documents") for name, source in m.sources.items()),
        lambda m: "count the documents of each source's shards",
    ),
    ("sources", _filters_hold, lambda m: "count, at least once each, values of the keys that the source's keep and drop look at, as in KEY=VALUE"),
    ("counts", lambda m: sorted(m.counts) == sorted(COUNTS), lambda m: f"count {', '.join(COUNTS)}"),
    *((f"counts.{key}", *_counted(key)) for key in COUNTS),
    ("code.version", lambda m: bool(m.code.version.strip()), lambda m: "name the version of the package"),
    ("code.commit", lambda m: _is_hash(_COMMIT, m.code.commit), lambda m: "be the 40 hexadecimal digits of a git commit, or unknown"),
)
"""In this order: a rule may rely on those above it. The rules of a list's items come after the list's first rule."""
_ITEMS = {"shards": SHARD_RULES, "request.sources": REQUESTED_RULES, "sources": SOURCE_RULES, "inputs": INPUT_RULES}


def first_broken(manifest: Manifest) -> str | None:
    """`says FIELD=VALUE, which must RULE`, or None where the manifest holds together."""
    return _first_broken(RULES, manifest, manifest, "", ())


def _first_broken(rules: tuple[Rule, ...], manifest: Manifest, record: Any, prefix: str, item: tuple[Any, ...]) -> str | None:
    checked = set()
    for field, holds, rule in rules:
        value = _value(record, field)
        if not holds(manifest, *item):
            return f"says {prefix}{field}={shown(value)}, which must {rule(manifest, *item)}"
        if field in _ITEMS and field not in checked:
            checked.add(field)
            for name, each in [(f".{key}", each) for key, each in value.items()] if isinstance(value, dict) else _numbered(value):
                if broken := _first_broken(_ITEMS[field], manifest, each, f"{prefix}{field}{name}.", (each,)):
                    return broken
    return None


def _numbered(items: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return [(f"[{number}]", item) for number, item in enumerate(items)]


def _value(record: Any, field: str) -> Any:
    for part in field.split("."):
        record = record[part] if isinstance(record, dict) else getattr(record, part)
    return record
