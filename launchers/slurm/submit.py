"""python launchers/slurm/submit.py [TASK] +model=PRESET cluster=CLUSTER nodes=N [key=value …] [--dry-run]: a run as a Slurm job.

Without a task it submits the run; finetune submits one of launchers/finetune.py; preflight checks the nodes of one job; drill rehearses a
preemption.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose files would shadow packages

from launchers.slurm.tasks import TASKS, fine_tuning  # noqa: E402
from pretrain.cluster.submission import submission_from_arguments  # noqa: E402
from pretrain.command_line import run_command  # noqa: E402
from pretrain.errors import UserError, nearest  # noqa: E402

DRY = "--dry-run"


def task_and_words(words: list[str]) -> tuple[str, list[str], bool]:
    """The task, the words that remain for the configuration, and whether nothing is to be submitted. Raises UserError for an unknown task."""
    dry, words = DRY in words, [word for word in words if word != DRY]
    task = words.pop(0) if words and not words[0].startswith(("-", "+", "~")) and "=" not in words[0] else "train"
    if task not in TASKS:
        raise UserError(f"there is no task {task}{nearest(task, list(TASKS))}")
    if task in ("preflight", "drill") and not any(word.lstrip("+").startswith("model=") for word in words):
        words.insert(0, "+model=mdlm_tiny")
    return task, words, dry


def main() -> int:
    """Compose, check, submit."""
    task, sys.argv[1:], dry = task_and_words(sys.argv[1:])
    submission = submission_from_arguments("submit_finetune", fine_tuning) if task == "finetune" else submission_from_arguments()
    return 0 if submission is None else TASKS[task](submission, dry)


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="plan a smaller network"))
