"""A hundred inputs that are broken or odd, each with what must become of it."""

import gzip
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import zstandard

TEXTS = [f"document {number} of some length" for number in range(40)]


@dataclass(frozen=True)
class Case:
    """Files to prepare, and the outcome: counts of documents, empty and bad records with a reason of the bad ones, or a sentence that refuses."""

    name: str
    files: dict[str, bytes]
    counts: tuple[int, int, int] | None = None
    says: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    texts: list[str] | None = None


def jsonl(*lines: bytes) -> bytes:
    return b"\n".join(lines) + b"\n"


def packed(kind: str) -> bytes:
    """TEXTS in a file of a kind."""
    table, lines = arrow.table({"text": TEXTS}), jsonl(*(json.dumps({"text": text}).encode() for text in TEXTS))
    sink = io.BytesIO()
    if kind == "jsonl.gz":
        return gzip.compress(lines, mtime=0)
    if kind == "jsonl.zst":
        return zstandard.ZstdCompressor().compress(lines)
    if kind == "parquet":
        parquet.write_table(table, sink, row_group_size=7)
        return sink.getvalue()
    with (arrow.ipc.new_file if kind == "file.arrow" else arrow.ipc.new_stream)(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=7):
            writer.write_batch(batch)
    return sink.getvalue()


KINDS = ("jsonl.gz", "jsonl.zst", "parquet", "file.arrow", "stream.arrow")
DAMAGED = r"a\.[a-z.]+ is damaged or (cut off|not (Parquet|Arrow)) \(.+\); copy it again, or leave it out of the input$"


