"""A job that a scheduler starts again, where the first life left no checkpoint."""

import json
from pathlib import Path

import pytest

from pretrain.checkpoint.manager import CheckpointManager
from pretrain.errors import UserError


def test_a_restarted_job_that_never_saved_starts_over_and_keeps_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000002.partial").mkdir(parents=True)
    steps = "".join(json.dumps({"kind": kind, "step": step}) + "\n" for kind, step in (("run", 0), ("train", 1)))
    (run / "log.jsonl").write_text(steps)
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        CheckpointManager(run, 0).begin("auto")  # by hand, nothing is started over
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    said: list[str] = []
    assert CheckpointManager(run, 0, say=said.append).begin("auto") is None
    assert (run / "log.jsonl.old-1").read_text() == steps and not (run / "log.jsonl").exists() and "starts over" in said[-1]
    (run / "log.jsonl").write_text(steps + json.dumps({"kind": "event", "step": 1, "event": "checkpoint"}) + "\n")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        CheckpointManager(run, 0).begin("auto")  # what was saved has gone: somebody must look
