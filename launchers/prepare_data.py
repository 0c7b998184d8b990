"""Prepare text for pretraining: python launchers/prepare_data.py [tokenize | train_tokenizer | plays] KEY=VALUE … (--help lists them)."""

import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide the packages behind its scripts

from omegaconf import OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from data_prep.tasks import TASKS  # noqa: E402
from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import compose_arguments, typed  # noqa: E402
from pretrain.errors import UserError  # noqa: E402


def run(tree: dict[str, Any]) -> None:
    """Run the task of a composed configuration."""
    task = str(tree.pop("task"))
    missing = [key for key, value in tree.items() if value == "???"]
    if missing:
        raise UserError(f"{task} needs {' and '.join(f'{key}=…' for key in missing)}; --help shows every key")
    kind, action = TASKS[task]
    action(typed(kind, tree))


def main() -> int:
    """Compose, then run the task; the first word may be its name alone."""
    if len(sys.argv) > 1 and "=" not in sys.argv[1] and not sys.argv[1].startswith("-"):
        sys.argv[1] = f"prepare_data={sys.argv[1]}"
    composed = compose_arguments("prepare_data")
    if composed is not None:
        try:
            tree = OmegaConf.to_container(composed, resolve=True)
        except OmegaConfBaseException as error:
            raise UserError(str(error)) from error
        assert isinstance(tree, dict)
        run({str(key): value for key, value in tree.items()})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
