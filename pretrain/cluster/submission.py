"""From a composed command to a job in the queue: rules, plan, run directory, script, sbatch.

    runs/NAME/slurm/
      model/submitted.yaml, data/submitted.yaml   the configuration, frozen: what every life of the job trains, whatever configs/ says by then
      code.json, code.diff                        commit, changed files, hash of the sources; what the commit lacks
      job.sbatch                                  the script
      jobs.jsonl                                  every job submitted for this run
      job_NUMBER.log                              what it printed
"""

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pretrain.backbones.parameters import count_parameters
from pretrain.checkpoint.layout import CHECKPOINTS
from pretrain.cluster import slurm
from pretrain.cluster.checks import check_submission, require_no_secret
from pretrain.cluster.code_version import code_version, difference
from pretrain.cluster.script import REPOSITORY, Job, Task, render
from pretrain.compose import Command, command_from_tree, compose_arguments, resolved, typed
from pretrain.errors import UserError
from pretrain.launch_config import VERIFY_KEYS, PlanConfig
from pretrain.outputs import cannot_write
from pretrain.plan.memory import objective_elements
from pretrain.plan.plan import Needs, Plan, check_batch, check_data, check_directory, check_fits, cost, work_out_needs
from pretrain.redaction import redact
from pretrain.rules import validate
from pretrain.submit_config import SubmitConfig

FOLDER = "slurm"
JOBS = "jobs.jsonl"
PRESET = "submitted"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A command, where it is to run, and the tree that it was composed from."""

    command: Command
    settings: SubmitConfig
    tree: dict[str, Any]

    @property
    def run_directory(self) -> Path:
        """Absolute, links resolved: the nodes may reach the working directory by another name."""
        return Path(os.path.realpath(self.command.run.directory))

    def changed(self, **sections: Any) -> "Submission":
        """The same with other values of the run's tree (sections are merged one level deep)."""
        tree = dict(self.tree)
        for key, value in sections.items():
            tree[key] = tree[key] | value if isinstance(value, dict) else value
        return replace(self, tree=tree, command=command_from_tree(tree))


def fitting_batch(submission: Submission) -> dict[str, Any]:
    """The run's batch, near its size, for every number of nodes: for a preflight or a drill, which trains nothing that is kept."""
    run, settings = submission.command.run, submission.settings
    replicas = settings.nodes * settings.cluster.ranks_per_node // (run.parallel.tensor * run.parallel.pipeline)
    stride = max(replicas, 1) * run.batch.micro_sequences
    return {"global_sequences": max(round(run.batch.global_sequences / stride), 1) * stride}


def submission_from_arguments(
    config_name: str = "submit", prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda tree: tree
) -> Submission | None:
    """What sys.argv describes; None where Hydra itself answered. Raises UserError.

    prepare  what makes the composed tree that of a run.
    """
    composed = compose_arguments(config_name)
    if composed is None:
        return None
    tree = resolved(composed)
    settings = typed(SubmitConfig, {item.name: tree.pop(item.name) for item in dataclasses.fields(SubmitConfig)})
    check_submission(settings)
    tree = prepare(tree)
    command = command_from_tree(tree)
    if command.check or command.selftest is not None or command.verify is not None:
        raise UserError("check, selftest and verify belong to launchers/pretrain.py; submit.py checks the layout, and --dry-run submits nothing")
    return Submission(command=command, settings=settings, tree=tree)


def check_layout(submission: Submission) -> Needs:
    """What the run needs on the ranks of this job. Raises UserError where the layout is illegal, or its ranks would not fit."""
    settings = submission.settings
    try:
        needs = work_out_needs(submission.command.run, _assumptions(submission), local_ranks=settings.cluster.ranks_per_node)
    except UserError as error:
        others = _legal_nodes(submission)
        if not others:
            raise
        raise UserError(f"{error}; or use {' or '.join(f'nodes={nodes}' for nodes in others)}") from None
    check_fits(needs)
    return needs


def plan_of(submission: Submission, needs: Needs) -> Plan:
    """What the run costs on the ranks of this job."""
    return cost(needs, _assumptions(submission))


def _assumptions(submission: Submission) -> PlanConfig:
    """The command's, on the ranks of this job and with their memory."""
    plan, settings = submission.command.plan, submission.settings
    memory = plan.memory_gib or settings.cluster.rank_memory_gib
    return replace(plan, ranks=settings.nodes * settings.cluster.ranks_per_node, memory_gib=memory)


def _legal_nodes(submission: Submission) -> list[int]:
    """The nearest numbers of nodes, fewer and more, whose ranks the run could be laid over as it is."""
    legal, per_node = [], submission.settings.cluster.ranks_per_node
    for step in (-1, 1):
        for nodes in range(submission.settings.nodes + step, 0 if step < 0 else 2 * submission.settings.nodes + 1, step):
            with contextlib.suppress(UserError):
                validate(submission.command.run, world_size=nodes * per_node)
                legal.append(nodes)
                break
    return legal


