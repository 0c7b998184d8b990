"""What this rank last did with the others: the name of every collective as it is entered, and the time spent waiting in them.

torch.distributed's functions, megatron-core's and DeepSpeed's all call methods of ProcessGroup and wait on Work objects. Both classes are
wrapped, once per process: two clock readings per collective, no synchronisation, nothing sent. Threads of our own (saves in the background)
are left out.

On CPU the time in `Work.wait` is the time that this rank was blocked. On CUDA the host runs ahead of the device, so there the recorded name is
the last collective that was launched (NCCL's flight recorder knows which one runs), and waiting is measured on the compute stream by events,
in steps that are sampled.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "alltoall", "barrier", "send", "recv", "recv_anysource",
    "allgather", "allgather_coalesced", "reduce_scatter",
    "all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single",
    # as older versions of torch call the last five
    "_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall_base",
)  # fmt: skip


@dataclass
class Collectives:
    """The record of this process.

    entered   collectives entered so far.
    name      the last one, with the group that it runs over ("allreduce over default_pg").
    waiting   when (monotonic seconds) this rank began to wait in it; None: it does not.
    waited    seconds spent waiting so far.
    """

    entered: int = 0
    name: str = "none yet"
    waiting: float | None = None
    waited: float = 0.0
    _sampling: bool = False
    _events: "list[tuple[torch.cuda.Event, torch.cuda.Event]] | None" = None

    def sample(self, on: bool) -> None:
        """Whether to measure waiting on CUDA from here on; without CUDA it is always measured."""
        self._sampling = on and torch.cuda.is_available()

    def read(self) -> float:
        """`waited`, with what CUDA events have found since the last call (which waits for the device)."""
        if self._events:
            self._events[-1][1].synchronize()
            self.waited += sum(start.elapsed_time(end) for start, end in self._events) / 1e3
            self._events = None
        return self.waited

    def enter(self, method: str, group: Any) -> None:
        """A collective begins."""
        self.entered += 1
        self.name = f"{method.strip('_')} over {getattr(group, 'group_desc', '') or 'a group'}"

    def wait(self, work: Callable[[], Any]) -> Any:
        """Call `work`, which returns when a collective is done."""
        start = self.waiting = time.monotonic()
        try:
            if not self._sampling:
                return work()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            try:
                return work()
            finally:
                after.record()
                self._events = [*(self._events or []), (before, after)]
        finally:
            self.waiting = None
            if not torch.cuda.is_available():
                self.waited += time.monotonic() - start


_record: Collectives | None = None
_thread = threading.local()


def _counts() -> bool:
    """Whether this thread belongs to the step: the main one, and those that autograd makes, but none that saves in the background."""
    if not hasattr(_thread, "counts"):
        current = threading.current_thread()
        _thread.counts = current is threading.main_thread() or isinstance(current, threading._DummyThread)
    return bool(_thread.counts)


def recorded() -> Collectives:
    """The record of this process, begun at the first call."""
    global _record
    if _record is None:
        _record = Collectives()
        for method in METHODS:
            if hasattr(dist.ProcessGroup, method):
                setattr(dist.ProcessGroup, method, _entering(method, getattr(dist.ProcessGroup, method), _record))
        dist.Work.wait = _waiting(dist.Work.wait, _record)  # type: ignore[method-assign]
    return _record


def _entering(method: str, original: Callable[..., Any], record: Collectives) -> Callable[..., Any]:
    @wraps(original)
    def entering(group: Any, *arguments: Any, **options: Any) -> Any:
        if _counts():
            record.enter(method, group)
        return original(group, *arguments, **options)

    return entering


def _waiting(original: Callable[..., Any], record: Collectives) -> Callable[..., Any]:
    @wraps(original)
    def waiting(work: Any, *arguments: Any, **options: Any) -> Any:
        if not _counts():
            return original(work, *arguments, **options)
        return record.wait(lambda: original(work, *arguments, **options))

    return waiting
