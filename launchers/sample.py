"""python launchers/sample.py checkpoint=runs/NAME [count=3 length=… steps=… temperature=… prompt=… seed=…]: text from a trained model."""

import sys
from pathlib import Path

# Python puts launchers/ first, where `import pretrain` would find pretrain.py beside this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import compose_arguments, resolved, typed  # noqa: E402
from pretrain.sampling.config import SamplingConfig  # noqa: E402


def main() -> int:
    """Compose, load, sample."""
    composed = compose_arguments("sample")
    if composed is None:
        return 0
    config = typed(SamplingConfig, resolved(composed))
    from pretrain.convert.plain_network import open_trained  # torch takes seconds: not before the configuration holds
    from pretrain.plan.machine import available_memory
    from pretrain.sampling.generate import require_sampled
    from pretrain.sampling.session import choose_device, choose_dtype, run_sampling

    device = choose_device(config.device)
    trained = open_trained(Path(config.checkpoint), config.step)
    require_sampled(trained.run.objective.name)
    run_sampling(
        trained.network(device=device, dtype=choose_dtype(config.dtype)),
        trained.tokenizer,
        config,
        vocabulary=trained.vocabulary,
        trained_length=trained.run.batch.length,
        step=trained.step,
        output=Path(config.output or trained.run_directory / "samples.jsonl"),
        host_memory=available_memory,
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="use a smaller batch= or length="))
