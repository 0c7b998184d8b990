"""Saving while training goes on: a copy to host memory, then everything else in one thread per rank.

Training waits for the copy, and for nothing on the disk. The threads agree with each other over a group of their own, so that what one rank
finds out (a full disk) all learn, without meeting the collectives of training. All ranks take note of a save that has ended, well or not, at
the same step boundary: while one is in flight, each boundary exchanges one word.

One save is in flight at most; the next one waits for it. Old checkpoints are deleted by the same thread, between two saves, once a step after
the newest has been sound.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pretrain.checkpoint.files import size
from pretrain.checkpoint.health import SavableEngine, require_finite
from pretrain.checkpoint.layout import TrainState
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.peers import Peers
from pretrain.errors import UserError

_clock = time.monotonic


class Copied(Protocol):
    """State in host memory that can be written from another thread."""

    def write(self, folder: Path) -> None: ...


class SnapshotEngine(SavableEngine, Protocol):
    """What of pretrain.engine.zero.Engine is saved."""

    def save(self, folder: Path) -> None: ...
    def snapshot(self) -> Copied: ...


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A complete checkpoint. Seconds: from the start of the save to the end, and how long this rank's training stood still for it. Bytes: of
    all ranks' files."""

    step: int
    folder: Path
    bytes: int
    seconds: float
    blocked_seconds: float

    def __str__(self) -> str:
        return f"saved {self.folder}: {size(self.bytes)} in {self.seconds:.1f} s, for which training waited {1000 * self.blocked_seconds:.0f} ms"

    @property
    def figures(self) -> dict[str, float]:
        """For the log."""
        return {"save_seconds": self.seconds, "save_blocked_milliseconds": 1000 * self.blocked_seconds, "checkpoint_bytes": self.bytes}


class Saving:
    """The saves of one run. Every rank makes one and calls every method but `close` at the same step.

    peers       the ranks, for the thread that trains.
    background  the same ranks over a group of their own, for the threads that write; None: save at once, while training waits.
    report      receives each complete checkpoint, in the thread that trains.
    """

    def __init__(self, manager: CheckpointManager, peers: Peers, background: Peers | None, report: Callable[[Saved], None]) -> None:
        self._manager, self._peers, self._report = manager, peers, report
        self._writing = manager.over(background) if background else None
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: Future[Saved] | None = None
        self._pruning: Future[None] | None = None
        self._blocked = 0.0
        self._unproven: int | None = None
        """The newest checkpoint, as long as no step after it has been sound."""

    def start(self, step: int, engine: SnapshotEngine, state: TrainState, config: str) -> None:
        """Save the state after `step` updates; in the background, it returns when the copy is there.

        Raises UserError on every rank if anything in it is not finite, or the disk refused this save or (in the background) the one before.
        """
        begun = _clock()
        self.wait()
        self._prune(step)
        self._peers.everyone(lambda: require_finite(engine, step))
        if self._writing is None:
            saved = self._saved(self._manager, engine.save, step, state, config, begun)
            self._note(replace(saved, blocked_seconds=saved.seconds))
            return
        copies: list[Copied] = []
        self._peers.everyone(lambda: copies.append(engine.snapshot()))
        self._in_flight = self._pool.submit(self._saved, self._writing, copies[0].write, step, state, config, begun)
        self._blocked = _clock() - begun

    def boundary(self, step: int) -> None:
        """Between two steps, of which `step` was sound: take note of a save that has ended on every rank, and delete what it replaces.

        Raises UserError on every rank if the disk refused it.
        """
        if self._in_flight is not None and all(self._peers.exchange(self._in_flight.done())):
            self.wait()
        self._prune(step)

    def wait(self) -> None:
        """Until nothing is in flight. Raises UserError on every rank if the disk refused it."""
        if self._in_flight is None:
            return
        in_flight, self._in_flight = self._in_flight, None
        self._note(replace(in_flight.result(), blocked_seconds=self._blocked))

    def settle(self) -> None:
        """Until nothing is being written or deleted, and nothing more is deleted: before the run goes back to what was saved."""
        self.wait()
        if self._pruning is not None:
            self._pruning.result()

    def finish(self) -> None:
        """The run has ended well: wait, and leave only what is to be kept."""
        self.wait()
        if self._unproven is not None:
            self._prune(self._unproven + 1)
        if self._pruning is not None:
            self._pruning.result()

    def close(self, complain: Callable[[str], None]) -> None:
        """However the run ends: let what is in flight end first. It needs no other rank's training, raises nothing, and tells what failed."""
        try:
            self.wait()
        except Exception as error:
            complain(str(error) if isinstance(error, UserError) else f"the last checkpoint was not saved ({type(error).__name__}: {error})")
        finally:
            self._pool.shutdown()

    def _note(self, saved: Saved) -> None:
        self._unproven = saved.step
        self._report(saved)

    def _prune(self, step: int) -> None:
        """Delete what the newest checkpoint replaces, if `step` came after it."""
        if self._unproven is None or step <= self._unproven:
            return
        self._unproven = None
        if self._writing is None:
            self._manager.prune()
        else:
            self._pruning = self._pool.submit(self._manager.prune)

    @staticmethod
    def _saved(manager: CheckpointManager, write: Callable[[Path], None], step: int, state: TrainState, config: str, begun: float) -> Saved:
        folder = manager.save(step, write, state, config)
        total = manager.size_of(folder)
        return Saved(step=step, folder=folder, bytes=total, seconds=_clock() - begun, blocked_seconds=0.0)
