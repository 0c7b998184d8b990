"""The tasks of launchers/evaluate.py, and how a command line chooses one."""

from pretrain.errors import UserError, nearest

TASKS = ("likelihood", "gsm8k")
"""The first is what a command without task= does."""


DATA, COMPOSED = "data", "problems"
"""A key of gsm8k, and its name inside Hydra, for which `data` is a group of pretraining's."""


def choose_task(arguments: list[str]) -> list[str]:
    """The arguments with the task as Hydra's group: `task=NAME` anywhere, or NAME as the first word; and with what Hydra calls `data`.

    Raises UserError for a task that is none.
    """
    if arguments and "=" not in arguments[0] and not arguments[0].startswith(("-", "+", "~")):
        arguments = [f"task={arguments[0]}", *arguments[1:]]
    for argument in arguments:
        name = argument.removeprefix("task=")
        if name != argument and name not in TASKS:
            raise UserError(f"there is no task={name}{nearest(name, TASKS)}; write evaluate.py task={' or task='.join(TASKS)}")
    names = {"task": "evaluate", DATA: COMPOSED}
    split = [(argument, *argument.partition("=")[::2]) for argument in arguments]
    return [f"{names[key]}={value}" if "=" in argument and key in names else argument for argument, key, value in split]
