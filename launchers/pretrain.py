"""torchrun launchers/pretrain.py +model=PRESET [key=value …]: trains, or continues, the run that the configuration describes.

check=true plans it and stops; selftest=true overfits one batch of it instead, and says whether preset, machine and layout can learn; with
both it is planned first. verify=resume, without torchrun, proves that it resumes.
"""

import sys
from pathlib import Path

# Python puts launchers/ first, where `import pretrain` would find this very file; replace it, so that nothing here shadows a library either.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.command_line import answer, is_main_rank, run_command  # noqa: E402
from pretrain.compose import command_from_arguments  # noqa: E402
from pretrain.convert.origin import require_origin  # noqa: E402
from pretrain.plan.plan import check_device, check_ready, make_plan  # noqa: E402
from pretrain.plan.table import show  # noqa: E402


def main() -> int:
    """Compose, check, train."""
    command = command_from_arguments()
    if command is None:
        return 0
    if command.check and is_main_rank():
        show(make_plan(command.run, command.plan))
    if command.verify is not None:
        from pretrain.verify import run as prove

        return answer(prove(command.run, command.verify))
    if command.selftest is not None:
        check_device(command.run, command.plan)
        from pretrain.selftest import run as test

        return answer(test(command.run, assumed_vocabulary=command.plan.vocabulary, steps=command.selftest))
    check_ready(command.run, command.plan)
    require_origin(command.run)
    if command.check:
        return 0
    from pretrain.trainer import run  # torch, megatron-core and deepspeed take seconds: not before the configuration holds

    return run(command.run)


if __name__ == "__main__":
    SMALLER = "use a smaller batch.micro_sequences, or more ranks with parallel.tensor, parallel.pipeline or parallel.zero_stage=3"
    sys.exit(run_command(main, when_memory_is_full=SMALLER, stoppable=True))
