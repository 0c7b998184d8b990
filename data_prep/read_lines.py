"""JSON lines, plain or compressed, whole files or ranges of bytes."""

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson
import zstandard

from data_prep.inputs import Piece
from data_prep.readers import BOM, Record, Wanted, record_of, utf8_reason


def json_records(piece: Piece, wanted: Wanted) -> Iterator[Record]:
    """A record per line; blank lines are none."""
    with Path(piece.path).open("rb") as raw:
        if piece.stop is not None:
            yield from _range(raw, piece.start, piece.stop, wanted)
            return
        for number, line in enumerate(_lines(Path(piece.path), raw), start=1):
            if number == 1:
                line = line.removeprefix(BOM)
            if record := _record(line, number, raw.tell(), wanted):
                yield record


def _range(raw: BinaryIO, start: int, stop: int, wanted: Wanted) -> Iterator[Record]:
    """Lines that begin in [start, stop): each line of a file falls into one of its ranges."""
    if start:
        raw.seek(start - 1)
        raw.readline()  # the rest of a line that began before, or the line break at start - 1 itself
    position, number = raw.tell(), 0
    while position < stop and (line := raw.readline()):
        number, position = number + 1, position + len(line)
        if start == 0 and number == 1:
            line = line.removeprefix(BOM)
        if record := _record(line, number, min(position, stop) - start, wanted):
            yield record


def _record(line: bytes, number: int, position: int, wanted: Wanted) -> Record | None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:  # also for what Python's reader takes: NaN, huge numbers, lone surrogates, deep nesting
        if not line.strip():
            return None
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            return Record(number, position, None, utf8_reason(error))
        except (ValueError, RecursionError) as error:
            return Record(number, position, None, f"not JSON: {error}")
    if not isinstance(value, dict):
        return Record(number, position, None, f"a JSON {type(value).__name__} where an object with the key {wanted.text_key!r} is needed")
    return record_of(value, wanted, number, position)


def _lines(path: Path, raw: BinaryIO) -> BinaryIO:
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
        self._ready = memoryview(b"")

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
        self._ready = memoryview(self._frame.decompress(compressed))
        return True

    @staticmethod
    def _new_frame() -> "zstandard.ZstdDecompressionObj":
        # 2 GiB: files compressed with --long=31
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
