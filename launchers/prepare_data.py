"""Prepare text for pretraining, and see what a run read: python launchers/prepare_data.py [TASK] KEY=VALUE … (--help lists the tasks)."""

import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide the packages behind its scripts

from data_prep.tasks import TASKS  # noqa: E402
from pretrain.audit.tasks import RUN_TASKS  # noqa: E402
from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import compose_arguments, resolved, typed  # noqa: E402
from pretrain.errors import UserError, nearest  # noqa: E402

ALL_TASKS = TASKS | RUN_TASKS
PATHS = ("input", "corpus", "against")
"""Keys that take a path or a list of them."""


def choose_task(arguments: list[str]) -> list[str]:
    """The arguments with the task, which may be the first word alone or task=NAME, as Hydra's group. UserError for an unknown one."""
    words = [f"task={arguments[0]}", *arguments[1:]] if arguments and not arguments[0].startswith("-") and "=" not in arguments[0] else arguments
    chosen = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("task=")]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} are two tasks; give one")
    for name in chosen:
        if name not in ALL_TASKS:
            raise UserError(f"there is no task {name}{nearest(name, list(ALL_TASKS))}")
    if chosen == ["audit"] and any(word.startswith(("step=", "run=")) for word in words):
        chosen = ["audit_step"]  # of what a run read, not of a folder
    return [f"prepare_data={chosen[0]}" if word.lstrip("+").startswith("task=") else word for word in words]


def run(tree: dict[str, Any]) -> None:
    """Run the task of a composed configuration."""
    task = str(tree.pop("task"))
    missing = [key for key, value in tree.items() if value == "???"]
    if missing:
        raise UserError(f"{task} needs {' and '.join(f'{key}=…' for key in missing)}; --help shows every key")
    for key in PATHS:
        value = tree.get(key, "")
        if value is not None and not all(isinstance(path, str) for path in (value if isinstance(value, list) else [value])):
            raise UserError(f"{key}={value} must be a path, or a list of them: {key}=A or {key}=[A,B]; quote a number: {key}=\"'5'\"")
    kind, action = ALL_TASKS[task]
    action(typed(kind, tree))


def main() -> int:
    """Compose, then run the task."""
    sys.argv[1:] = choose_task(sys.argv[1:])
    composed = compose_arguments("prepare_data")
    if composed is not None:
        run(resolved(composed))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="use fewer workers=, a smaller max_bytes=, or smaller input files"))
