"""Jobs that run for real on commands that stand in for Slurm's (test_real_slurm.py has a real one). The losses are those of a run without."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.cluster import slurm
from tests.slurm.fake_slurm import FakeSlurm
from tests.slurm.jobs import CLUSTER, SMALL, at_step, job_log, logged_losses, processes_of, submit, uninterrupted_losses, use, wait_until, words
from tests.small_run import sft_config

DRILL = ("drill.steps=400", "drill.signal_at=10", "drill.minutes=3", "batch.global_sequences=16", "batch.micro_sequences=4", "backbone.hidden=32")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    cluster = FakeSlurm(tmp_path / "fake_slurm")
    use(cluster, monkeypatch)
    yield cluster
    cluster.stop()


@pytest.mark.slow
def test_a_drill_saves_requeues_resumes_and_passes(tmp_path: Path, fake: FakeSlurm) -> None:
    done = submit(tmp_path, fake.environment, "drill", *CLUSTER, *DRILL, "schedule.warmup_steps=2", "precision=fp32")
    assert done.returncode == 0, done.stdout + done.stderr + job_log(tmp_path / "runs/drill/drill_interrupted")[-3000:]
    assert "drill passed" in done.stdout and "largest difference of 400 losses 0" in done.stdout
    run = tmp_path / "runs/drill/drill_interrupted"
    assert logged_losses(run) == pytest.approx(uninterrupted_losses(run), rel=1e-6), "and not only each other's"
    log = job_log(run)
    assert "start 0" in log and "start 1" in log and "requeueing" in log and "the run is done" in log
    assert not processes_of(run) and not (run / "REQUEUE").exists()


@pytest.mark.slow
def test_a_fine_tuning_job(tmp_path: Path, fake: FakeSlurm) -> None:
    """Three epochs of two steps on two nodes; its last validation is that of the same run without Slurm."""
    config = sft_config(tmp_path)
    assert config.sft is not None
    problems = (f"sft.train={config.sft.train}", f"sft.validation={config.sft.validation}", "sft.format.context=48", "sft.epochs=3")
    small = [word for word in SMALL if not word.startswith("batch.length")]
    command = ("finetune", "+model=mdlm_tiny", "name=tuned", "init_from=null", "tokenizer=small.model", *problems, *small, *CLUSTER)
    dry = submit(tmp_path, fake.environment, *command, "--dry-run")
    assert dry.returncode == 0 and "LAUNCHER=finetune.py" in dry.stdout and "Plan of tuned" in dry.stderr, dry.stderr
    refused = submit(tmp_path, fake.environment, *command, "init_from=gone")
    assert refused.returncode == 64 and "init_from=gone is no run, checkpoint or model folder" in refused.stderr
    assert submit(tmp_path, fake.environment, *command).returncode == 0
    run = tmp_path / "runs/sft/tuned"
    wait_until(lambda: "the run is done" in job_log(run), "the end", run)
    assert list(logged_losses(run)) == [1, 2, 3, 4, 5, 6]
    assert logged_losses(run) == pytest.approx(uninterrupted_losses(run), rel=1e-6)


@pytest.mark.slow
def test_cancel_leaves_nothing_behind_and_is_not_requeued(tmp_path: Path, fake: FakeSlurm) -> None:
    done = submit(tmp_path, fake.environment, *words(100_000))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/small"
    number = json.loads((run / "slurm/jobs.jsonl").read_text())["job"]
    wait_until(at_step(run, 3), "training", run)
    again = submit(tmp_path, fake.environment, *words(100_000))
    assert again.returncode == 64 and f"belongs to job {number}, which is running" in again.stderr
    fake.command("scancel", str(number))
    wait_until(lambda: not processes_of(run), "no process is left", run, 40)
    wait_until(lambda: slurm.state(number) == "CANCELLED", "the job is cancelled", run)
