"""Which files an `input` means, how they are recognised again, and how they are cut into shards."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pretrain.data.files import sampled_hash
from pretrain.data.manifest import InputRecord
from pretrain.errors import UserError

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")
_FINGERPRINTS = 16
"""Threads that read blocks of the inputs: 60,000 files of a network file system take minutes one by one."""


@dataclass(frozen=True)
class InputFile:
    """A file to read; `name` is its path from the input that it was found under, the same wherever the input lies."""

    path: Path
    name: str
    size: int

    def fingerprint(self) -> InputRecord:
        """Name, size, and hash of three blocks: does not change when the file is copied. UserError where it cannot be read."""
        try:
            return InputRecord(name=self.name, bytes=self.size, sample=sampled_hash(self.path))
        except OSError as error:
            raise _unreadable(self.path, error) from error


def fingerprints(files: list[InputFile]) -> tuple[InputRecord, ...]:
    """Of each file. UserError for the first that cannot be read."""
    with ThreadPoolExecutor(_FINGERPRINTS) as readers:
        return tuple(readers.map(InputFile.fingerprint, files))


def find_inputs(given: str | list[str], output: Path) -> list[InputFile]:
    """All files below `given`, in a fixed order. UserError for what is missing, of another kind, empty, given twice, or holds `output`."""
    found: dict[Path, InputFile] = {}
    for text in [given] if isinstance(given, str) else given:
        root = Path(text)
        try:
            for path in _files(root, output):
                if path.resolve() in found:
                    raise UserError(f"input {path} is given twice; name every file or folder once")
                name = path.relative_to(root.parent).as_posix()
                found[path.resolve()] = InputFile(path, name, path.stat().st_size)
        except OSError as error:
            raise _unreadable(root, error) from error
    return list(found.values())


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"input {path} cannot be read ({error.strerror or error}); give files and folders that you may read")


def _files(root: Path, output: Path) -> list[Path]:
    if root.is_file():
        if not root.name.endswith(SUFFIXES):
            raise UserError(f"input {root} is of no known kind; known are {', '.join(SUFFIXES)}")
        return [root]
    if not root.is_dir():
        if os.path.lexists(root):
            raise UserError(f"input {root} is neither a file nor a folder (a pipe, a device, or a link to nothing); give a regular file")
        raise UserError(f"input {root} does not exist (looked from {Path.cwd()}); give a file or folder that does")
    if output.resolve().is_relative_to(root.resolve()):
        raise UserError(f"output {output} lies inside the input folder {root} and would be read by the next run; choose a folder outside it")
    files = sorted(_walk(root, frozenset()))
    if not files:
        raise UserError(f"input folder {root} holds none of {', '.join(SUFFIXES)}; give the folder that holds the text")
    return files


def _walk(folder: Path, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    """Regular files of known kinds. Links are followed, but not back into a folder that leads here; hidden names are left out, pipes refused."""
    status = folder.stat()
    above = above | {(status.st_dev, status.st_ino)}
    with os.scandir(folder) as entries:
        listed = [entry for entry in entries if not entry.name.startswith(".")]
    saved = any(entry.name == "dataset_info.json" for entry in listed)  # what datasets.save_to_disk leaves
    for entry in listed:
        path = Path(entry.path)
        if entry.is_dir():
            inner = path.stat()
            if (inner.st_dev, inner.st_ino) in above:
                raise UserError(f"input {path} is a link to a folder above it; remove the link, or give the folders below it one by one")
            yield from _walk(path, above)
        elif entry.name.endswith(SUFFIXES) and not (saved and entry.name.startswith("cache-")):
            if not entry.is_file():
                raise UserError(f"input {path} is no regular file (a pipe, a device, or a link to nothing); remove it, or give the files one by one")
            yield path


@dataclass(frozen=True)
class Piece:
    """A file, or a part of it: bytes [start, stop) of a .jsonl (lines that begin there), row groups [start, stop) of a .parquet.

    stop  None: the whole file. size: input bytes, for progress. file_bytes: of the whole file when it was listed; -1: not to be checked.
    """

    path: str
    name: str
    size: int
    start: int = 0
    stop: int | None = None
    file_bytes: int = -1


def shards_of(files: list[InputFile], shard_bytes: int) -> list[list[Piece]]:
    """Groups of pieces of about `shard_bytes`, in the order of the files: the same for the same files. UserError for a broken Parquet footer."""
    groups: list[list[Piece]] = []
    room = 0
    for file in files:
        for piece in _pieces(file, shard_bytes):
            if not groups or piece.size > room:
                groups.append([])
                room = shard_bytes
            groups[-1].append(piece)
            room -= piece.size
    return groups


_LEAST_SPLIT = 1 << 20
"""No file is cut into smaller pieces than this, whatever shard_bytes says."""


def _pieces(file: InputFile, shard_bytes: int) -> Iterator[Piece]:
    step = max(shard_bytes, _LEAST_SPLIT)
    if file.size <= step or file.path.suffix not in (".jsonl", ".parquet"):
        yield Piece(str(file.path), file.name, file.size, file_bytes=file.size)
    elif file.path.suffix == ".jsonl":
        for start in range(0, file.size, step):
            stop = min(start + step, file.size)
            yield Piece(str(file.path), file.name, stop - start, start, stop, file.size)
    else:
        from data_prep.read_columns import row_group_sizes

        sizes = row_group_sizes(file.path)
        start = 0
        while start < len(sizes):
            stop, size = start + 1, sizes[start]
            while stop < len(sizes) and size + sizes[stop] <= step:
                size += sizes[stop]
                stop += 1
            yield Piece(str(file.path), file.name, size, start, stop, file.size)
            start = stop
