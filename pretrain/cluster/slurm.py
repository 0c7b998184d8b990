"""Slurm's own commands, with their refusals as sentences. No torch here."""

import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pretrain.errors import UserError

ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED", "GONE"})
"""States of a job that will not run again; every other one may."""
GONE = "GONE"
"""State of a job that Slurm has forgotten."""
SILENCE_SECONDS = 120.0
"""A controller that is restarted or busy answers again."""
SAY = partial(print, flush=True)


def submit(script: Path) -> int:
    """The number of the new job. Raises UserError with what sbatch said."""
    answer = _ask("sbatch", "--parsable", str(script), doing="submit the job")
    return int(answer.split(";")[0])


def state(job: int) -> str:
    """Slurm's word for the state of a job; GONE if it knows none of that number."""
    try:
        lines = _ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T", doing="look at the queue").split()
    except UserError as error:
        if "Invalid job id" in str(error):
            return GONE
        raise
    return lines[0] if lines else GONE


def reason(job: int) -> str:
    """Why a job waits, in Slurm's word."""
    return _ask("squeue", "--noheader", f"--jobs={job}", "--format=%r", doing="look at the queue").strip()


def signal(job: int, name: str) -> None:
    """Send a signal to the batch script of a job alone, as Slurm does before a time limit."""
    _ask("scancel", "--batch", f"--signal={name}", str(job), doing=f"signal job {job}")


def cancel(job: int) -> None:
    """End a job for good."""
    _ask("scancel", str(job), doing=f"cancel job {job}")


def wait(job: int, until: Callable[[str], bool], *, deadline: float, poll: float, known: str = "", say: Callable[[str], None] = SAY) -> str:
    """The state of a job for which `until` holds. Every state but the `known` one is told. Raises UserError when time.monotonic() passes the
    deadline."""
    before, since, heard = known, time.monotonic(), time.monotonic()
    while True:
        try:
            now, heard = state(job), time.monotonic()
        except UserError:
            if time.monotonic() - heard > SILENCE_SECONDS:
                raise
            time.sleep(poll)
            continue
        if now != before:
            say(f"job {job}: {now.lower()}" + (f" ({reason(job)})" if now == "PENDING" else ""))
            before, since = now, time.monotonic()
        if until(now):
            return now
        if time.monotonic() > deadline:
            seconds = time.monotonic() - since
            raise UserError(f"job {job} has been {now.lower()} for {seconds:.0f} s and the time is up; look at it with: squeue --jobs={job}")
        time.sleep(poll)


def _ask(*words: str, doing: str) -> str:
    if shutil.which(words[0]) is None:
        raise UserError(f"cannot {doing}: {words[0]} is not on PATH; run this on a login node of the cluster, or use --dry-run to see the script")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"cannot {doing}: {' '.join((done.stderr or done.stdout).split()) or f'{words[0]} left with exit code {done.returncode}'}")
    return done.stdout
