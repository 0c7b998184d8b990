"""python launchers/sample.py checkpoint=runs/NAME [sampler=… count=3 length=… steps=… prompt=… view=true …]: text from a trained model."""

import sys
from pathlib import Path

# Python puts launchers/ first, where `import pretrain` would find pretrain.py beside this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.command_line import run_command  # noqa: E402
from pretrain.compose import compose_arguments, resolved, typed  # noqa: E402
from pretrain.sampling.config import SamplingConfig, quoted  # noqa: E402


def main() -> int:
    """Compose, open, sample."""
    sys.argv[1:] = quoted(sys.argv[1:])
    composed = compose_arguments("sample")
    if composed is None:
        return 0
    config = typed(SamplingConfig, resolved(composed))
    from pretrain.convert.sampled import open_sampled  # torch takes seconds: not before the configuration holds
    from pretrain.plan.machine import available_memory
    from pretrain.sampling.session import choose_device, run_sampling

    device = choose_device(config.device)
    run_sampling(open_sampled(Path(config.checkpoint), config.step), config, device=device, host_memory=available_memory)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="use a smaller batch= or length="))
