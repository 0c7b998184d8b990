"""python launchers/sample.py checkpoint=runs/NAME [count=3 length=… steps=… temperature=… prompt=… seed=…]: text from a trained model."""

import sys
from pathlib import Path

# Python puts launchers/ first, where `import pretrain` would find pretrain.py beside this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from omegaconf import OmegaConf  # noqa: E402

from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import compose_arguments, typed  # noqa: E402
from pretrain.sampling.config import SamplingConfig  # noqa: E402


def main() -> int:
    """Compose, load, sample."""
    composed = compose_arguments("sample")
    if composed is None:
        return 0
    config = typed(SamplingConfig, dict(OmegaConf.to_container(composed, resolve=True)))  # type: ignore[arg-type]  # a mapping of strings
    from pretrain.convert.plain_network import open_trained  # torch takes seconds: not before the configuration holds
    from pretrain.sampling.session import choose_device, choose_dtype, run_sampling

    trained = open_trained(Path(config.checkpoint), config.step)
    run_sampling(
        trained.network(device=choose_device(config.device), dtype=choose_dtype(config.dtype)),
        trained.tokenizer,
        config,
        vocabulary=trained.vocabulary,
        trained_length=trained.run.batch.length,
        step=trained.step,
        output=Path(config.output or trained.run_directory / "samples.jsonl"),
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
