"""Records out of text, JSONL and Parquet files, bad ones with their line and reason instead of an exception.

Policy: text must be valid UTF-8 without lone surrogates; a byte-order mark at the start of a file is dropped; NUL characters are text.
A bad record costs that record. A file that ends early or is not what its name says is a UserError: nobody knows how much is missing.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from pretrain.errors import UserError

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """One document, or what was wrong with it (text is None).

    line      line of the file from 1 (row for Parquet).
    position  bytes of the file read so far, compressed ones where it is.
    """

    line: int
    position: int
    text: str | None
    reason: str = ""


def read_records(path: Path, text_key: str) -> Iterator[Record]:
    """Every record of a file. UserError for a file that cannot be read to its end, or has no such column."""
    try:
        if path.suffix in (".txt", ".md"):
            yield from _text(path)
        elif path.suffix == ".parquet":
            yield from _parquet(path, text_key)
        else:
            yield from _json_lines(path, text_key)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path} is damaged or cut off ({error}); copy it again, or leave it out of the input") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); mend it, or leave it out of the input") from error


def _text(path: Path) -> Iterator[Record]:
    content = path.read_bytes()
    try:
        yield Record(1, len(content), content.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        yield Record(line, len(content), None, _utf8_reason(error))


def _json_lines(path: Path, text_key: str) -> Iterator[Record]:
    with path.open("rb") as raw:
        for number, line in enumerate(_open_lines(path, raw), start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield _json_record(line, number, raw.tell(), text_key)


def _json_record(line: bytes, number: int, position: int, text_key: str) -> Record:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Record(number, position, None, _utf8_reason(error))
    except (ValueError, RecursionError) as error:
        return Record(number, position, None, f"not JSON: {error}")
    if not isinstance(value, dict):
        return Record(number, position, None, f"a JSON {type(value).__name__} where an object with the key {text_key!r} is needed")
    if text_key not in value:
        return Record(number, position, None, f"no key {text_key!r}; it has {', '.join(map(repr, list(value)[:8]))}")
    return _checked(value[text_key], number, position)


def _parquet(path: Path, text_key: str) -> Iterator[Record]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            if text_key not in file.schema_arrow.names:
                raise UserError(f"{path} has no column {text_key!r}; it has {', '.join(file.schema_arrow.names)}: set text_key to one of them")
            rows, row = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(batch_size=256, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _checked(value, row, size * row // rows)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged or not Parquet ({error}); copy it again, or leave it out of the input") from error


def _checked(value: object, number: int, position: int) -> Record:
    if not isinstance(value, str):
        return Record(number, position, None, f"the text is {'null' if value is None else f'a {type(value).__name__}'}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return Record(number, position, None, "the text holds a lone surrogate, which is no character")
    return Record(number, position, value)


def _utf8_reason(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def _open_lines(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdStream(raw), buffer_size=1 << 20)
    return raw


class _ZstdStream(io.RawIOBase):
    """Decompresses all frames of a file; EOFError if the last one is cut off, which zstandard's own reader does not notice."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = self._new_frame()
        self._started = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _fill(self) -> bool:
        compressed = self._frame.unused_data if self._frame.eof else b""
        compressed = compressed or self._raw.read(1 << 16)
        if not compressed:
            if self._started and not self._frame.eof:
                raise EOFError("the last zstandard frame is incomplete")
            return False
        if self._frame.eof:
            self._frame = self._new_frame()
        self._started = True
        self._ready = self._frame.decompress(compressed)
        return True

    @staticmethod
    def _new_frame() -> "zstandard.ZstdDecompressionObj":
        # 2 GiB: files compressed with --long=31
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
