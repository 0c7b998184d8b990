"""Run a function on N processes over gloo, in the ordinary suite.

Processes are forked from a server that has imported torch, megatron-core and deepspeed once, so a two-step layout test takes about a
second where torchrun would take ten to thirty.
"""

import multiprocessing as mp
import os
import pickle
import queue
import signal
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])


def run_distributed(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180) -> list[Any]:
    """[function(*args) on rank 0, …]. The function must be importable (module level). Raises AssertionError with the first traceback."""
    with tempfile.TemporaryDirectory() as folder:
        results: Any = _CONTEXT.Queue()
        store = str(Path(folder) / "store")
        processes = [_CONTEXT.Process(target=_entry, args=(function, args, rank, world_size, store, results)) for rank in range(world_size)]
        for process in processes:
            process.start()
        try:
            return _collect(results, world_size, timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()


def run_until_killed(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180, **kwargs: Any) -> None:
    """The same for a function that kills its own processes with SIGKILL. Asserts that they died by it."""
    with tempfile.TemporaryDirectory() as folder:
        results: Any = _CONTEXT.Queue()
        call, store = partial(function, **kwargs), str(Path(folder) / "store")
        processes = [_CONTEXT.Process(target=_entry, args=(call, args, rank, world_size, store, results)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert all(code == -signal.SIGKILL for code in codes), f"exit codes {codes}; {'' if results.empty() else results.get()[2]}"


def _collect(results: Any, world_size: int, timeout: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < world_size:
        try:
            rank, value, failure = results.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"ranks {sorted(set(range(world_size)) - answers.keys())} did not answer within {timeout} s") from None
        assert failure is None, f"rank {rank} failed:\n{failure}"
        answers[rank] = pickle.loads(value)
    return [answers[rank] for rank in range(world_size)]


def _entry(function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, store: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        # Plain pickle: torch's own would share memory that dies with this process.
        results.put((rank, pickle.dumps(function(*args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        # Groups made by the function may be half torn down; the process ends here anyway.
        results.close()
        results.join_thread()
        os._exit(0)
