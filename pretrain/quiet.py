"""torchrun without its failure report when ranks left because of a user's mistake, which they have already explained in one sentence, or
were killed by a signal, which one sentence explains better; without a stack trace when it was told to stop; and with an exit code that says
which: 64 for a mistake, 1 for an answer of no, 75 for ranks that saved when they were told to stop (130 after Ctrl-C), 70 for a hang, 128 + the
signal that killed a rank, 69 on a machine whose ranks only lost those of another.

`import torch` calls `install` in every process of this environment (entry point `torch.backends`), torchrun's agent among them. It does
nothing anywhere else, imports nothing heavy, and never raises: it must not stand in the way of other programs that use torch.
"""

import atexit
import logging
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from pretrain import agent

EXPLAINED = 64
"""Exit code of a rank that has explained itself (pretrain.command_line.USER_ERROR_EXIT)."""
ANSWERED_NO = 65
"""Exit code of a rank whose command has answered no, in words (pretrain.command_line.ANSWERED_NO_EXIT)."""
LOST_PEER = 69
"""Exit code of a rank that ended because another one had (pretrain.command_line.LOST_PEER_EXIT)."""
HUNG = 70
"""Exit code of a rank whose watchdog found that the run hangs (pretrain.telemetry.watchdog.HUNG_EXIT)."""
PREEMPTED, INTERRUPTED = 75, 130
"""Exit codes of a rank that was told to stop (pretrain.preemption)."""
STOPPED = -signal.SIGTERM
"""Exit code of a rank that torchrun stopped because another one had left."""

_LEAVES_WITH = {EXPLAINED: EXPLAINED, ANSWERED_NO: 1, HUNG: HUNG, PREEMPTED: PREEMPTED, INTERRUPTED: INTERRUPTED, LOST_PEER: LOST_PEER}
"""Exit code of an explained rank -> torchrun's, the first that occurs."""
_WHY = {
    signal.SIGKILL: (
        "most often the kernel does that to the largest process when the memory is full (dmesg, or the batch system's log, says so): use a smaller "
        "batch.micro_sequences, or more ranks for one network with parallel.tensor, parallel.pipeline or parallel.zero_stage=3"
    ),
    signal.SIGBUS: "most often a full /dev/shm, or a data file that was cut off while it was read: free space there, and check the corpus",
    signal.SIGTERM: "somebody, or the batch system, stopped it",
    signal.SIGINT: "somebody stopped it",
    signal.SIGHUP: "its terminal was closed",
}
_FAULT = "a fault in compiled code and not in the configuration, about which the lines above may say more"
_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")

_exit_code: int | None = None
"""What this process leaves with instead of Python's 1."""


def install() -> None:
    """Quietens this process if it is torchrun's agent."""
    try:
        if _is_torchrun():
            _silence_exceptions()
            for name in _LOGGERS:
                logging.getLogger(name).addFilter(_worth_logging)
            atexit.register(_leave)
            if _trains():
                agent.teach(frozenset({EXPLAINED, ANSWERED_NO, PREEMPTED, INTERRUPTED}))
    except Exception:  # noqa: BLE001, S110  # a cosmetic helper must never break `import torch`
        pass


def _is_torchrun() -> bool:
    name = Path(sys.argv[0]).name if getattr(sys, "argv", None) else ""
    if name in ("torchrun", "torchrun.exe"):
        return True
    # `python -m torch.distributed.run` imports torch before it sets argv[0].
    return name == "-m" and "torch.distributed.run" in sys.orig_argv


def _runs_our_launcher() -> bool:
    return any(Path(argument).parent.name == "launchers" and argument.endswith(".py") for argument in sys.argv)


def _trains() -> bool:
    return any(Path(argument).parts[-2:] == ("launchers", "pretrain.py") for argument in sys.argv)


def _silence_exceptions() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        global _exit_code
        if kind.__name__ == "SignalException":  # Ctrl-C, or a scheduler's signal: nothing failed that a stack could explain
            stopped_by = signal.Signals(getattr(error, "sigval", signal.SIGTERM))
            print(f"torchrun: stopped by {stopped_by.name}", file=sys.stderr)
            _exit_code = 128 + stopped_by
        elif code := _explained(error) or _told(error):
            _exit_code = code
        elif (killed := _killed(error)) and _runs_our_launcher():
            rank, failure = killed
            print(_sentence(rank, failure.pid, failure.exitcode), file=sys.stderr)
            _exit_code = 128 - failure.exitcode
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _leave() -> None:
    if _exit_code is not None:  # Python has no other way to change the exit code after an exception
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


def _failures(error: BaseException) -> dict[int, Any]:
    """Rank -> failure, as torchrun reports them; empty for other exceptions."""
    return getattr(error, "failures", {}) if type(error).__name__ == "ChildFailedError" else {}


def _explained(error: BaseException) -> int:
    """The exit code, where every rank that failed had explained itself or ended because of one that had; else 0."""
    codes = {failure.exitcode for failure in _failures(error).values()}
    if not codes <= {*_LEAVES_WITH, STOPPED}:
        return 0
    return next((leaves_with for code, leaves_with in _LEAVES_WITH.items() if code in codes), 0)


def _told(error: BaseException) -> int:
    """The exit code, where every rank that failed was ended by the signal that was handed on to it, before it listened; else 0."""
    codes = {failure.exitcode for failure in _failures(error).values()}
    if not agent.told or not codes or not codes <= {-number for number in agent.told} | _LEAVES_WITH.keys() | {STOPPED}:
        return 0
    if not codes & _LEAVES_WITH.keys():  # no rank has said anything
        print(f"torchrun: stopped by {agent.told[0].name} before its ranks had begun", file=sys.stderr)
    return INTERRUPTED if agent.told[0] == signal.SIGINT else PREEMPTED


def _killed(error: BaseException) -> tuple[int, Any] | None:
    """The rank that a signal ended, where that explains the other failures: those of ranks that missed it, or were stopped because of it."""
    failures = sorted(_failures(error).items(), key=lambda item: item[1].timestamp)
    signalled = [(rank, failure) for rank, failure in failures if failure.exitcode < 0]
    first = [(rank, failure) for rank, failure in signalled if failure.exitcode != STOPPED] or signalled
    # After an exception in one rank others may abort, but the kernel kills for no such reason.
    raised = any(failure.exitcode > 0 and failure.exitcode != LOST_PEER for _, failure in failures)
    if not first or (raised and first[0][1].exitcode != -signal.SIGKILL):
        return None
    return first[0]


def _sentence(rank: int, process: int, code: int) -> str:
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have no names
        name = f"signal {-code}"
    why = _WHY.get(-code, _FAULT)  # type: ignore[call-overload]  # the keys are integers too
    return (
        f"error: rank {rank} (process {process}) was killed by {name}, exit code {code}: {why}; "
        "the same command continues from the newest checkpoint, if there is one"
    )


def _worth_logging(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if message.startswith(tuple(f"failed (exitcode: {code})" for code in _LEAVES_WITH)):
        return False
    if message.startswith("failed (exitcode: -") and _runs_our_launcher():
        return False
    stopping = message.startswith("Sending process") and message.endswith(("SIGTERM", "SIGINT"))
    return not (stopping or (message.startswith("Received") and "death signal" in message))
