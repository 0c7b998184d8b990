"""One function over many units in processes of its own, with progress, and results on disk so that a report that was cut off continues.

output/report.json   the finished report, with what was asked for
output/parts/        request.json, and what each finished unit found: NUMBER.json (last) and whatever else its function wrote beside it
"""

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data_prep.documents import Unit
from data_prep.progress import say
from pretrain.data.files import atomic_writer
from pretrain.errors import UserError, counted
from pretrain.outputs import cannot_write, require_writable

REPORT = "report.json"
PARTS = "parts"
REQUEST = "request.json"
_POLL_SECONDS = 0.2
_LINE_SECONDS = 60
Result = dict[str, Any]
Count = Callable[[int, int], None]
"""(bytes read, documents read) since the last call."""
Work = Callable[[Unit, Path, Count], Result]
"""(unit, path of its results without suffix, progress) -> what it found, as JSON. Runs in a process of its own, so it must be picklable."""
_queue: Any = None


def finished_report(output: Path, request: Result) -> Result | None:
    """The report of the same request, if it is there. UserError where the folder holds anything else."""
    require_writable(output, folder=True)
    path = output / REPORT
    if path.exists():
        report = _read(path)
        _require_same(output, report.get("request"), request)
        return report
    if (output / PARTS / REQUEST).exists():
        _require_same(output, _read(output / PARTS / REQUEST), request)
    elif output.exists() and any(output.iterdir()):
        raise UserError(f"output {output} is not empty and holds no report; choose another folder, or remove it")
    else:
        write_json(output / PARTS / REQUEST, request)
    return None


def write_report(output: Path, report: Result) -> None:
    """Write report.json and drop the parts."""
    write_json(output / REPORT, report)
    shutil.rmtree(output / PARTS, ignore_errors=True)


def write_json(path: Path, value: Result) -> None:
    """A JSON file, whole or absent."""
    with atomic_writer(path) as stream:
        stream.write(json.dumps(value, indent=1, ensure_ascii=False).encode())


def scan(units: list[Unit], work: Work, output: Path, *, workers: int) -> list[Result]:
    """What `work` found in each unit, in their order. UserError where one fails, or its process is killed; finished units stay."""
    results: dict[int, Result] = {}
    for unit in units:
        if (path := part_of(output, unit).with_suffix(".json")).exists():
            results[unit.number] = _read(path)
    waiting = [unit for unit in units if unit.number not in results]
    if results and waiting:
        say(f"continuing: {len(results)} of {counted(len(units), 'file')} finished before")
    with _progress(sum(unit.bytes for unit in waiting)) as count:
        for unit, result in _run(waiting, work, output, workers, count):
            results[unit.number] = result
    return [results[unit.number] for unit in units]


def part_of(output: Path, unit: Unit) -> Path:
    """Where a unit's results go, without suffix."""
    return output / PARTS / f"{unit.number:06d}"


def _run(units: list[Unit], work: Work, output: Path, workers: int, count: Count) -> Iterator[tuple[Unit, Result]]:
    if min(workers, len(units)) <= 1:
        for unit in units:
            yield unit, _one(unit, work, output, count)
        return
    context = multiprocessing.get_context("spawn")  # fork would copy the threads of rich and of tokenizers
    queue = context.SimpleQueue()
    with ProcessPoolExecutor(min(workers, len(units)), mp_context=context, initializer=_start_worker, initargs=(queue,)) as pool:
        pending = {pool.submit(_in_worker, unit, work, output): unit for unit in units}
        try:
            yield from _collect(pending, queue, count)
        except BrokenProcessPool as error:
            raise UserError("a worker was killed, probably for lack of memory; run the same command to continue, with fewer workers=") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _collect(pending: dict[Future[Result], Unit], queue: Any, count: Count) -> Iterator[tuple[Unit, Result]]:
    while pending:
        done, _ = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        while not queue.empty():
            count(*queue.get())
        for future in done:
            yield pending.pop(future), future.result()


def _start_worker(queue: Any) -> None:
    global _queue
    _queue = queue


def _in_worker(unit: Unit, work: Work, output: Path) -> Result:
    return _one(unit, work, output, lambda read, documents: _queue.put((read, documents)))


def _one(unit: Unit, work: Work, output: Path, count: Count) -> Result:
    try:
        result = work(unit, part_of(output, unit), count)
    except OSError as error:
        raise UserError(f"{cannot_write(part_of(output, unit), error)}, then run the same command to continue") from error
    write_json(part_of(output, unit).with_suffix(".json"), result)
    return result


def _read(path: Path) -> Result:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove {path.parent} and run the command again") from error
    return value if isinstance(value, dict) else {}


def _require_same(output: Path, found: Any, wanted: Result) -> None:
    normal = json.loads(json.dumps(wanted))
    if found != normal:
        different = [key for key in normal if not isinstance(found, dict) or found.get(key) != normal[key]]
        what = ", ".join(different) or "settings"
        raise UserError(f"output {output} holds a report with other {what}; choose another output, or remove that folder")


@contextmanager
def _progress(total: int) -> Iterator[Count]:
    """A bar over the bytes to read, or a line a minute for log files."""
    console = Console(stderr=True)
    start = last = time.monotonic()
    read = documents = 0
    if console.is_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("{task.fields[documents]:,} documents"), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("read", total=total, documents=0)

            def show(new_bytes: int, new_documents: int) -> None:
                nonlocal documents
                documents += new_documents
                progress.update(task, advance=new_bytes, documents=documents)

            yield show
        return

    def line(new_bytes: int, new_documents: int) -> None:
        nonlocal read, documents, last
        read, documents, now = read + new_bytes, documents + new_documents, time.monotonic()
        if now - last >= _LINE_SECONDS:
            last, speed = now, read / (now - start)
            left = (total - read) / max(speed, 1e-9)
            say(f"{read / max(total, 1):.0%} of {total / 1e6:,.0f} MB, {counted(documents, 'document')}, {speed / 1e6:,.1f} MB/s, {left:,.0f} s left")

    yield line
