"""How every launcher ends: a user's mistake is one sentence and exit code 64, printed once however many ranks make it."""

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from pretrain import preemption
from pretrain.errors import UserError
from pretrain.redaction import redact

USER_ERROR_EXIT = 64
"""EX_USAGE of sysexits.h; pretrain.quiet keeps torchrun silent about ranks that leave with it."""

ANSWERED_NO_EXIT = 65
"""The same for a rank of a command that has answered no; torchrun then leaves with 1."""
LOST_PEER_EXIT = 69
"""EX_UNAVAILABLE: this rank ended because another one had, whose own words, or torchrun's, say why."""
_LOST_PEER = re.compile(r"gloo.*(closed by peer|reset by peer|Broken pipe)|ncclRemoteError|remote process exited", re.DOTALL)


def answer(yes: bool) -> int:
    """Exit code of a command that has answered a question in words: 0 for yes, 1 for no."""
    return 0 if yes else ANSWERED_NO_EXIT if "TORCHELASTIC_ERROR_FILE" in os.environ else 1


def run_command(main: Callable[[], int], *, when_memory_is_full: str, stoppable: bool = False) -> int:
    """The exit code of `main`. A UserError becomes `error: …` on standard error, and so does memory that does not suffice.

    when_memory_is_full  what the user can make smaller. Other exceptions keep their traceback, but for the secrets in it.
    stoppable            the command listens to preemption.Requests; before it does, a request to stop ends it with exit code 75.
    """
    sys.excepthook = _traceback
    try:
        with preemption.listening() if stoppable else _one_interrupt():
            return main()
    except UserError as error:
        return _refuse(str(error))
    except preemption.Stopped as stopped:
        return _refuse(f"stopped by {stopped.reason} before the first step: nothing had to be saved", preemption.PREEMPTED_EXIT, kind="stop")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except Exception as error:
        if _memory_is_full(error):
            return _refuse(f"the memory does not suffice ({' '.join(str(error).split())[:200] or 'out of memory'}): {when_memory_is_full}")
        if _LOST_PEER.search(str(error)):
            return _refuse(f"rank {os.environ.get('RANK', '0')} lost its connection to another rank, which ended before it", LOST_PEER_EXIT)
        raise


def _traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def _refuse(sentence: str, code: int = USER_ERROR_EXIT, kind: str = "error") -> int:
    if _first_to_report():
        print(f"{kind}: {redact(sentence)}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Under torchrun a Ctrl-C arrives twice, from the terminal and from torchrun: the second must not interrupt the tidying up after the first."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return

    def interrupt(*_: object) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)


def _memory_is_full(error: Exception) -> bool:
    """Python's, CUDA's (by name: torch may not be here) and PyTorch's CPU allocator's ways to say so."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def is_main_rank() -> bool:
    """Whether this process speaks for the run."""
    return os.environ.get("RANK", "0") == "0"


def _first_to_report() -> bool:
    """Under torchrun, the first rank of this node to fail: mistakes are often made by all ranks, but not always by rank 0."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return is_main_rank()
    try:
        # torchrun's scratch folder of this attempt, shared by the node's ranks and removed at the end.
        with (Path(error_file).parents[1] / "reported").open("x"):
            return True
    except FileExistsError:
        return False
    except OSError:
        return is_main_rank()
