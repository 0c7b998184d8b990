"""Reading files that torch.save wrote without running what they may contain.

A pickle can call any function while it is read, and a checksum says nothing about who wrote the file. So nothing here is ever unpickled
freely, not even in a run's own directory: only tensors, plain containers and numbers, and the classes that a caller allows.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pretrain.errors import UserError

Allowed = Sequence[Any]
"""Classes, or pairs of a class and the dotted name under which a file asks for it."""


def read_safely(path: Path, *, allowed: Allowed = (), map_location: Any = "cpu", mmap: bool = False) -> Any:
    """What torch.save wrote to `path`. Raises UserError for an unreadable file, or one that asks for anything that is not allowed."""
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); use another checkpoint") from None
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        calls = foreign_calls(path, allowed)
        if calls:
            raise UserError(_warning(path, calls)) from None
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read ({why}); use another checkpoint") from None


def require_safe(paths: Sequence[Path], allowed: Allowed = ()) -> None:
    """Raises UserError for the first file that read_safely would refuse for what it asks to call, or that is no archive. Reads no tensors.

    For files that ranks read between collectives, where one rank alone must not fail.
    """
    for path in paths:
        try:
            calls = _calls(path, allowed)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error}); use another checkpoint") from None
        except Exception:  # whatever the archive's reader and the disassembler make of forged bytes
            raise UserError(f"{path} cannot be read (torch.save did not write it); use another checkpoint") from None
        if calls:
            raise UserError(_warning(path, calls))


def foreign_calls(path: Path, allowed: Allowed = ()) -> list[str]:
    """Dotted names of functions and classes that a file asks for, and may not have; empty for a file that is none of torch.save."""
    try:
        return _calls(path, allowed)
    except Exception:  # not to be understood, so not to be read either: read_safely says why
        return []


def _calls(path: Path, allowed: Allowed) -> list[str]:
    with torch.serialization.safe_globals(list(allowed)):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def _warning(path: Path, calls: list[str]) -> str:
    return (
        f"{path} asks to run {', '.join(calls[:3])} when it is read, which no checkpoint of this program does, whatever its checksums say: nothing "
        "was run; do not use this checkpoint, and find out who wrote it"
    )
