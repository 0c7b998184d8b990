"""datatrove's local executor on a pool that notices when a process is killed: the library's own waits for that task for ever.

Ctrl-C, an error and the death of the front end all end the processes; a shard that was cut off leaves nothing behind.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import NoReturn

from datatrove.executor.local import LocalPipelineExecutor

from pretrain.errors import UserError

_POLL_SECONDS = 0.2


class WatchedExecutor(LocalPipelineExecutor):
    """Runs shards in processes of this machine, or here where one at a time is asked for."""

    def run_ranks(self, ranks: list[int], finished: Callable[[int], None]) -> None:
        """Writes the shards `ranks`; calls `finished` after each. UserError where one fails, or its process is killed; finished shards stay."""
        self.save_executor_as_json()
        if min(self.workers, len(ranks)) <= 1:
            for rank in ranks:
                _run_quietly(self, rank)
                finished(rank)
            return
        context = multiprocessing.get_context("spawn")  # fork would copy the threads of rich and of tokenizers
        pool = ProcessPoolExecutor(min(self.workers, len(ranks)), mp_context=context, initializer=_start_worker)
        try:
            pending = {pool.submit(_run_in_worker, self, rank): rank for rank in ranks}
            for rank in _collect(pending):
                finished(rank)
        except BrokenProcessPool as error:
            _end_children()
            raise UserError("a worker was killed, probably for lack of memory; run the same command to continue, with fewer workers=") from error
        except BaseException:
            _end_children()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _end_children() -> None:
    for process in multiprocessing.active_children():
        process.terminate()


def _collect(pending: dict[Future[None], int]) -> Iterator[int]:
    while pending:
        done, _ = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
            yield pending.pop(future)


def _run_quietly(executor: WatchedExecutor, rank: int) -> None:
    """datatrove logs to a file and to the terminal; the terminal is ours."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        executor._run_for_rank(rank, local_rank=rank)
    silence()


def silence() -> None:
    """Takes away the sink that datatrove gives its logger when it is imported, and after each task."""
    from datatrove.utils.logging import logger

    logger.remove()


class _Stopped(BaseException):
    """The front end wants this process to end."""


_at_work = False


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end, which gets it too, ends us in order
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _stop(*_: object) -> NoReturn:
    if _at_work:
        raise _Stopped
    os._exit(128 + signal.SIGTERM)


def _follow_parent() -> None:
    """No orphans: a front end that is killed takes its workers along."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _run_in_worker(executor: WatchedExecutor, rank: int) -> None:
    global _at_work
    _at_work = True
    try:
        _run_quietly(executor, rank)
    except _Stopped:
        os._exit(128 + signal.SIGTERM)  # temporary files are gone by now; returning would take the next shard
    finally:
        _at_work = False
