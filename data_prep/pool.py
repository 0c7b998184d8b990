"""Jobs over processes, with progress from inside them."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from data_prep.worker import Job, Part, Report, run_job
from pretrain.errors import UserError

_POLL_SECONDS = 0.2
_queue: Any = None


def run_jobs(jobs: list[Job], workers: int, report: Report) -> Iterator[tuple[Job, Part]]:
    """Runs the jobs, yielding each as it ends. UserError where one fails, or its process is killed; finished shards stay."""
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            yield job, run_job(job, report)
        return
    context = multiprocessing.get_context("spawn")  # fork would copy the threads of rich and of tokenizers
    queue = context.SimpleQueue()
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context, initializer=_start_worker, initargs=(queue,)) as pool:
        pending = {pool.submit(_run_in_worker, job): job for job in jobs}
        try:
            yield from _collect(pending, lambda: _drain(queue, report))
        except BrokenProcessPool as error:
            raise UserError("a worker was killed, probably for lack of memory; run the same command to continue, with fewer workers=") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _collect(pending: dict[Future[Part], Job], drain: Callable[[], None]) -> Iterator[tuple[Job, Part]]:
    while pending:
        done, _ = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        drain()
        for future in done:
            yield pending.pop(future), future.result()


def _drain(queue: Any, report: Report) -> None:
    while not queue.empty():
        report(*queue.get())


def _start_worker(queue: Any) -> None:
    global _queue
    _queue = queue
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism


def _run_in_worker(job: Job) -> Part:
    return run_job(job, lambda read, tokens: _queue.put((read, tokens)))