def check_start(submission: Submission, needs: Needs) -> None:
    """Raises UserError where data or run directory cannot serve the run, as far as this machine sees them, or a job of it lives."""
    check_data(submission.command.run)
    check_batch(needs)
    check_directory(submission.command.run)
    refuse_living(submission.run_directory)


def checkpoint_bytes(needs: Needs) -> int:
    """Bytes of one checkpoint: weights in the compute type, fp32 master weights, two moments, and the moving average if there is one."""
    per_parameter = (4 if needs.compute == "fp32" else 2) + 4 * (3 + bool(needs.config.optimizer.ema))
    parameters = count_parameters(needs.config.backbone, needs.derived.padded_size)
    return parameters * per_parameter + 16 * objective_elements(needs.config, needs.derived)


def make_job(submission: Submission, needs: Needs, task: Task = "train") -> Job:
    """What the batch script is made from. Raises UserError where a secret would be written."""
    for text in frozen_presets(submission.tree, Path()).values():
        require_no_secret(text, "the frozen configuration")
    job = Job(
        name=submission.command.run.name,
        run_directory=submission.run_directory,
        work_directory=Path.cwd(),
        submission=submission.settings,
        free_bytes=2 * checkpoint_bytes(needs),  # the next one is complete before an old one goes
        task=task,
        launcher="pretrain.py" if submission.command.run.sft is None else "finetune.py",
    )
    require_no_secret(render(job), "the batch script")
    return job


def refuse_living(run_directory: Path) -> None:
    """Raises UserError with the number of a job of this run that waits or runs."""
    for job in reversed(submitted_jobs(run_directory)):
        state = slurm.state(job)
        if state not in slurm.ENDED:
            fix = f"wait for it, end it with scancel {job}, or choose another name="
            raise UserError(f"{run_directory} belongs to job {job}, which is {state.lower()}: {fix}")


def submitted_jobs(run_directory: Path) -> list[int]:
    """Numbers of the jobs that were submitted for a run, oldest first."""
    path = run_directory / FOLDER / JOBS
    if not path.exists():
        return []
    try:
        return [int(json.loads(line)["job"]) for line in path.read_text().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a list of jobs ({error}); move it aside once no job of this run is in the queue") from None


def submit(submission: Submission, job: Job, say: Callable[[str], None] = slurm.SAY) -> int:
    """Freeze the run into its directory, and hand the script to Slurm; the job's number. Raises UserError if the disk or Slurm refuses."""
    run = submission.command.run
    if run.resume == "fresh":  # once, now: every life of the job continues what the first one began
        moved = move_aside(job.run_directory)
        if moved:
            say(f"{job.run_directory} was moved to {moved}")
        submission = submission.changed(resume="auto")
    folder = job.run_directory / FOLDER
    try:
        script = _freeze(submission, job, folder)
        number = slurm.submit(script)
        with (folder / JOBS).open("a") as jobs:
            jobs.write(json.dumps({"job": number, "task": job.task, "time": time.time(), "nodes": submission.settings.nodes}) + "\n")
    except OSError as error:
        raise cannot_write(folder, error) from error
    return number


def move_aside(run_directory: Path) -> Path | None:
    """Rename a run directory that holds work to NAME.old-1, …; its new name."""
    if not (run_directory / CHECKPOINTS).exists() and not (run_directory / "log.jsonl").exists():
        return None
    number = 1
    while (target := run_directory.with_name(f"{run_directory.name}.old-{number}")).exists():
        number += 1
    run_directory.rename(target)
    return target


def _freeze(submission: Submission, job: Job, folder: Path) -> Path:
    """Write everything of the submission; the script's path."""
    version = code_version(REPOSITORY)
    script = folder / "job.sbatch"
    for path, text in {
        **frozen_presets(submission.tree, folder),
        folder / "code.json": json.dumps(dataclasses.asdict(version), indent=2) + "\n",
        folder / "code.diff": redact(difference(REPOSITORY)),
        script: render(job),
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "requeued_at").unlink(missing_ok=True)
    return script


def frozen_presets(tree: dict[str, Any], folder: Path) -> dict[Path, str]:
    """The composed run as a preset of its own for `--config-dir`. Data apart: Hydra would merge its sources into those of another choice."""
    plain = {key: value for key, value in tree.items() if key not in ("tokenizer", "data", "check", "selftest", "selftest_steps", *VERIFY_KEYS)}
    data = {"tokenizer": tree["tokenizer"], "data": tree["data"]}
    head = "# @package _global_\n# The run as it was submitted.\n"
    model = {"defaults": [{"override /data": PRESET}]} | plain
    return {
        folder / "model" / f"{PRESET}.yaml": head + yaml.safe_dump(model, sort_keys=False),
        folder / "data" / f"{PRESET}.yaml": head + yaml.safe_dump(data, sort_keys=False),
    }


def remove_run(run_directory: Path) -> None:
    """Delete the directory of a rehearsal whose jobs have ended. Raises UserError while one lives."""
    refuse_living(run_directory)
    shutil.rmtree(run_directory, ignore_errors=True)
