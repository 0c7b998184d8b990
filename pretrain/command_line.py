"""How every launcher ends: a user's mistake is one sentence and exit code 64, printed once however many ranks make it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pretrain.errors import UserError

USER_ERROR_EXIT = 64
"""EX_USAGE of sysexits.h; pretrain.quiet keeps torchrun silent about ranks that leave with it."""

ANSWERED_NO_EXIT = 65
"""The same for a command that answers a question, under torchrun: no is no failure to report at length."""


def answer(yes: bool) -> int:
    """Exit code of a command that has answered a question in words: 0 for yes, 1 for no. torchrun leaves with 1 for any code of its ranks."""
    return 0 if yes else ANSWERED_NO_EXIT if "TORCHELASTIC_ERROR_FILE" in os.environ else 1


def run_command(main: Callable[[], int]) -> int:
    """The exit code of `main`. A UserError becomes `error: …` on standard error; other exceptions keep their traceback."""
    try:
        return main()
    except UserError as error:
        if _first_to_report():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR_EXIT
    except KeyboardInterrupt:
        return 130


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
