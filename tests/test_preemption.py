"""Requests to stop: real processes under a real torchrun, told in every way, at every moment; and the parts of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from pretrain import preemption
from pretrain.checkpoint.manager import CheckpointManager, find_checkpoint
from pretrain.errors import UserError
from pretrain.run_config import CheckpointConfig, DurationConfig, ValidationConfig
from pretrain.telemetry.log import read_log
from tests.distributed import run_distributed
from tests.small_run import small_config, train

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "+model=mdlm_tiny", "name=small", "data=custom", "tokenizer=small.model", "data.train.main.path=train/corpus",
    "data.validation={}", "batch.global_sequences=8", "batch.micro_sequences=4", "batch.length=16", "backbone.hidden=32", "backbone.layers=2",
    "duration.steps=1000000", "telemetry.log_every=1", "telemetry.wandb=off", "telemetry.peak_tflops=1", "checkpoint.every=100000",
)  # fmt: skip


@contextmanager
def started(folder: Path, *words: str, ranks: int | None = 2, ready: str = "step 3/") -> Iterator[subprocess.Popen[str]]:
    """The launcher under torchrun (ranks=None: without), from the moment that it has said `ready`."""
    small_config(folder)  # makes text and tokenizer
    launcher = [str(ROOT / "launchers/pretrain.py"), *SETTINGS, *words]
    torchrun = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, *torchrun, *launcher], cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT, text=True
        )
    try:
        deadline = time.monotonic() + 120
        while ready not in (folder / "said").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "said").read_text()
            time.sleep(0.05)
        yield process
    finally:
        for each in family(process):
            each.kill()
        process.wait()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        own = psutil.Process(process.pid)
        return [own, *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def gone(processes: list[psutil.Process], seconds: float = 20) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def saved_and_said(folder: Path, reason: str) -> None:
    """One sentence, a checkpoint of the last step done, and the marker."""
    said = (folder / "said").read_text()
    assert "Traceback" not in said and "exitcode" not in said, said
    assert said.count("[stopped]") == 1 and f"by {reason} after step " in said
    run = folder / "runs/small"
    last = [record for record in read_log(run / "log.jsonl") if record["kind"] == "train"][-1]["step"]
    assert find_checkpoint(run).step == last
    marker = run / preemption.MARKER
    if reason == "SIGINT":
        assert not marker.exists()
    else:
        found = json.loads(marker.read_text())
        assert (found["step"], found["reason"]) == (last, reason) and found["host"] and abs(found["time"] - time.time()) < 60
    assert not (run / preemption.FLAG).exists()


@pytest.mark.slow
def test_a_signal_to_torchrun_or_to_one_rank_saves_and_leaves_with_a_code(tmp_path):
    with started(tmp_path) as process:
        processes = family(process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 75, (tmp_path / "said").read_text()
        assert gone(processes)
    saved_and_said(tmp_path, "SIGUSR1")
    with started(tmp_path, ready="Resuming") as process:
        ranks = [each for each in family(process)[1:] if "launchers/pretrain.py" in " ".join(each.cmdline())]
        assert len(ranks) == 2
        while "tokens/s" not in (tmp_path / "said").read_text():
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, (tmp_path / "said").read_text()
    saved_and_said(tmp_path, "SIGTERM")


@pytest.mark.slow
def test_ctrl_c_saves_and_no_rank_outlives_its_torchrun(tmp_path):
    with started(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, (tmp_path / "said").read_text()
    saved_and_said(tmp_path, "SIGINT")
    with started(tmp_path, ready="Resuming") as process:
        processes = family(process)
        assert len(processes) >= 3
        process.send_signal(signal.SIGKILL)
        assert gone(processes), "no rank trains on without its torchrun"


@pytest.mark.slow
def test_without_torchrun_a_flag_file_or_ctrl_c_stops(tmp_path):
    with started(tmp_path, ranks=None) as process:
        (tmp_path / "runs/small" / preemption.FLAG).touch()
        assert process.wait(30) == 75
    saved_and_said(tmp_path, "PREEMPT")
    with started(tmp_path, ranks=None, ready="Resuming") as process:
        assert not (tmp_path / "runs/small" / preemption.MARKER).exists()
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    saved_and_said(tmp_path, "SIGINT")


@pytest.mark.slow
def test_before_the_first_step_nothing_is_saved(tmp_path):
    with started(tmp_path, ranks=1, ready="") as process:
        while not any("launchers/pretrain.py" in " ".join(each.cmdline()) for each in family(process)[1:]):
            time.sleep(0.02)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert len(said.splitlines()) == 1 and "stop" in said, said
    assert not list(tmp_path.glob("runs/small/checkpoints/step_*"))


# ---- the parts ------------------------------------------------------------------------------------------------------------------------


def stopped(config, at: int, rank: int, reason: str):
    """Train; one rank is asked to stop as it begins a step. What it did."""
    import torch.distributed as dist

    from pretrain.engine.zero import Engine

    stepped = Engine.train_step

    def asking(engine, shard, lr):
        if shard.step == at and dist.get_rank() == rank:
            if reason == preemption.FLAG:
                (config.directory / preemption.FLAG).touch()
                preemption.current()._looked = -1e9
            else:
                os.kill(os.getpid(), getattr(signal, reason))
        return stepped(engine, shard, lr)

    Engine.train_step = asking
    with preemption.listening():
        done = train(config)
    Engine.train_step = stepped
    return done


@pytest.mark.parametrize(("ranks", "reason"), [(1, "SIGTERM"), (2, "SIGUSR1"), (2, preemption.FLAG)])
def test_a_stopped_run_goes_on_bitwise(tmp_path, ranks, reason):
    """Stopped within the second step, where no checkpoint is due; then as if nothing had been."""
    config = small_config(tmp_path)
    whole = run_distributed(train, ranks, replace(config, name="whole"))
    before = run_distributed(stopped, ranks, config, 1, ranks - 1, reason)
    assert [len(rank["losses"]) for rank in before] == [2] * ranks, "the step in work was finished, by all"
    assert find_checkpoint(config.directory).step == 2
    marker = json.loads((config.directory / preemption.MARKER).read_text())
    assert marker["reason"] == reason and marker["step"] == 2
    after = run_distributed(train, ranks, config)
    assert not (config.directory / preemption.MARKER).exists()
    for one, two, want in zip(before, after, whole, strict=True):
        assert one["losses"] + two["losses"] == want["losses"]
        assert torch.equal(two["weights"], want["weights"]) and torch.equal(two["moments"], want["moments"])
    records = [r["step"] for r in read_log(config.directory / "log.jsonl") if r["kind"] == "train"]
    assert records == [1, 2, 3, 4, 5, 6]


def stopped_in_validation(config):
    """Asked to stop after the first held-out batch."""
    from pretrain.engine.zero import Engine

    evaluated = Engine.evaluate

    def asking(engine, shard):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluated(engine, shard)

    Engine.evaluate = asking
    with preemption.listening():
        done = train(config)
    Engine.evaluate = evaluated
    return done


def test_a_validation_that_was_cut_short_is_made_up_for(tmp_path):
    config = small_config(tmp_path, validation=ValidationConfig(every=6), duration=DurationConfig(steps=6, stop_after=6))
    run_distributed(stopped_in_validation, 2, config)
    kinds = [r["kind"] for r in read_log(config.directory / "log.jsonl")]
    assert "validation" not in kinds and find_checkpoint(config.directory).step == 6
    assert run_distributed(train, 2, config)[0]["losses"] == []
    assert [(r["kind"], r["step"]) for r in read_log(config.directory / "log.jsonl") if r["kind"] == "validation"] == [("validation", 6)]


def starved(config):
    """A run whose second rank gets no data after two steps, and is then asked to stop."""
    import threading

    import torch.distributed as dist

    from pretrain.data.samples import TrainingSamples
    from pretrain.parallel import groups as parallel_groups
    from pretrain.trainer import Trainer

    made, asked = TrainingSamples.sample, threading.Event()

    def slow(samples, number):
        if dist.get_rank() == 1 and number >= 16:
            asked.wait(60)
            time.sleep(1)
        return made(samples, number)

    def ask():
        while trainer.step < 2:
            time.sleep(0.05)
        time.sleep(1)
        asked.set()
        os.kill(os.getpid(), signal.SIGTERM)

    TrainingSamples.sample = slow
    with preemption.listening():
        trainer = Trainer(config, parallel_groups.initialize(config.parallel, seed=config.seed))
        if dist.get_rank() == 1:
            threading.Thread(target=ask, daemon=True).start()
        reason = trainer.fit()
        trainer.close()
    return reason, trainer.step


def test_a_rank_that_waits_for_data_can_be_stopped(tmp_path):
    config = small_config(tmp_path, checkpoint=CheckpointConfig(every=100), validation=ValidationConfig(every=0))
    config = replace(config, data=replace(config.data, loader="plain"))  # DALI is a step ahead
    assert run_distributed(starved, 2, config) == [("SIGTERM", 2)] * 2
    assert find_checkpoint(config.directory).step == 2


def test_a_flag_of_an_earlier_start_is_removed_and_a_new_one_obeyed(tmp_path):
    flag = tmp_path / preemption.FLAG
    flag.touch()
    os.utime(flag, (time.time() - 60,) * 2)
    requests = preemption.Requests()
    requests.watch(tmp_path, 1)
    assert not flag.exists() and not requests.asked
    flag.touch()
    assert not requests.asked, "looked for once a second"
    requests._looked = -1e9
    assert requests.asked and preemption.agreed(requests.votes()) == preemption.FLAG


def test_a_start_that_was_stopped_before_its_first_step_is_no_work(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("REQUEUE", "PREEMPT", "config.yaml"):
        (run / name).touch()
    opening = json.dumps({"kind": "run", "step": 0, "time": 0}) + "\n"
    (run / "log.jsonl").write_text(opening)
    (run / "wandb").mkdir()
    assert CheckpointManager(run, 3).begin("auto") is None
    (run / "log.jsonl").write_text(opening + json.dumps({"kind": "train", "step": 1, "time": 0}) + "\n")
    with pytest.raises(UserError, match=r"is not empty \(log.jsonl, wandb\)"):
        CheckpointManager(run, 3).begin("auto")


def test_the_second_ctrl_c_leaves_at_once():
    with preemption.listening() as requests:
        requests.defer()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert requests.asked and preemption.agreed(requests.votes()) == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)  # torchrun's copy of the same
        time.sleep(0.01)
        requests._signals["SIGINT"] -= 5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
