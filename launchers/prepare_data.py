"""Prepare text for pretraining, and see what a run read: python launchers/prepare_data.py [TASK] KEY=VALUE … (--help lists the tasks)."""

import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide the packages behind its scripts

from omegaconf import OmegaConf  # noqa: E402

from data_prep.arguments import prepared, require_path_texts, require_values  # noqa: E402
from data_prep.tasks import TASKS  # noqa: E402
from pretrain.audit.tasks import RUN_TASKS  # noqa: E402
from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import compose_arguments, resolved, typed  # noqa: E402

ALL_TASKS = TASKS | RUN_TASKS


def run(tree: dict[str, Any]) -> None:
    """Run the task of a composed configuration."""
    kind, action = ALL_TASKS[str(tree.pop("task"))]
    tree.pop("root", None)  # of presets, whose sources hold it by now
    require_path_texts(tree)
    action(typed(kind, tree))


def main() -> int:
    """Compose, then run the task."""
    sys.argv[1:] = prepared(sys.argv[1:], ALL_TASKS)
    composed = compose_arguments("prepare_data")
    if composed is not None:
        require_values(str(composed.task), OmegaConf.to_container(composed))
        run(resolved(composed))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="use fewer workers=, a smaller max_bytes=, or smaller input files"))