def truncated() -> Iterator[Case]:
    """Every kind of container, cut at several places, and with other bytes in its middle or its end."""
    for kind in KINDS:
        whole = packed(kind)
        for percent in (1, 10, 33, 50, 80, 95, 99):
            yield Case(f"{kind} cut at {percent}%", {f"a.{kind}": whole[: max(len(whole) * percent // 100, 1)]}, says=DAMAGED)
        for lost in (1, 4, 7, 8):  # 8: a stream without its end mark
            yield Case(f"{kind} without its last {lost} bytes", {f"a.{kind}": whole[:-lost]}, says=DAMAGED)
        yield Case(f"{kind} that is something else", {f"a.{kind}": b"<html>404 not found</html>" * 9}, says=DAMAGED)
        yield Case(f"{kind} whole", {f"a.{kind}": whole}, (40, 0, 0), texts=TEXTS)


GOOD = b'{"text": "good"}'
BAD_LINES: list[tuple[str, bytes, str]] = [
    ("not closed", b'{"text": "x"', "not JSON"),
    ("two values", b'{"text": "x"} {"text": "y"}', "not JSON"),
    ("single quotes", b"{'text': 'x'}", "not JSON"),
    ("a trailing comma", b'{"text": "x",}', "not JSON"),
    ("a control character", b'{"text": "a\x01b"}', "not JSON"),
    ("a bare word", b"text", "not JSON"),
    ("a list", b'["x"]', "a JSON list where an object"),
    ("a string", b'"x"', "a JSON str where an object"),
    ("a number", b"5", "a JSON int where an object"),
    ("null", b"null", "a JSON NoneType where an object"),
    ("true", b"true", "a JSON bool where an object"),
    ("no text", b"{}", "no key 'text'; it has none"),
    ("another key", b'{"content": "x"}', "no key 'text'; it has 'content'"),
    ("null text", b'{"text": null}', "the text is null"),
    ("number as text", b'{"text": 5}', "the text is a int"),
    ("fraction as text", b'{"text": 5.5}', "the text is a float"),
    ("truth as text", b'{"text": true}', "the text is a bool"),
    ("list as text", b'{"text": ["x"]}', "the text is a list"),
    ("object as text", b'{"text": {"a": 1}}', "the text is a dict"),
    ("not a number as text", b'{"text": NaN}', "the text is a float"),
    ("deep lists", b"[" * 100_000, "not JSON"),
    ("deep objects", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not JSON|no key"),
    ("Latin 1", b'{"text": "caf\xe9"}', "not UTF-8: byte 0xe9 at offset 13"),
    ("a cut character", b'{"text": "\xe6\x97"}', "not UTF-8: byte 0xe6"),
    ("an overlong slash", b'{"text": "\xc0\xaf"}', "not UTF-8: byte 0xc0"),
    ("a surrogate in UTF-8", b'{"text": "\xed\xa0\x80"}', "not UTF-8: byte 0xed"),
    ("beyond Unicode", b'{"text": "\xf5\x80\x80\x80"}', "not UTF-8: byte 0xf5"),
    ("a high surrogate", b'{"text": "\\ud800"}', "lone surrogate"),
    ("a low surrogate", b'{"text": "a\\udc00b"}', "lone surrogate"),
    ("surrogates in the wrong order", b'{"text": "\\udc00\\ud800"}', "lone surrogate"),
    ("UTF-16", '{"text": "x"}'.encode("utf-16"), "not UTF-8: byte 0xff"),
    ("a byte-order mark inside", b'\xef\xbb\xbf{"text": "x"}', "not JSON"),
    ("zeros of a crash", b"\0" * 100, "not JSON"),
    ("a half escape", b'{"text": "\\u12"}', "not JSON"),
]
ODD_LINES: list[tuple[str, bytes, str]] = [
    ("NUL", b'{"text": "a\\u0000b"}', "a\0b"),
    ("a byte-order mark in the text", b'{"text": "a\xef\xbb\xbfb"}', "a\ufeffb"),
    ("the same key twice: the last counts", b'{"text": "first", "text": "last"}', "last"),
    ("a pair of surrogates", b'{"text": "\\ud83d\\ude42"}', "\U0001f642"),
    ("spaces around", b'  \t{"text": "x"}  ', "x"),
    ("NaN elsewhere", b'{"score": NaN, "text": "x"}', "x"),
    ("a huge number elsewhere", b'{"id": 123456789012345678901234567890, "text": "x"}', "x"),
    ("deep elsewhere", b'{"meta": ' + b"[" * 500 + b"]" * 500 + b', "text": "x"}', "x"),
    ("a surrogate elsewhere", b'{"title": "\\ud800", "text": "x"}', "x"),
    ("a line separator", b'{"text": "a\xe2\x80\xa8b\xc2\x85c\x7f"}', "a\u2028b\x85c\x7f"),
    ("a carriage return at the end", b'{"text": "x"}\r', "x"),
    ("a long line", b'{"text": "' + b"word " * 200_000 + b'x"}', "word " * 200_000 + "x"),
    ("special tokens as text", b'{"text": "</s><s><unk>"}', "</s><s><unk>"),
    ("noncharacters", b'{"text": "\\uffff\\ufdd0"}', "\uffff\ufdd0"),
]


def lines() -> Iterator[Case]:
    """One odd line between two good ones."""
    for name, line, reason in BAD_LINES:
        yield Case(f"line: {name}", {"a.jsonl": jsonl(GOOD, line, GOOD)}, (2, 0, 1), reason, texts=["good", "good"])
    for name, line, text in ODD_LINES:
        yield Case(f"line: {name}", {"a.jsonl": jsonl(GOOD, line, GOOD)}, (3, 0, 0), texts=["good", text, "good"])


def documents() -> Iterator[Case]:
    """Empty ones in every place, and rows of tables."""
    empty = b'{"text": " \\n\\t\\u3000"}'
    places: dict[str, tuple[bytes, ...]] = {"first": (empty, GOOD), "last": (GOOD, empty), "between": (GOOD, empty, GOOD)}
    places["many"] = (empty,) * 50 + (GOOD,)
    for name, content in places.items():
        yield Case(f"empty {name}", {"a.jsonl": jsonl(*content)}, (content.count(GOOD), content.count(empty), 0))
    yield Case("all empty", {"a.jsonl": jsonl(empty, empty)}, says="the input holds no text: 2 empty and 0 unreadable documents")
    yield Case("no lines", {"a.jsonl": b""}, says="the input holds no text: 0 empty and 0 unreadable")
    yield Case("blank lines", {"a.jsonl": b"\n\n  \n" + jsonl(GOOD, b"", GOOD)}, (2, 0, 0))
    yield Case("no line break at the end", {"a.jsonl": GOOD + b"\n" + GOOD}, (2, 0, 0))
    yield Case("a mark at the start", {"a.jsonl": b"\xef\xbb\xbf" + GOOD}, (1, 0, 0), texts=["good"])
    yield Case("empty compressed files", {"a.jsonl.gz": b"", "b.jsonl.zst": b"", "c.jsonl": GOOD}, (1, 0, 0))
    yield Case("empty Parquet", {"a.parquet": b""}, says=DAMAGED)
    yield Case("empty Arrow", {"a.arrow": b""}, says=DAMAGED)
    yield Case("binary as text", {"a.txt": b"a\nb\xfe", "b.md": b"x"}, (1, 0, 1), "not UTF-8: byte 0xfe at offset 3")
    yield Case("a mark in a text file", {"a.txt": b"\xef\xbb\xbfx"}, (1, 0, 0), texts=["x"])
    for kind, write in (("parquet", parquet_bytes), ("arrow", stream_bytes)):
        yield Case(f"{kind}: null and empty rows", {f"a.{kind}": write({"text": ["x", None, "", "y"]})}, (2, 1, 1), "the text is null")
        yield Case(f"{kind}: another column", {f"a.{kind}": write({"content": ["x"]})}, says="has no column 'text'; it has content: set text_key")
        yield Case(f"{kind}: numbers", {f"a.{kind}": write({"text": [1, 2]})}, says="2 of 2 records are unreadable", options={"max_bad_fraction": 0})
        yield Case(f"{kind}: no rows", {f"a.{kind}": write({"text": arrow.array([], arrow.string())})}, says="the input holds no text")
        nested = write({"meta": [{"text": "x"}, None, {"text": None}]})
        yield Case(f"{kind}: nested", {f"a.{kind}": nested}, (1, 0, 2), "no key|the text is null", {"text_key": "meta.text"})


def parquet_bytes(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(arrow.table(columns), sink)
    return sink.getvalue()


def stream_bytes(columns: dict[str, Any]) -> bytes:
    sink, table = io.BytesIO(), arrow.table(columns)
    with arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


SOURCES: tuple[Callable[[], Iterator[Case]], ...] = (truncated, lines, documents)
CASES = [case for source in SOURCES for case in source()]
