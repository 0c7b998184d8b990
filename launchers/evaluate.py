"""python launchers/evaluate.py [task=likelihood] checkpoint=runs/NAME …: of held-out text; task=gsm8k … data=test.jsonl: answers to word problems."""

import sys
from pathlib import Path
from typing import Any

# Python puts launchers/ first, where `import pretrain` would find pretrain.py beside this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.gsm8k_config import FORMAT_TEXTS, GSM8KEvaluation  # noqa: E402
from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import compose_arguments, resolved, typed  # noqa: E402
from pretrain.evaluation.config import EvaluationConfig  # noqa: E402
from pretrain.evaluation.tasks import COMPOSED, DATA, choose_task  # noqa: E402
from pretrain.sampling.config import quoted  # noqa: E402


def main() -> int:
    """Compose, then run the task."""
    sys.argv[1:] = quoted(choose_task(sys.argv[1:]), FORMAT_TEXTS)
    composed = compose_arguments("evaluate")
    if composed is not None:
        tree = resolved(composed)
        (gsm8k if tree.pop("task") == "gsm8k" else likelihood)(tree)
    return 0


def gsm8k(tree: dict[str, Any]) -> None:
    """Answers to word problems."""
    config = typed(GSM8KEvaluation, {DATA if key == COMPOSED else key: value for key, value in tree.items()})
    from finetune.gsm8k_run import evaluate_gsm8k  # torch takes seconds: not before the configuration holds
    from pretrain.convert.sampled import open_sampled
    from pretrain.plan.machine import available_memory
    from pretrain.sampling.session import choose_device

    device = choose_device(config.device)
    evaluate_gsm8k(open_sampled(Path(config.checkpoint), config.step), config, device=device, host_memory=available_memory)


def likelihood(tree: dict[str, Any]) -> None:
    """The likelihood of held-out text."""
    config = typed(EvaluationConfig, tree)
    from pretrain.convert.held_out import HeldOut
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


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="use a smaller batch="))
