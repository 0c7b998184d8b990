"""A job's life on a real Slurm of this machine: a node fails, the time limit comes, and another job is cancelled.

It needs root and Debian's slurmctld, slurmd, slurm-client and munge; tests/run.sh installs them where it can. Where they are not to be had this
file holds no test, and test_jobs.py covers the batch script with commands that stand in for Slurm's.
"""

from pathlib import Path

import pytest

from pretrain.cluster import slurm
from tests.slurm.jobs import at_step, events, job_log, logged_losses, processes_of, submit, uninterrupted_losses, wait_until, words
from tests.slurm.real_slurm import RealSlurm, available


def failed_node_time_limit_and_cancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, run, steps = RealSlurm(tmp_path / "slurm"), tmp_path / "runs/small", 500
    monkeypatch.setattr("os.environ", cluster.environment)
    try:
        limit = ("cluster.time=1:00", "cluster.signal_lead=40", "checkpoint.every=20", "checkpoint.keep=2")
        done = submit(tmp_path, cluster.environment, *words(steps, *limit))
        assert done.returncode == 0, done.stderr
        wait_until(at_step(run, 45), "training", run)
        cluster.fail_node("n2")
        wait_until(lambda: slurm.state(1) == "PENDING", "Slurm requeues after the node failed", run)
        cluster.start_node("n2")
        wait_until(lambda: slurm.state(1) in slurm.ENDED, "the run ends", run, 240)
        assert slurm.state(1) == "COMPLETED", job_log(run)[-6000:]
        log = job_log(run)
        resumed = [record["step"] for record in events(run, "resume")]
        assert "received SIGUSR1" in log and "requeueing" in log and len(resumed) >= 1, log[-6000:]
        assert logged_losses(run) == pytest.approx(uninterrupted_losses(run), rel=1e-6)

        other = tmp_path / "runs/cancelled"
        assert submit(tmp_path, cluster.environment, *words(100_000, "name=cancelled")).returncode == 0
        wait_until(at_step(other, 3), "training", other)
        cluster.command("scancel", "2")
        wait_until(lambda: not processes_of(other), "no process is left", other, 40)
        assert slurm.state(2) == "CANCELLED"
    finally:
        cluster.stop()
    assert not processes_of(run)


if available():

    @pytest.mark.slow
    def test_a_job_survives_a_failed_node_and_the_time_limit_and_cancel_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        failed_node_time_limit_and_cancel(tmp_path, monkeypatch)
