"""A rehearsal of preemption on the real cluster: save, requeue, resume, and the losses of a run that nothing interrupted.

Two jobs train the same small run: one straight through; the other gets, to its batch script alone, the signal that Slurm sends before a time
limit. The figures come from the logs of both. Checkpoints are saved at the end only, so what is resumed is what the signal had saved.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.cluster import slurm
from pretrain.cluster.submission import Submission, check_layout, check_start, fitting_batch, make_job, remove_run, submit
from pretrain.errors import UserError
from pretrain.telemetry.log import number, read_log

STRAIGHT, INTERRUPTED = "drill_straight", "drill_interrupted"
LOG = "log.jsonl"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a drill found.

    problems          why it failed; empty: it passed.
    resumed_at        step from which the second life went on.
    save_seconds      from the signal until the run had answered with a checkpoint.
    requeue_seconds   from there until the second life had loaded it.
    largest           largest relative difference of a loss, over `steps` steps.
    """

    problems: list[str]
    resumed_at: int | None
    save_seconds: float
    requeue_seconds: float
    largest: float
    steps: int

    def describe(self) -> str:
        """The figures, and pass or fail."""
        figures = (
            f"saved {self.save_seconds:.1f} s after the signal, resumed at step {self.resumed_at} {self.requeue_seconds:.1f} s later, "
            f"largest difference of {self.steps:,} losses {self.largest:.3g}"
        )
        if not self.problems:
            return f"drill passed: {figures}"
        return "drill FAILED: " + "; ".join(self.problems) + (f" ({figures})" if self.resumed_at is not None else "")


def drill_run(submission: Submission, folder: Path, name: str, sources: dict[str, Any]) -> Submission:
    """The run of one of the two jobs, on `sources` (tokenizer and data, as in a configuration)."""
    drill = submission.settings.drill
    return submission.changed(
        **sources,
        name=name,
        root=str(folder),
        resume="auto",
        batch=fitting_batch(submission),
        duration={"steps": drill.steps, "tokens": None, "flops": None, "stop_after": None},
        checkpoint={"every": drill.steps},
        validation={"every": 0},
        telemetry={"log_every": 1, "wandb": "off"},
    )


def run_drill(submission: Submission, folder: Path, sources: dict[str, Any], say: Callable[[str], None] = slurm.SAY) -> bool:
    """Whether the cluster and this program save, requeue and resume. `folder` is shared by the nodes; what an earlier drill left is removed.

    Raises UserError where the drill could not be held: a refused submission, or no time left.
    """
    settings = submission.settings
    deadline = time.monotonic() + 60 * settings.drill.minutes
    jobs: dict[str, int] = {}
    runs = {name: drill_run(submission, folder, name, sources) for name in (STRAIGHT, INTERRUPTED)}
    try:
        for name, run in runs.items():
            remove_run(run.run_directory)
            needs = check_layout(run)
            check_start(run, needs)
            jobs[name] = submit(run, make_job(run, needs), say)
            say(f"job {jobs[name]}: {name}, {settings.drill.steps:,} steps, in {run.run_directory}")
        signalled = _interrupt(runs[INTERRUPTED].run_directory / LOG, jobs[INTERRUPTED], settings.drill.signal_at, settings.poll, deadline, say)
        states = {name: _wait_for_end(job, settings.poll, deadline, say) for name, job in jobs.items()}
    except BaseException:
        for job in jobs.values():
            with contextlib.suppress(UserError):  # it may have ended by itself
                slurm.cancel(job)
        raise
    ended = [f"job {jobs[name]} ({name}) ended as {state.lower()}" for name, state in states.items() if state not in ("COMPLETED", slurm.GONE)]
    logs = {name: list(read_log(run.run_directory / LOG)) for name, run in runs.items()}
    drill = settings.drill
    verdict = judge(logs[STRAIGHT], logs[INTERRUPTED], steps=drill.steps, signalled=signalled, tolerance=drill.tolerance, ended=ended)
    say(verdict.describe())
    return not verdict.problems


def _interrupt(log: Path, job: int, step: int, poll: float, deadline: float, say: Callable[[str], None]) -> float:
    """Signal the job once it has trained `step` steps; when (Unix seconds)."""
    slurm.wait(job, lambda state: state != "PENDING", deadline=deadline, poll=poll, say=say)
    while (state := slurm.state(job)) not in slurm.ENDED:
        done = max((record["step"] for record in read_log(log) if record["kind"] == "train"), default=0)
        if done >= step:
            sent = time.time()
            slurm.signal(job, "USR1")
            say(f"job {job}: at step {done:,}, sent SIGUSR1 to its batch script")
            return sent
        if time.monotonic() > deadline:
            look = f"look at {log.parent / 'slurm'}, or raise drill.minutes"
            raise UserError(f"job {job} has trained {done:,} of {step:,} steps and the time is up; {look}")
        time.sleep(min(poll, 1.0))
    look = f"look at {log.parent / 'slurm'}"
    raise UserError(f"job {job} ended as {state.lower()} before step {step:,}, where the signal was to be sent; {look}")


def _wait_for_end(job: int, poll: float, deadline: float, say: Callable[[str], None]) -> str:
    return slurm.wait(job, lambda state: state in slurm.ENDED, deadline=deadline, poll=poll, known="RUNNING", say=say)


def judge(
    straight: list[dict[str, Any]], interrupted: list[dict[str, Any]], *, steps: int, signalled: float, tolerance: float, ended: list[str]
) -> Verdict:
    """The verdict on two logs."""
    problems = list(ended)
    saved = [record for record in interrupted if record.get("event") == "checkpoint"]
    resumed = [record for record in interrupted if record.get("event") == "resume"]
    if not resumed:
        more = "raise drill.steps, so that it does not end before the signal" if saved else "nothing was saved after the signal"
        problems.append(f"the interrupted run was not resumed: {more}")
    largest, compared = compare_losses(straight, interrupted)
    if compared != steps:
        problems.append(f"the logs share {compared:,} of {steps:,} steps")
    if not largest <= tolerance:  # nan is a failure too
        problems.append(f"losses differ by up to {largest:.3g}, and drill.tolerance={tolerance:g} allows less")
    return Verdict(
        problems=problems,
        resumed_at=resumed[0]["step"] if resumed else None,
        save_seconds=saved[0]["time"] - signalled if saved else math.nan,
        requeue_seconds=resumed[0]["time"] - saved[0]["time"] if saved and resumed else math.nan,
        largest=largest,
        steps=compared,
    )


def compare_losses(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float, int]:
    """Largest relative difference of the training losses of steps that are in both logs, and how many these are."""
    losses = [
        {record["step"]: number(record, "loss_nats_per_token", Path(LOG)) for record in records if record["kind"] == "train"}
        for records in (one, other)
    ]
    shared = losses[0].keys() & losses[1].keys()
    differences = [abs(losses[0][step] - losses[1][step]) / max(abs(losses[0][step]), 1e-300) for step in shared]
    return (math.nan if any(map(math.isnan, differences)) else max(differences, default=math.nan)), len(shared)
