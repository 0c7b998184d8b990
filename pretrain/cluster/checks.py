"""What a submission may say, each mistake refused in one sentence before Slurm is asked. No torch here."""

import re

from pretrain.errors import UserError
from pretrain.redaction import is_secret, redact
from pretrain.submit_config import ClusterConfig, DrillConfig, SubmitConfig

MOST_NODES = 2**16
LEAST_LEAD = 10
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def time_limit(text: str) -> int:
    """Seconds of a time limit in one of Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises UserError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise UserError(f"cluster.time={text} must be a time limit of Slurm, such as 1-00:00:00 for a day or 30:00 for half an hour")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_submission(submission: SubmitConfig) -> None:
    """Raises UserError for the first rule broken."""
    if not 1 <= submission.nodes <= MOST_NODES:
        raise UserError(f"nodes={submission.nodes} must be a number of nodes, from 1 on")
    if submission.after is not None and submission.after < 1:
        raise UserError(f"after={submission.after} must be the number of a job, as squeue shows it")
    if not 0.1 <= submission.poll <= 600:
        raise UserError(f"poll={submission.poll:g} must lie in [0.1, 600] seconds")
    _check_cluster(submission.cluster)
    _check_drill(submission.drill)


def _check_cluster(cluster: ClusterConfig) -> None:
    for name in ("gpus_per_node", "max_restarts"):
        if getattr(cluster, name) < 0:
            raise UserError(f"cluster.{name}={getattr(cluster, name)} must not be negative")
    for name in ("processes_per_node", "cpus_per_node", "rank_memory_gib"):
        if getattr(cluster, name) is not None and getattr(cluster, name) <= 0:
            raise UserError(f"cluster.{name}={getattr(cluster, name)} must be positive")
    if not cluster.ranks_per_node:
        raise UserError("cluster.gpus_per_node=0 leaves the number of ranks open: set cluster.processes_per_node=N, or the GPUs of a node")
    if cluster.gpus_per_node and cluster.ranks_per_node != cluster.gpus_per_node:
        fix = "leave cluster.processes_per_node out"
        raise UserError(f"cluster.processes_per_node={cluster.processes_per_node} must be cluster.gpus_per_node={cluster.gpus_per_node}: {fix}")
    limit = time_limit(cluster.time)
    if not LEAST_LEAD <= cluster.signal_lead < limit:
        rule = f"lie between {LEAST_LEAD} s and cluster.time={cluster.time} ({limit:,} s), or the signal would come too late or at once"
        raise UserError(f"cluster.signal_lead={cluster.signal_lead} must {rule}; use cluster.signal_lead={max(LEAST_LEAD, min(300, limit // 4))}")
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"cluster.environment has {name!r}, which is no name of a variable")
        if is_secret(name):
            raise UserError(
                f"cluster.environment.{name} looks like a secret, and would be written into the batch script; "
                f"export {name} in the shell that submits instead: the job inherits it"
            )
    for option in cluster.extra:
        if not re.fullmatch(r"-\S.*", option):
            raise UserError(f"cluster.extra has {option!r}, which is no option of sbatch: write it as in --reservation=NAME")
    for line in (*cluster.setup, *cluster.extra, *cluster.environment.values()):
        if "\n" in line:
            raise UserError(f"cluster has {line!r}, which holds a line break: write one line per entry")


def _check_drill(drill: DrillConfig) -> None:
    if not 1 <= drill.signal_at < drill.steps:
        fix = f"use drill.signal_at={drill.steps // 4}" if drill.steps >= 4 else "use drill.steps=1000"
        raise UserError(f"drill.signal_at={drill.signal_at} must lie between 1 and drill.steps={drill.steps}; {fix}")
    if drill.minutes <= 0 or drill.tolerance < 0:
        raise UserError(f"drill.minutes={drill.minutes:g} must be positive, and drill.tolerance={drill.tolerance:g} not negative")


def require_no_secret(text: str, what: str) -> None:
    """Raises UserError for a text that holds credentials, or what the environment of this process keeps secret: files of a run are shared."""
    for line in text.splitlines():
        if redact(line) != line:
            raise UserError(f"{what} would hold a secret ({redact(line).strip()}): export it in the shell that submits instead, the job inherits it")
