"""Starts of verify=resume in forked processes, whole or with a defect that only a resumed run has."""

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.distributed import _CONTEXT


class Forked:
    """A process of the fork server, as verify.Worker."""

    def __init__(self, defect: str, spec: Path, rank: int, environment: Mapping[str, str]) -> None:
        self._process = _CONTEXT.Process(target=_work, args=(defect, str(spec), rank, dict(environment)))
        self._process.start()

    def wait(self) -> int:
        self._process.join(120)
        return self._process.exitcode if self._process.exitcode is not None else 1

    def kill(self) -> None:
        self._process.kill()


def launch(defect: str = "none") -> Any:
    return partial(Forked, defect)


def _work(defect: str, spec: str, rank: int, environment: dict[str, str]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(environment)
    sys.argv = ["verify_worker", spec, str(rank)]
    DEFECTS[defect]()
    from pretrain.verify_worker import main

    code = 1
    try:
        code = main()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _position() -> None:
    """A loader that starts one step early after a resume."""
    from pretrain import trainer

    build = trainer.build_loader
    trainer.build_loader = lambda *args, start_step, **more: build(*args, start_step=max(start_step - 1, 0), **more)


def _moments() -> None:
    """First moments that start from zero after a resume in the same layout."""
    from pretrain.engine.zero import Engine

    load = Engine.load

    def forgetting(engine: Engine, folder: Path) -> None:
        load(engine, folder)
        for flat in engine.flat_partitions():
            engine.base_optimizer.state[flat]["exp_avg"].zero_()

    Engine.load = forgetting  # type: ignore[method-assign]


def _count() -> None:
    """AdamW's bias correction starts anew after a resume in another layout."""
    from pretrain import trainer

    fill = trainer.load_any_layout

    def forgetting(engine: Any, *rest: Any) -> None:
        fill(engine, *rest)
        for flat in engine.flat_partitions():
            engine.base_optimizer.state[flat]["step"].fill_(1)

    trainer.load_any_layout = forgetting


DEFECTS = {"none": lambda: None, "position": _position, "moments": _moments, "count": _count}
