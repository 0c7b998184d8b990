"""A submission as one batch script: the lines that Slurm reads, the settings of this run, and launchers/slurm/job.sbatch, which every job shares.

Nothing here submits or writes. No torch.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pretrain.submit_config import ClusterConfig, SubmitConfig

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATE = REPOSITORY / "launchers" / "slurm" / "job.sbatch"
OUTPUT = "job_%j.log"
"""One file per job, which every life of it continues."""
Task = Literal["train", "preflight"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a script is made from.

    name           of the job, as squeue shows it.
    run_directory  absolute, on a file system that every node sees.
    work_directory where relative paths of the configuration start.
    free_bytes     what the preflight must find free in the run directory.
    task           train, or the preflight alone.
    launcher       what trains: a file of launchers/.
    """

    name: str
    run_directory: Path
    work_directory: Path
    submission: SubmitConfig
    free_bytes: int
    task: Task = "train"
    launcher: str = "pretrain.py"


def render(job: Job) -> str:
    """The whole script."""
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options(job))]
    return "\n".join([*head, "", *_settings(job), "", *_preparation(job.submission.cluster), "", TEMPLATE.read_text()])


def options(job: Job) -> list[str]:
    """The options of sbatch, in a fixed order."""
    submission, cluster = job.submission, job.submission.cluster
    asked: list[tuple[str, str | int | None]] = [
        ("job-name", job.name),
        ("output", str(job.run_directory / "slurm" / OUTPUT)),
        ("open-mode", "append"),
        ("export", "ALL"),  # secrets such as WANDB_API_KEY come from the environment of the submission, never from this file
        ("nodes", submission.nodes),
        ("ntasks-per-node", 1),
        ("partition", cluster.partition),
        ("account", cluster.account),
        ("qos", cluster.qos),
        ("constraint", cluster.constraint),
        ("gpus-per-node", cluster.gpus_per_node or None),
        ("cpus-per-task", cluster.cpus_per_node),
        ("mem", cluster.mem),
        ("time", cluster.time),
        ("dependency", None if submission.after is None else f"afterok:{submission.after}"),
    ]
    lines = [f"--{name}={_option(value)}" for name, value in asked if value is not None]
    lines += ["--exclusive"] if cluster.exclusive else []
    if job.task == "train":
        lines += ["--requeue", f"--signal=B:USR1@{cluster.signal_lead}"]
    else:
        lines += ["--no-requeue"]
    return lines + cluster.extra


def _option(value: str | int) -> str:
    """Slurm reads #SBATCH lines with a shell's quotes."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w./:@%,+=|&()*\[\]-]+", value) else shlex.quote(str(value))


def _settings(job: Job) -> list[str]:
    submission, cluster = job.submission, job.submission.cluster
    values: dict[str, str | int] = {
        "TASK": job.task,
        "LAUNCHER": job.launcher,
        "RUN_DIR": str(job.run_directory),
        "WORK_DIR": str(job.work_directory),
        "REPOSITORY": str(REPOSITORY),
        "PYTHON": cluster.python or ("python3" if cluster.container.image else sys.executable),
        "NODES": submission.nodes,
        "RANKS_PER_NODE": cluster.ranks_per_node,
        "GPUS_PER_NODE": cluster.gpus_per_node,
        "MAX_RESTARTS": cluster.max_restarts,
        "FREE_BYTES": job.free_bytes,
    }
    container = " ".join(shlex.quote(word) for word in _container(job))
    return [*(f"{name}={shlex.quote(str(value))}" for name, value in values.items()), f"SRUN=({container})"]


def _container(job: Job) -> list[str]:
    """Options of pyxis for srun. Every path that the job uses is there under its own name."""
    container = job.submission.cluster.container
    if container.image is None:
        return []
    own = dict.fromkeys(str(path) for path in (REPOSITORY, job.work_directory, job.run_directory))
    mounts = ",".join([*(f"{path}:{path}" for path in own), *container.mounts])
    workdir = container.workdir or str(job.work_directory)
    return [f"--container-image={container.image}", f"--container-mounts={mounts}", f"--container-workdir={workdir}", "--no-container-mount-home"]


def _preparation(cluster: ClusterConfig) -> list[str]:
    """Variables and setup lines; a line that fails ends the job."""
    variables = dict(cluster.environment)
    if cluster.network_interface is not None:
        variables |= {"GLOO_SOCKET_IFNAME": cluster.network_interface, "NCCL_SOCKET_IFNAME": cluster.network_interface}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    for line in cluster.setup:
        complaint = shlex.quote(f"error: cluster.setup failed: {line}")
        lines.append(f"{line} || {{ echo {complaint} >&2; exit 1; }}")
    return lines
