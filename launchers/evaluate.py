"""python launchers/evaluate.py checkpoint=runs/NAME [likelihood=nelbo|ode draws=… sequences=… …]: the likelihood of held-out text."""

import sys
from pathlib import Path

# Python puts launchers/ first, where `import pretrain` would find pretrain.py beside this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import compose_arguments, resolved, typed  # noqa: E402
from pretrain.evaluation.config import EvaluationConfig  # noqa: E402


def main() -> int:
    """Compose, load, score."""
    composed = compose_arguments("evaluate")
    if composed is None:
        return 0
    config = typed(EvaluationConfig, resolved(composed))
    from pretrain.convert.held_out import HeldOut  # torch takes seconds: not before the configuration holds
    from pretrain.convert.plain_network import open_trained
    from pretrain.sampling.output import SamplingDisplay
    from pretrain.sampling.session import choose_device

    device = choose_device(config.device)
    trained = open_trained(Path(config.checkpoint), config.step)
    held_out = HeldOut(trained, config, device)
    print(f"scoring {trained.folder}, {held_out.describe()}", file=sys.stderr)
    total = len(held_out.numbers()) * trained.run.batch.length
    with SamplingDisplay(total, sys.stderr, what="scoring") as display:
        result = held_out.nelbo(display.advance) if config.likelihood == "nelbo" else held_out.ode(display.advance)
    print(f"{trained.folder} | {trained.run.objective.name}, {config.likelihood} | {result.describe()}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="use a smaller batch="))
