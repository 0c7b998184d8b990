"""How much memory an action takes beyond what its process held before: anonymous pages only, since files that are mapped can be dropped."""

import multiprocessing as mp
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def _run(warm_up: Callable[[], None] | None, action: Callable[..., Any], arguments: tuple[Any, ...], results: "mp.Queue[tuple[int, float]]") -> None:
    if warm_up:
        warm_up()
    before, peak, running = anonymous(), [0], [True]

    def watch() -> None:
        while running[0]:
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    action(*arguments)
    seconds = time.monotonic() - started
    running[0] = False
    watcher.join()
    results.put((peak[0] - before, seconds))


def measured(action: Callable[..., Any], *arguments: Any, warm_up: Callable[[], None] | None = None) -> tuple[int, float]:
    """(bytes at the peak beyond those before, seconds) of `action(*arguments)` in a process of its own. warm_up: imports that do not count."""
    context = mp.get_context("spawn")
    results: mp.Queue[tuple[int, float]] = context.Queue()
    process = context.Process(target=_run, args=(warm_up, action, arguments, results))
    process.start()
    found = results.get(timeout=600)
    process.join()
    return found
