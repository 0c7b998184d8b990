"""Convert checkpoints: python launchers/convert.py [hf | checkpoint | universal | zero | weights] KEY=VALUE … (--help lists them)."""

import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide the packages behind its scripts

from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import compose_arguments, resolved, typed  # noqa: E402
from pretrain.convert.tasks import TASKS, action  # noqa: E402
from pretrain.errors import UserError, nearest  # noqa: E402


def choose_task(arguments: list[str]) -> list[str]:
    """The arguments with the task as Hydra's group. UserError where the first word is none."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    name = arguments[0].removeprefix("task=")
    if name not in TASKS:
        raise UserError(f"there is no task {name}{nearest(name, list(TASKS))}; write convert.py TASK KEY=VALUE …")
    return [f"convert={name}", *arguments[1:]]


def run(tree: dict[str, Any]) -> None:
    """Run the task of a composed configuration."""
    task = str(tree.pop("task"))
    missing = [key for key, value in tree.items() if value == "???"]
    if missing:
        raise UserError(f"{task} needs {' and '.join(f'{key}=…' for key in missing)}; --help shows every key")
    if "from" in tree:  # which Python keeps for itself
        tree["source"] = tree.pop("from")
    action(task)(typed(TASKS[task][0], tree))


def main() -> int:
    """Compose, then run the task."""
    sys.argv[1:] = choose_task(sys.argv[1:])
    composed = compose_arguments("convert")
    if composed is not None:
        run(resolved(composed))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="convert on a machine with more memory: the gate holds the network twice, in fp32"))
