"""What submit.py can do with a composed submission. Each returns an exit code; with `dry` it prints the script, for a run after its plan (on
standard error: the script alone can be redirected into a file), and writes and submits nothing."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.command import fine_tuning_tree
from finetune.grid import taken_grid
from finetune.problems import open_problems
from launchers.slurm.drill_text import drill_sources
from pretrain.cluster import slurm
from pretrain.cluster.drill import INTERRUPTED, drill_run, run_drill
from pretrain.cluster.script import render
from pretrain.cluster.submission import (
    FOLDER,
    Submission,
    check_layout,
    check_start,
    checkpoint_bytes,
    fitting_batch,
    make_job,
    plan_of,
    refuse_living,
    submit,
)
from pretrain.compose import command_from_tree
from pretrain.convert.origin import require_origin
from pretrain.errors import UserError
from pretrain.plan.plan import Needs, check_data, check_directory
from pretrain.plan.table import show, size

DRILLS = "drill"
PREFLIGHT_SECONDS = 120
"""For a preflight that has started: a minute of its own, and Slurm's."""


def train(submission: Submission, dry: bool) -> int:
    """Submit the run."""
    needs = check_layout(submission)
    job = make_job(submission, needs)
    if dry:
        show(plan_of(submission, needs), sys.stderr)
        print(render(job))
        return 0
    check_start(submission, needs)
    require_origin(submission.command.run)
    number = submit(submission, job)
    _describe(submission, needs, number)
    return 0


def preflight(submission: Submission, dry: bool) -> int:
    """Check the nodes of one job, and print what they say; 1 if they are not fit."""
    settings = submission.settings
    submission = submission.changed(name=f"preflight_{settings.nodes}_nodes", resume="auto", batch=fitting_batch(submission))
    job = make_job(submission, check_layout(submission), "preflight")
    if dry:
        print(render(job))
        return 0
    check_directory(submission.command.run)
    refuse_living(submission.run_directory)
    number = submit(submission, job)
    print(f"job {number}: preflight of {settings.nodes} nodes", flush=True)
    started = slurm.wait(number, lambda state: state != "PENDING", deadline=time.monotonic() + 60 * settings.drill.minutes, poll=settings.poll)
    ends = time.monotonic() + PREFLIGHT_SECONDS
    state = slurm.wait(number, lambda state: state in slurm.ENDED, deadline=ends, poll=settings.poll, known=started)
    print((submission.run_directory / FOLDER / f"job_{number}.log").read_text(), end="")
    return 0 if state == "COMPLETED" else 1


def drill(submission: Submission, dry: bool) -> int:
    """Rehearse a preemption; 1 if it failed."""
    folder = Path(submission.command.run.root).absolute() / DRILLS
    if dry:
        run = drill_run(submission, folder, INTERRUPTED, {})
        print(render(make_job(run, check_layout(run))))
        return 0
    return 0 if run_drill(submission, folder, drill_sources(folder / "text")) else 1


def _describe(submission: Submission, needs: Needs, number: int) -> None:
    settings, run = submission.settings, submission.command.run
    ranks = needs.derived.world_size
    print(f"job {number}: {run.name} on {settings.nodes} node{'s' * (settings.nodes > 1)} with {ranks} ranks, in {submission.run_directory}")
    kept = f"{run.checkpoint.keep} are kept" if run.checkpoint.keep else "all are kept"
    print(f"a checkpoint takes about {size(checkpoint_bytes(needs)).strip()}, and {kept}")
    print(f"log: {submission.run_directory / FOLDER / f'job_{number}.log'}; stop it with scancel {number}")


def fine_tuning(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a fine-tuning run, as long as its epochs. Raises UserError for problems that cannot be read."""
    tree, grid = taken_grid(fine_tuning_tree(tree, sys.argv[1:]))
    if grid is not None:
        raise UserError("grid= starts one run after another on this machine: submit a job for each point with name= and its values")
    run = command_from_tree(tree).run
    check_data(run)
    return tree | {"duration": tree["duration"] | {"steps": open_problems(run).config.duration.steps}}


TASKS: dict[str, Callable[[Submission, bool], int]] = {"train": train, "finetune": train, "preflight": preflight, "drill": drill}
