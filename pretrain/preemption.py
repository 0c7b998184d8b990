"""Requests to stop a run: signals, and a flag file. And the marker that tells a batch script to start the job again.

SIGTERM and SIGUSR1 (what batch systems send), SIGINT (Ctrl-C) and a file runs/NAME/PREEMPT ask a run to save and leave. A rank only notes
the request: all ranks agree on it at their next step boundary (engine.zero.Engine.agree), so none leaves the others waiting. Before the first
step there is nothing to save, and the request ends the process at once, by an exception. A thread sees to the cases in which Python cannot
run a signal handler, because the main thread waits in compiled code.

Signals belong to the process, so there is one listener per process. No torch here: it listens before torch is imported.
"""

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PREEMPTED_EXIT = 75
"""EX_TEMPFAIL of sysexits.h: saved, or nothing to save; start the same command again."""
LOST_PEER_EXIT = 69
"""This rank ended because another one had (pretrain.command_line)."""
INTERRUPTED_EXIT = 130
"""Ctrl-C: saved as well, but somebody stopped the run on purpose."""
FLAG = "PREEMPT"
"""In the run's directory: whoever makes this file asks the run to stop."""
MARKER = "REQUEUE"
"""In the run's directory: the run was preempted and wants to go on. Removed by the next start."""
REASONS = ("SIGTERM", "SIGUSR1", FLAG, "SIGINT")
"""What a request may come from, the first that occurs counting."""
FLAG_SECONDS = 1.0
"""How often each of up to 100 ranks looks for the flag file; more ranks look less often, for the sake of a shared file system."""
ONE_PRESS_SECONDS = 1.0
"""Under torchrun one Ctrl-C arrives twice, from the terminal and from torchrun."""
PATIENCE_SECONDS = 5.0
"""For the main thread to obey, before the thread ends the process."""
CLOSING = "closing"
"""File in torchrun's scratch folder: its SIGTERM means that another rank has failed (pretrain.agent)."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(BaseException):
    """A request to stop before the first step. Not an Exception: nothing on the way should mistake it for a failure."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def exit_code(reason: str) -> int:
    """What a process leaves with that was stopped for this reason."""
    return INTERRUPTED_EXIT if reason == "SIGINT" else PREEMPTED_EXIT


class Requests:
    """The requests that this process has received.

    watch    begin to look for the flag file of a run.
    defer    from then on a signal is only noted; before that it raises Stopped.
    over     nobody listens any more.
    """

    def __init__(self) -> None:
        self._signals: dict[str, float] = {}
        self._flag: Path | None = None
        self._looked, self._interval, self._flagged = -math.inf, FLAG_SECONDS, False
        self._deferred = False
        self.over = threading.Event()
        self._since = time.time()

    def watch(self, run_dir: Path, ranks: int) -> None:
        """Look for `run_dir`/PREEMPT, as one of so many ranks. One that is older than this process was meant for an earlier start, and is removed."""
        self._flag, self._interval = run_dir / FLAG, max(FLAG_SECONDS, ranks * FLAG_SECONDS / 100)
        with contextlib.suppress(OSError):
            if self._flag.stat().st_mtime < self._since - 1:
                self._flag.unlink()

    def defer(self) -> None:
        """From now on, note requests and interrupt nothing: neither training nor the tidying up after it."""
        self._deferred = True

    @property
    def asked(self) -> bool:
        """Whether this rank has been asked to stop."""
        return any(self.votes())

    def votes(self) -> list[int]:
        """1 for each of REASONS that this rank knows of; the ranks' sum is what they agree on."""
        if self._flag is not None and not self._flagged and time.monotonic() - self._looked >= self._interval:
            self._looked = time.monotonic()
            self._flagged = self._flag.exists()
        return [int(self._flagged if reason == FLAG else reason in self._signals) for reason in REASONS]

    def note(self, number: int) -> None:
        """A signal has arrived, in the main thread. Raises Stopped or KeyboardInterrupt where it must not wait."""
        if number == signal.SIGTERM and _torchrun_is_closing():
            os._exit(LOST_PEER_EXIT)
        name, now = signal.Signals(number).name, time.monotonic()
        first = self._signals.setdefault(name, now)
        if self._deferred:
            if name == "SIGINT" and now - first > ONE_PRESS_SECONDS:
                raise KeyboardInterrupt  # the second Ctrl-C: leave without saving
            return
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # the tidying up must not be disturbed
        raise KeyboardInterrupt if name == "SIGINT" else Stopped(name)

    def hurry(self, number: int) -> int | None:
        """The exit code with which the process must end, if the main thread does not obey a signal within PATIENCE_SECONDS; None: let it be."""
        if _torchrun_is_closing():
            return LOST_PEER_EXIT
        first = self._signals.get("SIGINT", time.monotonic())
        again = number == signal.SIGINT and time.monotonic() - first > ONE_PRESS_SECONDS
        return exit_code(signal.Signals(number).name) if again or not self._deferred else None


_current = Requests()


def current() -> Requests:
    """This process's requests; without `listen`, no signal reaches them."""
    return _current


@contextlib.contextmanager
def listening() -> Iterator[Requests]:
    """Take over SIGTERM, SIGUSR1 and SIGINT, in the main thread; under torchrun, also die with it."""
    global _current
    _current = requests = Requests()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.signal(number, lambda got, _: requests.note(got)) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_hurry, args=(requests, reading), name="signals", daemon=True).start()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    try:
        yield requests
    finally:
        requests.over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writing)  # ends the thread


def _hurry(requests: Requests, reading: int) -> None:
    """The thread: ends the process where its main thread waits in compiled code and so runs no signal handler."""
    while numbers := os.read(reading, 64):
        wanted = {number for number in numbers if number in _SIGNALS}
        for number in wanted:
            code, patience = requests.hurry(number), 0 if _torchrun_is_closing() else PATIENCE_SECONDS
            if code is not None and not requests.over.wait(patience):
                os._exit(code)
    os.close(reading)


def _torchrun_is_closing() -> bool:
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return error_file is not None and (Path(error_file).parents[1] / CLOSING).exists()


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends, however that ends: no rank trains on after its torchrun.

    Only Linux has this (prctl, PR_SET_PDEATHSIG); elsewhere a thread looks once a second.
    """
    parent = os.getppid()
    if hasattr(ctypes.CDLL(None), "prctl"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended in between
            os._exit(PREEMPTED_EXIT)
        return
    threading.Thread(target=_outlive_no_parent, args=(parent,), name="parent", daemon=True).start()


def _outlive_no_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(PREEMPTED_EXIT)


# ---- the run directory ------------------------------------------------------------------------------------------------------------------


def agreed(votes: Sequence[int]) -> str | None:
    """The reason that the ranks' summed votes stand for; None: go on."""
    return next((reason for reason, count in zip(REASONS, votes, strict=True) if count), None)


def clear_marker(run_dir: Path) -> None:
    """A start removes the marker of the stop before it."""
    (run_dir / MARKER).unlink(missing_ok=True)


def leave_marker(run_dir: Path, reason: str, step: int) -> None:
    """Ask for another start, unless somebody stopped the run by hand, and take back the flag, which has been obeyed.

    The marker is JSON: step (done and saved), reason, time (Unix seconds), host. It appears whole or not at all.
    """
    with contextlib.suppress(FileNotFoundError):
        (run_dir / FLAG).unlink()
    if reason == "SIGINT":
        return
    temporary = run_dir / f"{MARKER}.partial"
    temporary.write_text(json.dumps({"step": step, "reason": reason, "time": time.time(), "host": socket.gethostname()}) + "\n")
    temporary.replace(run_dir / MARKER)
