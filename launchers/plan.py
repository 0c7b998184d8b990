"""python launchers/plan.py +model=PRESET plan.ranks=64 plan.memory_gib=80 [key=value …]: what a run would cost, on this machine or another."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not launchers/, whose files would shadow packages

from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import command_from_arguments  # noqa: E402
from pretrain.plan.plan import make_plan  # noqa: E402
from pretrain.plan.table import show  # noqa: E402


def main() -> int:
    """Compose, plan, print; missing data is no obstacle."""
    command = command_from_arguments()
    if command is not None:
        show(make_plan(command.run, command.plan))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="plan a smaller network"))
