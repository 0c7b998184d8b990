"""A checkpoint's weights by logical name, wherever they lie: DeepSpeed's files of a trained one, or the logical tensors of an imported one.

An imported checkpoint has `logical/` (see reshape.py) in place of `zero/`: weights without moments, which fit every layout. It is where runs
begin (`init_from=`), and is sampled and scored like any other. One that `convert.py universal` made has moments too, and is continued.
"""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from pretrain.checkpoint.layout import TrainState
from pretrain.checkpoint.reshape import LOGICAL, LogicalFolder
from pretrain.checkpoint.zero_reader import MASTER, ZeroCheckpoint
from pretrain.parallel.sharding import ParameterSpec

IMPORTED = "imported"
"""In TrainState.extras of an imported checkpoint: where its weights come from."""


class WeightSource(Protocol):
    """Full fp32 tensors, one at a time."""

    folder: Path
    state: TrainState
    table: dict[str, ParameterSpec]
    keys: list[str]
    step: int

    def tensor(self, name: str, key: str = MASTER) -> Tensor:
        """The full tensor of its logical shape."""
        ...


class LogicalCheckpoint:
    """A checkpoint of logical tensors, opened for reading. Raises UserError if it is incomplete."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, TrainState.read(folder)
        self._logical = LogicalFolder.open(folder / LOGICAL)
        self.table, self.keys, self.step = self._logical.table, self._logical.keys, self._logical.step

    def tensor(self, name: str, key: str = MASTER) -> Tensor:
        """The full tensor, fp32, of its logical shape."""
        return self._logical.shard(name, key, 1, 0)


def is_imported(folder: Path) -> bool:
    """Whether a checkpoint's weights are logical tensors."""
    return (folder / LOGICAL).is_dir()


def open_weights(folder: Path) -> WeightSource:
    """The weights in a checkpoint folder, whose checksums the caller has verified. Raises UserError if they cannot be read."""
    return LogicalCheckpoint(folder) if is_imported(folder) else ZeroCheckpoint(folder)
