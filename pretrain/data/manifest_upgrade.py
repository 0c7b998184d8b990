"""Manifests of format version 1, which knew one source without a name and no filters, read as those of today."""

from typing import Any

ONLY_SOURCE = "main"
"""Name of a source that was given none."""


def from_version_1(raw: dict[str, Any]) -> dict[str, Any]:
    """The same manifest with the fields of version 2. One that lacks fields of version 1 comes back as it is, for the checks to name them."""
    try:
        request, counts = raw["request"], raw["counts"]
        source = {key: counts[key] for key in ("documents", "empty", "bad")} | {"tokens": raw["tokens"], "filtered": {}}
        asked = {"text_key": request["text_key"], "keep": {}, "drop": {}, "inputs": request["inputs"]}
        return raw | {
            "format_version": 2,
            "shards": [shard | {"source": ONLY_SOURCE} for shard in raw["shards"]],
            "sources": {ONLY_SOURCE: source},
            "request": {
                "format_version": request["format_version"] + 1,
                "tokenizer": request["tokenizer"],
                "shard_bytes": request["shard_bytes"],
                "sources": {ONLY_SOURCE: asked},
            },
            "counts": counts | {"filtered": 0},
            "code": {"version": "unknown", "commit": "unknown"},
        }
    except (KeyError, TypeError):
        return raw
