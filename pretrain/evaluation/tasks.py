"""The tasks of launchers/evaluate.py, and how a command line chooses one."""

from pretrain.errors import UserError, nearest

TASKS = ("likelihood", "gsm8k")
"""The first is what a command without task= does."""


def choose_task(arguments: list[str]) -> list[str]:
    """The arguments with the task as Hydra's group: `task=NAME` anywhere, or NAME as the first word. Raises UserError for a task that is none."""
    if arguments and "=" not in arguments[0] and not arguments[0].startswith(("-", "+", "~")):
        arguments = [f"task={arguments[0]}", *arguments[1:]]
    for argument in arguments:
        name = argument.removeprefix("task=")
        if name != argument and name not in TASKS:
            raise UserError(f"there is no task={name}{nearest(name, TASKS)}; write evaluate.py task={' or task='.join(TASKS)}")
    return [f"evaluate={argument.removeprefix('task=')}" if argument.startswith("task=") else argument for argument in arguments]
