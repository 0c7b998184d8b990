"""torchrun without its failure report when ranks left because of a user's mistake, which they have already explained in one sentence, and
without a stack trace when it was told to stop.

`import torch` calls `install` in every process of this environment (entry point `torch.backends`), torchrun's agent among them. It does
nothing anywhere else, imports nothing heavy, and never raises: it must not stand in the way of other programs that use torch.
"""

import logging
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

EXPLAINED = 64
"""Exit code of a rank that has explained itself (pretrain.command_line.USER_ERROR_EXIT)."""
ANSWERED_NO = 65
"""Exit code of a rank whose command has answered no, in words (pretrain.command_line.ANSWERED_NO_EXIT): torchrun's own is then 1."""
STOPPED = -15
"""Exit code of a rank that torchrun stopped because another one had left."""


def install() -> None:
    """Quietens this process if it is torchrun's agent."""
    try:
        if _is_torchrun():
            _silence_exceptions()
            _silence_log()
    except Exception:  # noqa: BLE001, S110  # a cosmetic helper must never break `import torch`
        pass


def _is_torchrun() -> bool:
    name = Path(sys.argv[0]).name if getattr(sys, "argv", None) else ""
    if name in ("torchrun", "torchrun.exe"):
        return True
    # `python -m torch.distributed.run` imports torch before it sets argv[0].
    return name == "-m" and "torch.distributed.run" in sys.orig_argv


def _silence_exceptions() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if kind.__name__ == "SignalException":  # Ctrl-C, or a scheduler's signal: nothing failed that a stack could explain
            print(f"torchrun: stopped by {signal.Signals(getattr(error, 'sigval', signal.SIGTERM)).name}", file=sys.stderr)
        elif not _explained(error):
            before(kind, error, trace)

    sys.excepthook = hook


def _explained(error: BaseException) -> bool:
    """Whether every rank that failed had explained itself or was stopped because of that."""
    if type(error).__name__ != "ChildFailedError":
        return False
    codes = {failure.exitcode for failure in getattr(error, "failures", {}).values()}
    return bool(codes & {EXPLAINED, ANSWERED_NO}) and codes <= {EXPLAINED, ANSWERED_NO, STOPPED}


def _silence_log() -> None:
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_worth_logging)


def _worth_logging(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    explained = message.startswith((f"failed (exitcode: {EXPLAINED})", f"failed (exitcode: {ANSWERED_NO})"))
    return not (explained or (message.startswith("Sending process") and "SIGTERM" in message))
