"""One preparation at a time writes a folder."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from data_prep.job import PARTS
from pretrain.errors import UserError
from pretrain.outputs import cannot_write

_POLL_SECONDS = 0.5


@contextlib.contextmanager
def only_writer(output: Path, patience: float = 0.0) -> Iterator[None]:
    """Holds parts/lock; the system frees it when the process ends, however it does. UserError while another holds it for `patience` seconds."""
    path = output / PARTS / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        try:
            _take(descriptor, time.monotonic() + patience)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            raise UserError(f"output {output} is being written by {holder}; wait for it, or end it first") from None
        except OSError:  # a file system without locks: then nothing watches
            pass
        with contextlib.suppress(OSError):  # it only helps the sentence that a second process gets
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_SECONDS)
