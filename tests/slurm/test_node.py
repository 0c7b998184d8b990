"""What a node runs: torchrun's words, and a real torchrun whose rank dies once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.slurm.jobs import ROOT, at_step, events, frozen_run, logged_losses, processes_of, submit, uninterrupted_losses, wait_until, words
from tests.slurm.test_preflight import free_port
from tests.slurm.test_submission import answering


@pytest.mark.slow
def test_ranks_are_started_again_after_one_died_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(tmp_path / "bin", monkeypatch, sbatch="echo 5", squeue="echo COMPLETED")
    run = tmp_path / "runs/small"
    done = submit(tmp_path, dict(os.environ), *words(40, "nodes=1", "cluster.processes_per_node=2", "checkpoint.every=5"))
    assert done.returncode == 0, done.stderr
    node = [
        sys.executable, str(ROOT / "launchers/slurm/node.py"), "--peers", "n0=127.0.0.1", "--port", str(free_port()), "--ranks", "2",
        "--max-restarts", "1", "--id", "5.0", str(ROOT / "launchers/pretrain.py"), "--config-dir", str(run / "slurm"), "+model=submitted",
    ]  # fmt: skip
    environment = os.environ | {"SLURM_NODEID": "0", "OMP_NUM_THREADS": "1"}
    with (run / "slurm/job_5.log").open("w") as out:
        process = subprocess.Popen(node, cwd=tmp_path, env=environment, stdout=out, stderr=out)
    try:
        wait_until(at_step(run, 12), "training", run)
        victim = next(each for each in processes_of(run) if each.environ().get("RANK") == "1")
        victim.send_signal(signal.SIGKILL)
        assert process.wait(200) == 0, (run / "slurm/job_5.log").read_text()[-4000:]
    finally:
        process.kill()
    assert [record["step"] % 5 for record in events(run, "resume")] == [0]
    assert logged_losses(run) == pytest.approx(uninterrupted_losses(run), rel=1e-6)
    assert frozen_run(run).duration.steps == 40 and yaml.safe_load((run / "config.yaml").read_text())["name"] == "small"
    assert not processes_of(run)
