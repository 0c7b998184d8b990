"""megatron-core without what it loads on the side: import this module before anything of megatron.core.

Its inference engine and its timers look for loggers, which are not used here: 20 MiB and half a second of every process. A run's own wandb is
imported by its telemetry, on the main rank, where the run logs there. For the compiler see late_compile.py.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pretrain.parallel.late_compile import late_compile


@contextmanager
def _hidden(*names: str) -> Iterator[None]:
    """Importing a library of these names that is not there yet raises ImportError inside."""
    modules: dict[str, Any] = sys.modules
    names = tuple(name for name in names if name not in modules)
    modules.update(dict.fromkeys(names))
    try:
        yield
    finally:
        for name in names:
            modules.pop(name, None)


with late_compile(), _hidden("wandb", "torch.utils.tensorboard"):
    import megatron.core  # noqa: F401
