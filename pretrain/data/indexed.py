"""One shard in Megatron's format: NAME.bin holds the ids of all documents in a row, NAME.idx says where each begins.

NAME.idx, little-endian: b"MMIDIDX\\0\\0", version u64 (1), dtype code u8, sequences u64, documents + 1 u64, then arrays: int32 length and
int64 byte offset of every sequence, int64 number of the first sequence of every document and, at the end, the number of sequences.
Ours have one sequence per document; the reader takes any. Same bytes as megatron.core.datasets.indexed_dataset (0.16).
"""

import mmap
import os
import struct
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pretrain.data.files import SAMPLED_BYTES, Damaged, sync_folder

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_DOCUMENT = 2**31 - 1


def dtype_for(largest_id: int) -> np.dtype:
    """The smaller of the format's two types that holds `largest_id` (count the mask id)."""
    return np.dtype(np.uint16) if largest_id <= np.iinfo(np.uint16).max else np.dtype(np.int32)


class ShardWriter:
    """Writes PREFIX.bin and PREFIX.idx; both appear, complete, only when the `with` block ends without an error.

    Ids must fit the dtype (ValueError). The .idx is renamed last. Memory: 4 bytes per document.
    """

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self._dtype = np.dtype(dtype)
        self._code = _CODES[self._dtype]
        self._bin, self._idx = _paths(prefix)
        self._lengths = array("i")
        self.tokens = 0

    @property
    def documents(self) -> int:
        """Documents so far."""
        return len(self._lengths)

    def __enter__(self) -> "ShardWriter":
        self._stream = _temporary(self._bin).open("wb")
        return self

    def add(self, ids: list[int] | np.ndarray) -> None:
        """Append one document, its end-of-document id included."""
        self._write(ids if isinstance(ids, np.ndarray) else np.asarray(ids, dtype=np.int64), [len(ids)])

    def add_all(self, documents: Sequence[list[int]]) -> None:
        """Append several documents, each with its end-of-document id included: one conversion and one write for all."""
        lengths = [len(ids) for ids in documents]
        if lengths:
            self._write(np.fromiter(chain.from_iterable(documents), np.int64, sum(lengths)), lengths)

    def _write(self, ids: np.ndarray, lengths: list[int]) -> None:
        for length in (min(lengths), max(lengths)):
            if not 0 < length <= _MAX_DOCUMENT:
                raise ValueError(f"a document of {length} tokens cannot be stored")
        if ids.min() < 0 or ids.max() > np.iinfo(self._dtype).max:
            raise ValueError(f"ids {ids.min()}..{ids.max()} do not fit {self._dtype}")
        self._stream.write(ids.astype(self._dtype, copy=False).tobytes())
        self._lengths.extend(lengths)
        self.tokens += ids.size

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                _flush(self._stream)
            self._stream.close()
            if kind is None:
                with _temporary(self._idx).open("wb") as stream:
                    stream.write(self._index())
                    _flush(stream)
                os.replace(_temporary(self._bin), self._bin)
                os.replace(_temporary(self._idx), self._idx)
                sync_folder(self._bin.parent)
        finally:
            _temporary(self._bin).unlink(missing_ok=True)
            _temporary(self._idx).unlink(missing_ok=True)

    def _index(self) -> bytes:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        offsets = np.zeros(lengths.size, np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        header = _HEADER.pack(MAGIC, VERSION, self._code, lengths.size, lengths.size + 1)
        documents = np.arange(lengths.size + 1, dtype=np.int64)
        return header + lengths.tobytes() + (offsets * self._dtype.itemsize).tobytes() + documents.tobytes()


class IndexedShard:
    """Reads a shard: ids by position from the .bin, documents through a memory map of the .idx; opening costs a few small reads, whatever the size.

    Windows are read in a random order, so nothing is read ahead, and what is read is not kept in this process. Safe to use from several threads.

    Raises Damaged (a UserError) for missing files, a foreign or cut-off .idx, and a .bin whose size is not what the .idx says.
    """

    def __init__(self, prefix: Path) -> None:
        self.bin_path, self.idx_path = _paths(prefix)
        self.dtype, self._sequences, self.documents = self._read_header()
        lengths_end = _HEADER.size + 4 * self._sequences
        index = _map(self.idx_path, np.dtype(np.uint8))  # one map, so one file descriptor, for the three arrays
        lengths = np.frombuffer(index, "<i4", self._sequences, _HEADER.size)
        self._lengths = lengths
        self._offsets = np.frombuffer(index, "<i8", self._sequences, lengths_end)
        self._first_sequence = np.frombuffer(index, "<i8", self.documents + 1, lengths_end + 8 * self._sequences)
        last_length = int(lengths[-1]) if self._sequences else 0
        bin_bytes = (int(self._offsets[-1]) if self._sequences else 0) + last_length * self.dtype.itemsize
        self._check_sizes(bin_bytes)
        self.tokens = bin_bytes // self.dtype.itemsize
        self._bin = _open_random(self.bin_path)
        weakref.finalize(self, os.close, self._bin)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the shard, or as many as there are, as int64. Damaged where the file has shrunk, or fails."""
        size = max(min(count, self.tokens - start), 0) * self.dtype.itemsize
        try:
            content = _read_at(self._bin, size, start * self.dtype.itemsize)
        except OSError as error:
            raise unreadable(self.bin_path, error) from error
        if len(content) < size:
            raise Damaged(f"{self.bin_path} was cut off while it was read", self.bin_path.parent)
        return np.frombuffer(content, self.dtype).astype(np.int64)

    def document_numbers(self, start: int, count: int) -> np.ndarray:
        """Number, within the shard, of the document that each token of [start, start + count) belongs to (int64)."""
        first = self._document_at(start)
        ends, document = [], first
        while (end := self.document_end(document)) < start + count:
            ends.append(end - start)
            document += 1
        steps = np.zeros(count, np.int64)
        np.add.at(steps, np.asarray(ends, dtype=np.int64), 1)
        return first + np.cumsum(steps)

    def document_end(self, document: int) -> int:
        """Token position just after `document`."""
        sequence = int(self._first_sequence[document + 1])
        return self.tokens if sequence >= self._sequences else int(self._offsets[sequence]) // self.dtype.itemsize

    def check_ids(self, size: int) -> None:
        """Damaged if an id >= `size` stands in the first, middle or last block of the .bin."""
        block = SAMPLED_BYTES // self.dtype.itemsize
        for start in (0, (self.tokens - block) // 2, self.tokens - block):
            require_ids_below(size, self.read(max(start, 0), block), self.bin_path)

    def check_index(self) -> None:
        """Damaged if the first, middle or last block of the .idx contradicts itself."""
        block = SAMPLED_BYTES // 8
        for first in {0, max((self._sequences - block) // 2, 0), max(self._sequences - block, 0)}:
            offsets = self._offsets[first : first + block]
            lengths = self._lengths[first : first + block].astype(np.int64)
            starts_right = first > 0 or not offsets.size or offsets[0] == 0
            if not starts_right or (np.diff(offsets) != lengths[:-1] * self.dtype.itemsize).any() or (lengths <= 0).any():
                raise Damaged(f"{self.idx_path} contradicts itself: its lengths do not add up to its offsets", self.idx_path.parent)
        for first in {0, max((self.documents - block) // 2, 0), max(self.documents - block, 0)}:
            documents = self._first_sequence[first : first + block + 1]
            if (np.diff(documents) < 0).any() or documents[0] < 0 or documents[-1] > self._sequences:
                raise Damaged(f"{self.idx_path} contradicts itself: its documents do not follow one another", self.idx_path.parent)

    def _document_at(self, position: int) -> int:
        # bisect on a range: numpy.searchsorted would copy the whole (unaligned) map
        return bisect_right(range(self.documents), position, key=self.document_end)

    def _read_header(self) -> tuple[np.dtype, int, int]:
        try:
            with self.idx_path.open("rb") as stream:
                raw = stream.read(_HEADER.size)
        except OSError as error:
            raise unreadable(self.idx_path, error) from error
        if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
            raise Damaged(f"{self.idx_path} is not a Megatron index (its first bytes are not MMIDIDX)", self.idx_path.parent)
        _, version, code, sequences, documents = _HEADER.unpack(raw)
        if version != VERSION or code not in _DTYPES or documents < 1:
            problem = f"{self.idx_path} has version {version} and type code {code}, and only version 1 with uint16 (8) or int32 (4) ids is read"
            raise Damaged(problem, self.idx_path.parent)
        expected = _HEADER.size + 12 * sequences + 8 * documents
        if (size := self.idx_path.stat().st_size) < expected:
            raise Damaged(f"{self.idx_path} is cut off: {size} bytes where its header needs {expected}", self.idx_path.parent)
        return _DTYPES[code], sequences, documents - 1

    def _check_sizes(self, expected: int) -> None:
        try:
            size = self.bin_path.stat().st_size
        except OSError as error:
            raise unreadable(self.bin_path, error) from error
        if size < expected:
            raise Damaged(f"{self.bin_path} is cut off: {size} bytes where {self.idx_path.name} says {expected}", self.bin_path.parent)
        if size > expected or (self.documents and int(self._first_sequence[-1]) != self._sequences):
            raise Damaged(f"{self.bin_path} ({size} bytes) and {self.idx_path.name} ({expected} bytes) disagree", self.bin_path.parent)


def require_ids_below(size: int, ids: np.ndarray, path: Path) -> None:
    """Damaged, naming the file, when an id does not belong to a vocabulary of `size`."""
    if ids.size and (largest := int(ids.max())) >= size:
        raise Damaged(f"{path} holds id {largest}, but the tokenizer has {size} ids (0..{size - 1})", path.parent)
    if ids.size and (smallest := int(ids.min())) < 0:
        raise Damaged(f"{path} holds the negative id {smallest}", path.parent)


def unreadable(path: Path, error: OSError) -> Damaged:
    """The sentence for a shard's file that the system does not hand out."""
    return Damaged(f"{path} cannot be read ({error.strerror or error})", path.parent)


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    """The file, mapped for reading here and there."""
    try:
        with path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise unreadable(path, error) from error
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype)


def _open_random(path: Path) -> int:
    """A descriptor for reading the file here and there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from error
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _read_at(descriptor: int, size: int, offset: int) -> bytes:
    """`size` bytes from `offset` on, or fewer where the file ends: a system may hand out less than was asked for."""
    content = os.pread(descriptor, size, offset)
    while len(content) < size and (more := os.pread(descriptor, size - len(content), offset + len(content))):
        content += more
    return content


def _paths(prefix: Path) -> tuple[Path, Path]:
    # with_suffix would eat the end of names like part.001
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
