"""How DeepSpeed writes and reads its files: durably or into a snapshot, without executing what they contain, and without leaving other
ranks waiting.

`DeepSpeedEngine.save_checkpoint` ends in a barrier. A rank whose disk is full would raise before it, and the others would wait for the
process group's time-out. So a failed write is kept until the barrier is passed, then raised (`raise_failure`).
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# DeepSpeed picks its accelerator when it is first imported; without this it probes for every kind that it knows, and says so.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine  # noqa: E402
from deepspeed.runtime.fp16.loss_scaler import LossScaler  # noqa: E402
from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: E402
from deepspeed.utils.tensor_fragment import fragment_address  # noqa: E402

from pretrain.parallel.late_compile import late_compile  # noqa: E402

with late_compile():  # DeepSpeed looks for this optimizer when it is given another one
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401, E402

from pretrain.engine.safe_files import read_safely  # noqa: E402
from pretrain.engine.snapshot import HostMemory, Snapshot, write_file  # noqa: E402

ALLOWED = (fragment_address, LossScaler, ZeroStageEnum)
"""Every class, besides tensors and containers, in a ZeRO checkpoint; anything else is refused."""


class GuardedFiles(TorchCheckpointEngine):
    """A DeepSpeed checkpoint engine. Install it with `guard`."""

    def __init__(self) -> None:
        super().__init__()
        self._failure: Exception | None = None
        self._memory = HostMemory()
        self._snapshot: Snapshot | None = None

    @contextlib.contextmanager
    def collected(self) -> Iterator[Snapshot]:
        """What DeepSpeed saves inside goes into a snapshot, under paths relative to where it was told to save. The one before is void."""
        self._snapshot = Snapshot(self._memory)
        try:
            yield self._snapshot
        finally:
            self._snapshot = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder; a failure is kept."""
        if self._snapshot is not None:
            self._snapshot.folders.append(Path(path))
            return
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._failure = self._failure or error

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file and wait until it is on the disk; a failure is kept, and nothing more is written after it."""
        if self._failure:
            return
        try:
            if self._snapshot is not None:
                self._snapshot.add(Path(path), state_dict)
            else:
                write_file(state_dict, Path(path))
        except (OSError, RuntimeError, MemoryError) as error:
            self._failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file. Raises UserError for a file with any other class in it."""
        return read_safely(Path(path), allowed=ALLOWED, map_location=map_location)

    def raise_failure(self) -> None:
        """Raise what failed since the last call, if anything did."""
        failure, self._failure = self._failure, None
        if failure:
            raise failure


def guard(engine: Any) -> GuardedFiles:
    """Make a DeepSpeedEngine write and read through GuardedFiles. After each save_checkpoint, call `raise_failure` of what is returned."""
    guarded = GuardedFiles()
    engine.checkpoint_engine = guarded
    engine._copy_recovery_script = lambda _: None  # rank 0 alone copies a script there, past the checkpoint engine
    return guarded
