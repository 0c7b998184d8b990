"""Records out of text, JSONL, Parquet and Arrow files, bad ones with their line and reason instead of an exception.

Policy: text must be valid UTF-8 without lone surrogates; a byte-order mark at the start of a file is dropped, and is a character elsewhere;
NUL characters are text; of a key that a JSON object holds twice, the last value counts. A bad record costs that record. A file that ends early,
or is not what its name says, is a UserError: nobody knows how much is missing.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from data_prep.filters import Missing, RecordFilter, look_up
from data_prep.inputs import Piece
from pretrain.errors import UserError

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Wanted:
    """What of a record is read: the text at a dotted key, if the filter lets it pass."""

    text_key: str
    filter: RecordFilter = RecordFilter({}, {})


@dataclass(frozen=True, slots=True)
class Record:
    """One document, or why there is none (text is None).

    line      line of the piece from 1 (row of the file for Parquet and Arrow).
    position  bytes of the piece read so far, compressed ones where it is.
    reason    what is wrong with it.
    filtered  or `KEY=VALUE` that took it out.
    """

    line: int
    position: int
    text: str | None
    reason: str = ""
    filtered: str = ""


def whole(path: Path) -> Piece:
    """A file from end to end."""
    return Piece(str(path), path.name, path.stat().st_size)


def read_records(piece: Piece, wanted: Wanted) -> Iterator[Record]:
    """Every record of a file or a part of it. UserError for a file that cannot be read to its end, or has no such column."""
    path = Path(piece.path)
    try:
        if path.suffix in (".txt", ".md"):
            yield from _text(path, wanted)
        elif path.suffix in (".parquet", ".arrow"):
            from data_prep.read_columns import arrow_records, parquet_records

            yield from (parquet_records if path.suffix == ".parquet" else arrow_records)(piece, wanted)
        else:
            from data_prep.read_lines import json_records

            yield from json_records(piece, wanted)
        if piece.file_bytes not in (-1, size := path.stat().st_size):
            raise UserError(f"{path} changed while it was read ({piece.file_bytes} bytes before, {size} now); let it be finished, then prepare again")
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path} is damaged or cut off ({error}); copy it again, or leave it out of the input") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); mend it, or leave it out of the input") from error


def _text(path: Path, wanted: Wanted) -> Iterator[Record]:
    if wanted.filter.keys:
        raise UserError(f"{path} is plain text and has no key {wanted.filter.keys[0]!r} to filter by; put it into a source without keep and drop")
    content = path.read_bytes()
    try:
        yield Record(1, len(content), content.removeprefix(BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        yield Record(line, len(content), None, utf8_reason(error))


def record_of(value: dict[str, Any], wanted: Wanted, line: int, position: int) -> Record:
    """The record that a JSON object, or a row, is."""
    try:
        if filtered := wanted.filter.reason(value):
            return Record(line, position, None, filtered=filtered)
        return checked(look_up(value, wanted.text_key), line, position)
    except Missing as missing:
        return Record(line, position, None, str(missing))


def checked(value: object, line: int, position: int) -> Record:
    """A record if `value` is text."""
    if not isinstance(value, str):
        return Record(line, position, None, f"the text is {'null' if value is None else f'a {type(value).__name__}'}, not a string")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return Record(line, position, None, "the text holds a lone surrogate, which is no character")
    return Record(line, position, value)


def utf8_reason(error: UnicodeDecodeError) -> str:
    """Which byte is not UTF-8, and where."""
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
