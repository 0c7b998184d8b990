"""Files that survive a crash and prove themselves: durable writes, checksums, manifest, and the inspection of a checkpoint folder."""

import errno
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from pretrain.checkpoint.layout import COMPLETE, FORMAT_VERSION, MANIFEST, TRAIN_STATE, ZERO
from pretrain.checkpoint.peers import WRITER_WORDS

_CHUNK = 16 << 20


def write_durably(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk. Its folder still has to be synced (`sync_folder`)."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, text: str) -> None:
    """Like write_durably, for a file that may exist: a reader, or a crash, sees the old text or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    write_durably(partial, text)
    os.rename(partial, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries (creations and renames in it) are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """xxh3-128 of a file, in hexadecimal. It finds corruption; it is no protection against forgery."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: path relative to the folder, size in bytes, xxh3-128."""

    path: str
    bytes: int
    xxh3_128: str

    @classmethod
    def of(cls, folder: Path, relative: str) -> "FileRecord":
        """Measure a file."""
        return cls(relative, (folder / relative).stat().st_size, checksum(folder / relative))


def marker_text(folder: Path) -> str:
    """Text of COMPLETE."""
    return checksum(folder / MANIFEST) + "\n"


def content(folder: Path) -> list[str]:
    """Relative paths of all files below a checkpoint folder but manifest and marker, sorted."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(set(found) - {MANIFEST, COMPLETE})


def manifest_text(step: int, records: Iterable[FileRecord]) -> str:
    """Text of manifest.json."""
    files = {record.path: {"bytes": record.bytes, "xxh3_128": record.xxh3_128} for record in sorted(records, key=lambda record: record.path)}
    return json.dumps({"format": FORMAT_VERSION, "step": step, "files": files}, indent=1) + "\n"


@dataclass(frozen=True)
class Damage:
    """One file of a checkpoint that cannot be trusted, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} {self.reason}"


def read_manifest(folder: Path) -> tuple[list[FileRecord], list[Damage]]:
    """The records of a folder that claims to be complete; or what is wrong with marker or manifest."""
    for name in (COMPLETE, MANIFEST):
        if not (folder / name).is_file():
            return [], [Damage(name, "is missing")]
    try:
        if (folder / COMPLETE).read_bytes() != marker_text(folder).encode():
            return [], [Damage(MANIFEST, f"does not have the checksum that {COMPLETE} states")]
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return [FileRecord(path, entry["bytes"], entry["xxh3_128"]) for path, entry in manifest["files"].items()], []
    except OSError as error:
        return [], [Damage(MANIFEST, f"cannot be read ({error.strerror})")]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [], [Damage(MANIFEST, "is not a manifest of this program")]


def check_sizes(folder: Path, records: Iterable[FileRecord]) -> list[Damage]:
    """Files that are missing, truncated or extended. Reads no content."""
    damages = []
    for record in records:
        try:
            found = (folder / record.path).stat().st_size
        except OSError as error:
            damages.append(Damage(record.path, "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"))
            continue
        if found != record.bytes:
            damages.append(Damage(record.path, f"has {found:,} bytes instead of {record.bytes:,}"))
    return damages


def check_names(folder: Path, records: Iterable[FileRecord]) -> list[Damage]:
    """Files that the manifest does not know: readers go by names. Hidden ones are no part of a checkpoint (file systems and desktops leave some)."""
    extra = sorted(set(content(folder)) - {record.path for record in records})
    return [Damage(path, "is not in the manifest") for path in extra if not any(part.startswith(".") for part in Path(path).parts)]


def check_content(folder: Path, records: Iterable[FileRecord]) -> list[Damage]:
    """Files whose bytes are not those that were written."""
    damages = []
    for record in records:
        try:
            if checksum(folder / record.path) != record.xxh3_128:
                damages.append(Damage(record.path, "does not have the checksum in the manifest"))
        except OSError as error:
            damages.append(Damage(record.path, f"cannot be read ({error.strerror})"))
    return damages


def inspect(folder: Path, *, contents: bool = True) -> list[Damage]:
    """Everything that is wrong with a checkpoint folder, on one process; empty for a complete one. `contents`: read and hash every file."""
    records, damages = read_manifest(folder)
    damages = damages or check_sizes(folder, records) + check_names(folder, records)
    return damages or (check_content(folder, records) if contents else [])


def complaint(folder: Path, damages: list[Damage]) -> str:
    """What is wrong with a folder that should be a checkpoint, as the beginning of a sentence."""
    if not any((folder / name).exists() for name in (COMPLETE, MANIFEST, TRAIN_STATE, ZERO)):
        return f"{folder} is not a checkpoint (it has neither {COMPLETE} nor {TRAIN_STATE})"
    shown = ", ".join(map(str, damages[:3])) + (f", and {len(damages) - 3} more files" if len(damages) > 3 else "")
    return f"checkpoint {folder} is damaged: {shown}"


def remedy(trouble: str, place: Path) -> str:
    """What a person can do where the disk refused with the words `trouble`, as part of a sentence."""
    no_space = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
    if any(words in trouble for words in (*no_space, *WRITER_WORDS)):
        return f"make space there ({free_space(place)})"
    return "check the path and its permissions"


def free_space(path: Path) -> str:
    """Free and total space of the file system that holds `path`, for a message."""
    while not path.exists():
        path = path.parent
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return "free space unknown"
    return f"{size(usage.free)} of {size(usage.total)} free" if usage.total else "free space unknown"


def size(count: int) -> str:
    """Bytes for people, with a decimal unit."""
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= length:
            return f"{count / length:.1f} {unit}"
    return f"{count} bytes"
