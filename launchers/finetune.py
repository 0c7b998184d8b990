"""torchrun launchers/finetune.py +model=PRESET init_from=RUN sft.train=PROBLEMS.jsonl [key=value …]: fine-tunes on word problems (GSM8K).

check=true plans the run and stops. grid={KEY:[VALUE,…],…}, with python instead of torchrun, trains a run for every combination.
"""

import sys
from pathlib import Path

# Python puts launchers/ first, where `import pretrain` would find pretrain.py beside this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.command import FORMAT_TEXTS, fine_tuning_tree, refuse_words  # noqa: E402
from finetune.grid import run_grid, taken_grid  # noqa: E402
from finetune.problems import open_problems  # noqa: E402
from pretrain.command_line import is_main_rank, run_command  # noqa: E402
from pretrain.compose import command_from_tree, compose_arguments, resolved  # noqa: E402
from pretrain.convert.origin import require_origin  # noqa: E402
from pretrain.plan.plan import check_data, check_ready, make_plan  # noqa: E402
from pretrain.plan.table import show  # noqa: E402
from pretrain.sampling.config import quoted  # noqa: E402


def main() -> int:
    """Compose, read the problems, check, train."""
    sys.argv[1:] = quoted(sys.argv[1:], FORMAT_TEXTS)
    refuse_words(sys.argv[1:])  # before Hydra answers them in words of its own
    composed = compose_arguments("finetune")
    if composed is None:
        return 0
    tree, grid = taken_grid(fine_tuning_tree(resolved(composed), sys.argv[1:]))
    command = command_from_tree(tree)
    check_data(command.run)
    require_origin(command.run)
    run = open_problems(command.run)
    if command.check and is_main_rank():
        print(run.described, file=sys.stderr)  # a run has it in its log
        show(make_plan(run.config, command.plan))
    if grid is not None:
        return run_grid(run.config, grid, Path(__file__), sys.argv[1:], check=command.check)
    check_ready(run.config, command.plan)
    if command.check:
        return 0
    from pretrain.trainer import run as train  # torch, megatron-core and deepspeed take seconds: not before the configuration holds

    return train(run.config, run.build_samples)


if __name__ == "__main__":
    SMALLER = "use a smaller batch.micro_sequences, or more ranks with parallel.tensor, parallel.pipeline or parallel.zero_stage=3"
    sys.exit(run_command(main, when_memory_is_full=SMALLER, stoppable=True))
