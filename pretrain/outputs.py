"""Places that a command writes to: looked at before hours of work go there, and described in one sentence when they refuse."""

import errno
import os
from pathlib import Path

from pretrain.errors import UserError

_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.ENOTDIR: "a file is in the way: choose another output",
    errno.EEXIST: "a file is in the way: choose another output",
    errno.EISDIR: "a folder has that name: choose another output",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "choose an output that you may write to",
    errno.EPERM: "choose an output that you may write to",
    errno.EROFS: "choose an output that you may write to",
}


def cannot_write(path: Path, error: OSError) -> UserError:
    """The sentence for a write that the system refused, with what helps against its reason."""
    advice = _ADVICE.get(error.errno or 0, "choose another output")
    return UserError(f"cannot write {path} ({error.strerror or error}): {advice}")


def require_writable(path: Path, *, folder: bool = False) -> None:
    """Creates nothing. Raises UserError where `path` could not be written as a file (or, with `folder`, be made and filled as a folder)."""
    try:
        refusal = _refusal(path.absolute(), folder)
    except OSError as error:
        raise cannot_write(path, error) from error
    if refusal is not None:
        raise cannot_write(path, OSError(refusal, os.strerror(refusal)))


def _refusal(path: Path, folder: bool) -> int | None:
    """The error number with which writing would fail."""
    if path.is_dir() and not folder:
        return errno.EISDIR
    place = path if folder else path.parent
    while not _is_there(place):
        place = place.parent
    if not place.is_dir():
        return errno.ENOTDIR
    return None if os.access(place, os.W_OK | os.X_OK) else errno.EACCES


def _is_there(path: Path) -> bool:
    """Path.exists, but true for a link to nothing, which is in the way of a folder too."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
