"""A thread per rank that notices when the run makes no progress, and says which rank is missing from which collective.

The loop calls `beat` at every step boundary, held-out batch and phase. Without a beat for `hang_seconds`, each rank writes what it is doing to
runs/NAME/hang/rank_N.txt: step, samples, phase, the collective that it waits in, the Python stack of every thread. Then each reads what the
others wrote, and the lowest rank that could speak prints one line. A rank that wrote nothing is dead or stopped; one that waits in no collective
is stuck in its own work; if all wait, those that are behind the others in the sequence of collectives are named. All end with HUNG_EXIT, which
torchrun and a batch script may answer with another start.

Files, not a store: the store lives in a process that may be the one that hangs.
"""

import contextlib
import faulthandler
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from pretrain.telemetry.collectives import Collectives, recorded

HUNG_EXIT = 70
"""EX_SOFTWARE of sysexits.h."""
FOLDER = "hang"
GRACE_SECONDS = (2.0, 30.0)
"""Shortest and longest time for the other ranks to write, a tenth of the limit between them: ranks passed their last boundary at about one time."""


@dataclass(frozen=True)
class Sign:
    """What one rank says about itself.

    step        steps done at the last beat; phase: what it began then (data, step, validation, checkpoint).
    samples     sample ids of the batch in work.
    entered     collectives that it has entered since it started.
    collective  the one that it is blocked in (on CUDA: that it launched last); empty: none.
    seconds     without a beat.
    """

    rank: int
    step: int
    phase: str
    samples: list[int]
    entered: int
    collective: str
    seconds: float


class Watchdog:
    """The thread of this rank. It runs from `start` to `close`; hang_seconds=0: never."""

    def __init__(self, run_dir: Path, rank: int, world_size: int, hang_seconds: float, *, end: Callable[[int], object] = os._exit) -> None:
        self._folder, self._rank, self._size, self._limit, self._end = run_dir / FOLDER, rank, world_size, hang_seconds, end
        self._step, self._phase, self._samples = 0, "start", list[int]()
        self._beat = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch, and forget what an earlier hang left."""
        if self._limit <= 0:
            return
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.beat(self._step, "data")
        self._thread.start()

    def beat(self, step: int, phase: str, samples: Sequence[int] = ()) -> None:
        """Progress: `step` steps are done, and `phase` begins."""
        self._step, self._phase, self._samples, self._beat = step, phase, list(samples), time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        record = recorded()
        while not self._closed.wait(min(self._limit / 10, 5.0)):
            if time.monotonic() - self._beat >= self._limit:
                self._report(record)
                self._end(HUNG_EXIT)
                return

    def _report(self, record: Collectives) -> None:
        try:
            self._write(self._sign(record))
            if self._closed.wait(min(max(self._limit / 10, GRACE_SECONDS[0]), GRACE_SECONDS[1])):
                return
            signs = read_signs(self._folder)
            if signs and signs[0].rank != self._rank:  # whoever ends ends the others: first let that one speak
                self._closed.wait(GRACE_SECONDS[0])
            elif signs:
                print(f"error: {verdict(signs, self._size)}; {self._folder} has every rank's stack", file=sys.stderr, flush=True)
        except OSError as error:  # the disk may be what hangs the run
            print(f"error: the run hangs, and rank {self._rank} could not write to {self._folder} ({error})", file=sys.stderr, flush=True)

    def _sign(self, record: Collectives) -> Sign:
        cuda = torch.cuda.is_available()
        collective = record.name if record.waiting is not None or (cuda and record.entered) else ""
        seconds = time.monotonic() - self._beat
        return Sign(self._rank, self._step, self._phase, self._samples, record.entered, collective, round(seconds, 1))

    def _write(self, sign: Sign) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"rank_{self._rank}.partial").open("w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(sign)) + "\n\n" + describe(sign) + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
            _flight_recorder(file)
        os.replace(self._folder / f"rank_{self._rank}.partial", self._folder / f"rank_{self._rank}.txt")


def describe(sign: Sign) -> str:
    """A sign in words."""
    where = f"waits in collective {sign.entered}, {sign.collective}" if sign.collective else f"in no collective; the last was number {sign.entered}"
    samples = f", samples {', '.join(map(str, sign.samples[:16]))}{', …' if len(sign.samples) > 16 else ''}" if sign.samples else ""
    return f"rank {sign.rank}, phase {sign.phase} after step {sign.step}{samples}: {where}; {sign.seconds:.0f} s without progress"


def read_signs(folder: Path) -> list[Sign]:
    """Whatever ranks have written, in their order."""
    signs = []
    for path in folder.glob("rank_*.txt"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            signs.append(Sign(**json.loads(path.read_text(encoding="utf-8").partition("\n")[0])))
    return sorted(signs, key=lambda sign: sign.rank)


def verdict(signs: Sequence[Sign], world_size: int) -> str:
    """Which ranks are to blame, and what the others wait for."""
    found = {sign.rank for sign in signs}
    silent = [rank for rank in range(world_size) if rank not in found]
    waiting = [sign for sign in signs if sign.collective]
    idle = [sign for sign in signs if not sign.collective]
    most = max(waiting, key=lambda sign: sign.entered, default=None)
    others = f"; {_ranks([sign.rank for sign in waiting])} {'waits' if len(waiting) == 1 else 'wait'} in {most.collective}" if most else ""
    head = f"no step boundary for {signs[0].seconds:.0f} s after step {max(sign.step for sign in signs)}: "
    if silent:
        return f"{head}{_ranks(silent)} gave no sign of life (dead, stopped, or stuck in compiled code){others}"
    if idle:
        doing = ", ".join(sorted({sign.phase for sign in idle}))
        return f"{head}{_ranks([sign.rank for sign in idle])} {'is' if len(idle) == 1 else 'are'} in no collective (phase {doing}){others}"
    assert most is not None
    behind = [sign for sign in waiting if (sign.entered, sign.collective) != (most.entered, most.collective)]
    if behind and len({sign.collective for sign in waiting}) > 1:
        where = ", ".join(sorted({sign.collective for sign in behind}))
        return f"{head}{_ranks([sign.rank for sign in behind])} still in {where}, the others in {most.collective}"
    return f"{head}every rank waits in {most.collective}: the network, or a device, does not answer"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _flight_recorder(file: TextIO) -> None:
    """NCCL's own list of collectives, which knows what the device is doing."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]

        file.write("\nNCCL's flight recorder:\n" + _dump_nccl_trace_json(includeCollectives=True, onlyActive=True).decode() + "\n")
