"""A disk that fails on purpose: the n-th operation below a folder called `checkpoints` is refused, killed at, delayed or held back."""

import builtins
import io
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

CALLS = ("open", "fsync", "rename", "mkdir", "unlink", "rmdir")


class FaultyDisk:
    """Use it as a context manager; every thread of the process meets it.

    on_call  receives the number of each operation (from 1) before it happens, and may raise, kill or wait. Every write to a file counts.
    """

    def __init__(self, on_call: Callable[[int], None] = lambda number: None) -> None:
        self._on_call, self._lock, self._patch = on_call, threading.Lock(), pytest.MonkeyPatch()
        self.seen: list[str] = []

    def __enter__(self) -> "FaultyDisk":
        for name in CALLS:
            self._patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        opened = self._opening(builtins.open)
        self._patch.setattr(builtins, "open", opened)
        self._patch.setattr(io, "open", opened)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def meet(self, name: str, path: object) -> None:
        """One operation."""
        if "/checkpoints" not in str(path):
            return
        with self._lock:
            self.seen.append(f"{name} {path}")
            number = len(self.seen)
        self._on_call(number)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            place = kwargs.get("dir_fd")
            folder = f"{_path_of(place)}/" if place is not None else ""
            self.meet(name, _path_of(target) if isinstance(target, int) else f"{folder}{target}")
            return original(target, *args, **kwargs)

        return call

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            self.meet("open", target)
            file = original(target, *args, **kwargs)
            return _File(file, target, self) if "/checkpoints" in str(target) and file.writable() else file

        return call


class _File:
    """A file whose writes are operations, too."""

    def __init__(self, file: Any, path: object, disk: FaultyDisk) -> None:
        self._file, self._path, self._disk = file, path, disk

    def write(self, content: Any) -> Any:
        self._disk.meet("write", self._path)
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def refusing(at: int, code: int, *, forever: bool = False) -> Callable[[int], None]:
    """The n-th operation, or all from there on, fail as the operating system would let them."""

    def refuse(number: int) -> None:
        if number == at or (forever and number > at):
            raise OSError(code, os.strerror(code), "some/file")

    return refuse


def slow(seconds: float) -> Callable[[int], None]:
    """Every operation takes longer."""
    return lambda number: time.sleep(seconds)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
