"""torchrun's agent, taught to hand a request to stop on to its ranks and to wait for them.

torchrun answers SIGTERM by giving its ranks thirty seconds, and dies of SIGUSR1 without telling them. Here the first SIGTERM, SIGUSR1 or SIGINT
is forwarded, and the agent waits as it does for ranks that train: they save, and leave with a code of their own. A second one is torchrun's
again. Ranks that have explained themselves are not restarted (--max-restarts is for failures), and a rank that is told to leave because another
one has failed is told so by a file, since its SIGTERM would look like a request to save.
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

CLOSING = "closing"
"""As in pretrain.preemption."""

PATIENCE = 60
"""Seconds from a request to stop until the user hears that it is still being waited for."""

told: list[signal.Signals] = []
"""Requests that have been forwarded."""


def teach(final_codes: frozenset[int]) -> None:
    """Change the agent of this process. `final_codes`: exit codes of ranks after which another attempt makes no sense."""
    import torch.distributed.elastic.agent.server.local_elastic_agent as agents
    import torch.distributed.elastic.multiprocessing.api as processes

    # Ranks that are started again would find, in a store that all attempts share, the addresses of those that died.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    _forward_signals(processes)
    _mark_closing(processes)
    _end_restarts(agents.LocalElasticAgent, final_codes)


def _forward_signals(processes: Any) -> None:
    """torchrun registers this module's handler, by its global name, when it starts ranks."""
    at_once, start = processes._terminate_process_handler, processes.PContext.start
    contexts: list[Any] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if told or number not in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) or not contexts:
            at_once(number, frame)  # raises
        told.append(signal.Signals(number))
        _remind(signal.Signals(number))
        for pid in contexts[-1].pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def starting(self: Any) -> None:
        contexts.append(self)
        signal.signal(signal.SIGUSR1, handler)
        start(self)

    processes._terminate_process_handler, processes.PContext.start = handler, starting


def _remind(request: signal.Signals) -> threading.Timer:
    """Say that something is being waited for, where that takes long: a rank may be stuck."""
    words = f"torchrun: {PATIENCE} s after {request.name} the ranks have not ended; {request.name} again stops them in half a minute, saved or not"
    reminder = threading.Timer(PATIENCE, print, [words], {"file": sys.stderr, "flush": True})
    reminder.daemon = True
    reminder.start()
    return reminder


def _mark_closing(processes: Any) -> None:
    """torchrun closes its ranks when one has failed, when it is told to stop a second time, and when all have ended well."""
    close = processes.PContext.close

    def marking(self: Any, *arguments: Any, **options: Any) -> None:
        for folder in {Path(file).parents[1] for file in self.error_files.values() if file and file != os.devnull}:
            with contextlib.suppress(OSError):
                (folder / CLOSING).touch()
        close(self, *arguments, **options)

    processes.PContext.close = marking


def _end_restarts(agent: Any, final_codes: frozenset[int]) -> None:
    monitor = agent._monitor_workers

    def monitoring(self: Any, *arguments: Any, **options: Any) -> Any:
        result = monitor(self, *arguments, **options)
        codes = {failure.exitcode for failure in (result.failures or {}).values()}
        if codes and (told or codes & final_codes):
            self._remaining_restarts = 0
        return result

    agent._monitor_workers = monitoring
