"""Atomic files, content hashes, and what to do about a damaged corpus: what every writer and reader of prepared data shares."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pretrain.errors import UserError
from pretrain.outputs import cannot_write

SAMPLED_BYTES = 4096
"""Size of each of the three blocks (first, middle, last) that `sampled_hash` reads."""


class Damaged(UserError):
    """A corpus that is not as it was prepared: `problem` alone, and the message with the way out.

    The folder must go first: prepare_data refuses to write over one whose manifest does not hold.
    """

    def __init__(self, problem: str, folder: Path) -> None:
        self.problem = problem
        super().__init__(
            f"{problem}; copy the corpus again from where it is whole, or remove {folder} and prepare the corpus again with: "
            f"python launchers/prepare_data.py tokenize input=TEXT tokenizer=TOKENIZER output={folder}"
        )


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Write `path` so that it either appears whole or not at all: temporary file, fsync, rename. UserError where the disk refuses."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        _discard(temporary)
        raise cannot_write(path, error) from error
    except BaseException:
        _discard(temporary)
        raise


def _discard(temporary: Path) -> None:
    with suppress(OSError):  # what made the write fail may also hide the file
        temporary.unlink(missing_ok=True)


def file_hash(path: Path) -> str:
    """BLAKE2b-256 of the whole file, in hex."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sampled_hash(path: Path) -> str:
    """BLAKE2b-128 of the size and of three blocks: seconds for thousands of shards, and a changed shard rarely escapes it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as stream:
        for offset in (0, (size - SAMPLED_BYTES) // 2, size - SAMPLED_BYTES):
            stream.seek(max(offset, 0))
            digest.update(stream.read(SAMPLED_BYTES))
    return digest.hexdigest()


def write_once(path: Path, content: bytes) -> bool:
    """Write a file whole; False where it is there already, with this content. UserError where it holds something else."""
    if path.exists():
        if path.is_file() and path.read_bytes() == content:
            return False
        raise UserError(f"{path} exists and holds something else; choose another output, or remove it")
    with atomic_writer(path) as stream:
        stream.write(content)
    return True
