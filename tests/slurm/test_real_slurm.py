"""A job's life on a real Slurm of this machine: a node fails, the time limit comes, and another job is cancelled.

It needs root and Debian's slurmctld, slurmd, slurm-client and munge; tests/run.sh installs them where it can. Where they are not to be had this
file holds no test, and test_jobs.py covers the batch script with commands that stand in for Slurm's.
"""

from pathlib import Path

import pytest

from pretrain.cluster import slurm
from pretrain.cluster.checks import time_limit
from tests.slurm.jobs import at_step, events, job_log, logged_losses, processes_of, submit, uninterrupted_losses, use, wait_until, words
from tests.slurm.real_slurm import RealSlurm, available


def signalled_by_the_time_limit(cluster: RealSlurm, run: Path) -> None:
    """Bring the limit of job 1 so near that Slurm sends its signal at its next look, and hold the ranks still until then: no race with them."""
    ranks = [process for process in processes_of(run) if "RANK" in process.environ()]
    assert len(ranks) == 2
    for process in ranks:
        process.suspend()
    elapsed = time_limit(cluster.command("squeue", "--noheader", "--jobs=1", "--format=%M").stdout.strip()) // 60
    cluster.command("scontrol", "update", "JobId=1", f"TimeLimit={elapsed + 2}")
    wait_until(lambda: "received SIGUSR1" in job_log(run), "Slurm signals before the limit", run, 100)
    cluster.command("scontrol", "update", "JobId=1", "TimeLimit=30")  # enough for the lives to come, on a busy machine too
    for process in ranks:
        process.resume()


def failed_node_time_limit_and_cancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, run = RealSlurm(tmp_path / "slurm"), tmp_path / "runs/small"
    use(cluster, monkeypatch)
    try:
        settings = ("cluster.time=30:00", "cluster.signal_lead=110", "checkpoint.every=20", "checkpoint.keep=2")
        assert submit(tmp_path, cluster.environment, *words(120, *settings)).returncode == 0
        wait_until(at_step(run, 45), "training", run)
        cluster.fail_node("n2")
        wait_until(lambda: slurm.state(1) == "PENDING", "the job is requeued after its node failed", run)
        cluster.start_node("n2")
        wait_until(lambda: len(events(run, "resume")) == 1 and at_step(run, 50)(), "the second life trains", run)
        signalled_by_the_time_limit(cluster, run)
        wait_until(lambda: slurm.state(1) in slurm.ENDED, "the third life ends the run", run)
        assert slurm.state(1) == "COMPLETED", job_log(run)[-6000:]
        log, resumed = job_log(run), [record["step"] for record in events(run, "resume")]
        assert "stopped on request at step" in log and "start 2" in log and len(resumed) == 2 and resumed[0] % 20 == 0, log[-6000:]
        assert logged_losses(run) == pytest.approx(uninterrupted_losses(run), rel=1e-6)

        other = tmp_path / "runs/cancelled"
        assert submit(tmp_path, cluster.environment, *words(100_000, "name=cancelled")).returncode == 0
        wait_until(at_step(other, 3), "training", other)
        cluster.command("scancel", "2")
        wait_until(lambda: not processes_of(other), "no process is left", other, 40)
        wait_until(lambda: slurm.state(2) == "CANCELLED", "the job is cancelled", other)
    finally:
        cluster.stop()
    assert not processes_of(run)


if available():

    @pytest.mark.long
    def test_a_job_survives_a_failed_node_and_the_time_limit_and_cancel_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        failed_node_time_limit_and_cancel(tmp_path, monkeypatch)
