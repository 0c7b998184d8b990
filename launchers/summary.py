"""What a run came to: `summary.py RUN_DIR VALIDATION_CORPUS` prints it, `summary.py --finished RUN_DIR` answers by its exit status."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console  # noqa: E402

from pretrain.command_line import run_command  # noqa: E402
from pretrain.errors import UserError  # noqa: E402
from pretrain.evaluation.summary import finished, sample_texts, summary_table  # noqa: E402


class Parser(argparse.ArgumentParser):
    """Refuses in a sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists what there is")


def main() -> int:
    """Read the arguments, print; with --finished 0 where the last step has been validated, and 1 where not."""
    parser = Parser(prog="summary.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--finished", action="store_true", help="print nothing; exit status 0 if the run's last step has been validated, else 1")
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="runs/NAME")
    parser.add_argument("corpus", type=Path, nargs="?", metavar="VALIDATION_CORPUS", help="the prepared text that it was validated on")
    given = parser.parse_args()
    if given.finished:
        return int(not finished(given.run))
    Console(width=None if sys.stdout.isatty() else 140).print(summary_table(given.run, given.corpus))
    for number, text in enumerate(sample_texts(given.run), start=1):
        print(f"\n--- sample {number}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="free some memory"))
