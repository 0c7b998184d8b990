"""Small checkpoints for tests."""

from collections.abc import Callable
from pathlib import Path

from pretrain.checkpoint.layout import Layout, TrainState

LAYOUT = Layout(tensor=1, pipeline=1, virtual_pipeline=1, data=1, zero_stage=1)
BACKBONE = {"kind": "llama", "hidden": 16, "layers": 2, "heads": 2}


def state(step: int) -> TrainState:
    return TrainState(
        step=step, tokens=step * 64, samples=step * 4, lr=1e-3, next_batch="00ff", seed=1, layout=LAYOUT, backbone=BACKBONE, rows=32, versions={}
    )


def writer(step: int) -> Callable[[Path], None]:
    """Writes two small files whose content depends on the step."""

    def write(folder: Path) -> None:
        (folder / "zero").mkdir()
        (folder / "zero" / "a.pt").write_bytes(bytes(range(256)) * (step + 1))
        (folder / "objective.pt").write_bytes(b"objective %d" % step)

    return write
