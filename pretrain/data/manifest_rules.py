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

COUNTS = ("documents", "empty", "bad")
FORMAT_VERSION = 1
_HASH, _SAMPLE, _NAME = (re.compile(pattern) for pattern in ("[0-9a-f]{64}", "[0-9a-f]{32}", "[A-Za-z0-9][A-Za-z0-9._-]*"))
_DTYPES = ("uint16", "int32")


def _is_hash(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text) is not None


def _itemsize(m: Manifest) -> int:
    return np.dtype(m.dtype).itemsize


SHARD_RULES: tuple[Rule, ...] = (
    ("file", lambda m, s: _is_hash(_NAME, s.file), lambda m, s: "be the name of a file in that folder, without its suffix"),
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

RULES: tuple[Rule, ...] = (
    ("tokenizer.name", lambda m: bool(m.tokenizer.name.strip()), lambda m: "name the tokenizer's file"),
    ("tokenizer.hash", lambda m: _is_hash(_HASH, m.tokenizer.hash), lambda m: "be 64 hexadecimal digits"),
    ("dtype", lambda m: m.dtype in _DTYPES, lambda m: f"be {' or '.join(_DTYPES)}"),
    ("tokenizer.size", lambda m: 1 <= m.tokenizer.size <= np.iinfo(m.dtype).max, lambda m: f"lie between 1 and what {m.dtype} holds"),
    ("tokenizer.eos_id", lambda m: 0 <= m.tokenizer.eos_id < m.tokenizer.size, lambda m: f"be one of the tokenizer's {m.tokenizer.size} ids"),
    ("shards", lambda m: bool(m.shards), lambda m: "name at least one shard"),
    ("shards", lambda m: len({s.file for s in m.shards}) == len(m.shards), lambda m: "name each file once"),
    ("tokens", lambda m: m.tokens == sum(s.tokens for s in m.shards), lambda m: f"be the {sum(s.tokens for s in m.shards)} tokens of its shards"),
    (
        "documents",
        lambda m: m.documents == sum(s.documents for s in m.shards),
        lambda m: f"be the {sum(s.documents for s in m.shards)} documents of its shards",
    ),
    ("counts", lambda m: sorted(m.counts) == sorted(COUNTS), lambda m: f"count {', '.join(COUNTS)}"),
    ("counts.documents", lambda m: m.counts["documents"] == m.documents, lambda m: f"be the {m.documents} documents of the corpus"),
    ("counts.empty", lambda m: m.counts["empty"] >= 0, lambda m: "not be negative"),
    ("counts.bad", lambda m: m.counts["bad"] >= 0, lambda m: "not be negative"),
    ("request.format_version", lambda m: m.request.format_version == FORMAT_VERSION, lambda m: f"be {FORMAT_VERSION}"),
    ("request.tokenizer", lambda m: m.request.tokenizer == m.tokenizer.hash, lambda m: f"be tokenizer.hash, {m.tokenizer.hash[:12]}…"),
    ("request.shard_bytes", lambda m: m.request.shard_bytes >= 1, lambda m: "be at least 1"),
    ("request.inputs", lambda m: bool(m.request.inputs), lambda m: "name at least one file"),
)
"""In this order: a rule may rely on those above it. The rules of a list's items come after those of the list."""
_ITEMS = {"shards": SHARD_RULES, "request.inputs": INPUT_RULES}


def first_broken(manifest: Manifest) -> str | None:
    """`says FIELD=VALUE, which must RULE`, or None where the manifest holds together."""
    for field, holds, rule in RULES:
        if not holds(manifest):
            return f"says {field}={shown(_value(manifest, field))}, which must {rule(manifest)}"
        if field in _ITEMS and (broken := _first_broken_item(manifest, field)):
            return broken
    return None


def _first_broken_item(manifest: Manifest, field: str) -> str | None:
    for number, item in enumerate(_value(manifest, field)):
        for name, holds, rule in _ITEMS[field]:
            if not holds(manifest, item):
                return f"says {field}[{number}].{name}={shown(getattr(item, name))}, which must {rule(manifest, item)}"
    return None


def _value(record: Any, field: str) -> Any:
    for part in field.split("."):
        record = record[part] if isinstance(record, dict) else getattr(record, part)
    return record
