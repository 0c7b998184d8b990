"""One program at a time in a run directory: on one machine, on several, after every kind of death."""

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pretrain.checkpoint import lock as lock_module
from pretrain.checkpoint.lock import STALE_SECONDS, Owner, RunLock, lock_run
from pretrain.checkpoint.peers import Peers
from pretrain.errors import UserError

HOLDER = """
import sys, time
from pathlib import Path
from pretrain.checkpoint.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process of this machine that holds the lock of tmp_path/run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def refusal(lock: RunLock) -> str:
    with pytest.raises(UserError) as caught:
        lock.acquire()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def of(run: Path, said: list[str] | None = None) -> RunLock:
    return RunLock(run, (said if said is not None else []).append)


def left_behind(run: Path, age: float = 0.0, **changes: Any) -> RunLock:
    """The lock of a run that an owner like this process, but for `changes`, took and renewed `age` seconds ago."""
    owner = dataclasses.replace(Owner.this_process(), **changes)
    lock = of(run)
    lock.path.write_text(json.dumps(dataclasses.asdict(owner)))
    os.utime(lock.path, (time.time() - age,) * 2)
    return lock


ELSEWHERE = {"host": "node7", "boot": "another kernel", "pid": 4321}


# ---- one machine ------------------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_by_name_and_touches_nothing(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    before = of(tmp_path / "run").path.read_bytes()
    sentence = refusal(of(tmp_path / "run"))
    assert f"process {holder.pid} on host {os.uname().nodename} since {time.strftime('%Y-%m-%d')}" in sentence
    assert of(tmp_path / "run").path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [".run.lock"]


def test_another_name_for_the_same_directory_is_the_same_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    assert f"process {holder.pid}" in refusal(of(tmp_path / "alias"))


def test_a_killed_run_is_resumable_at_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    said: list[str] = []
    lock = of(tmp_path / "run", said)
    lock.acquire()
    assert len(said) == 1 and f"process {holder.pid}" in said[0]
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_free_flock_on_this_machine_settles_it(tmp_path: Path) -> None:
    """A living process of that number may be another one, as numbers go in containers."""
    lock = left_behind(tmp_path / "run")
    lock.acquire()
    lock.release()


def test_a_lock_given_back_while_it_was_being_opened_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, flock, unlinked = left_behind(tmp_path / "run"), lock_module._flock, []

    def after_release(descriptor: int) -> bool | None:
        if not unlinked:
            unlinked.append(lock.path.unlink())
        return flock(descriptor)

    monkeypatch.setattr(lock_module, "_flock", after_release)
    lock.acquire()
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    assert "in use by process" in refusal(of(tmp_path / "run")), "and it is this file that is locked"


def test_given_back_it_is_free_without_a_word(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        lock = of(tmp_path / "runs" / "deep" / "run", said)
        lock.acquire()
        lock.release()
        lock.release()
    assert said == []


def test_without_flock_the_process_table_decides(tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert f"process {holder.pid}" in refusal(of(tmp_path / "run"))
    holder.kill()
    holder.wait()
    lock = of(tmp_path / "run")
    lock.acquire()
    lock.release()
    left_behind(tmp_path / "run", born=psutil.Process().create_time() - 100).acquire()  # this pid, in a former life


# ---- several machines ---------------------------------------------------------------------------------------------------------------


def test_a_beating_owner_on_another_machine_is_respected(tmp_path: Path) -> None:
    lock = left_behind(tmp_path / "run", age=40, **ELSEWHERE)
    sentence = refusal(lock)
    assert "process 4321 on host node7 since" in sentence and "40 s ago" in sentence and str(lock.path) in sentence
    assert json.loads(lock.path.read_text())["host"] == "node7"
    lock.path.unlink()  # the advice in the sentence
    lock.acquire()


@pytest.mark.parametrize(("age", "free"), [(STALE_SECONDS - 30, False), (STALE_SECONDS + 30, True)])
def test_a_silent_owner_on_another_machine_is_gone(tmp_path: Path, age: float, free: bool) -> None:
    lock = left_behind(tmp_path / "run", age=age, **ELSEWHERE)
    if free:
        lock.acquire()
        lock.release()
    else:
        refusal(lock)


def test_nothing_survives_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "boot_time", lambda: time.time() - 60)
    refusal(left_behind(tmp_path / "run", age=50, boot="before"))  # renewed since this machine started: another one of that name
    left_behind(tmp_path / "run", age=70, boot="before").acquire()


def test_slurm_starts_a_job_again_only_after_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 0.0)  # wait for nothing
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(lock_module, "_lives", lambda owner: True)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    left_behind(tmp_path / "a", age=-60, **ELSEWHERE, job="77", restarts=0).acquire()
    for job, restarts in (("77", 1), ("78", 0), ("", 0)):
        refusal(left_behind(tmp_path / "b", age=-60, **ELSEWHERE, job=job, restarts=restarts))


def test_a_repeated_start_waits_for_its_former_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "RETRY_SECONDS", 0.05)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    said: list[str] = []
    left_behind(tmp_path / "run", age=STALE_SECONDS - 0.3, **ELSEWHERE)
    lock = of(tmp_path / "run", said)
    lock.acquire()
    assert len(said) == 2 and "waiting" in said[0] and "taking over" in said[1]
    lock.release()


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.02)
    before = threading.active_count()
    lock = of(tmp_path / "run")
    lock.acquire()
    os.utime(lock.path, (0, 0))
    deadline = time.monotonic() + 10
    while lock.path.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.time() - lock.path.stat().st_mtime < 10
    lock.release()
    assert threading.active_count() == before


# ---- what may go wrong --------------------------------------------------------------------------------------------------------------


def test_a_half_written_lock_is_a_start_in_progress_until_it_is_old(tmp_path: Path) -> None:
    lock = of(tmp_path / "run")
    lock.path.touch()
    assert "is being started by another process" in refusal(lock)
    os.utime(lock.path, (0, 0))
    lock.acquire()


def test_a_full_disk_leaves_no_empty_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match="run cannot be used: No space left on device"):
            lock_run(tmp_path / "run", Peers.alone())
    lock_run(tmp_path / "run", Peers.alone()).release()


def test_a_lock_that_was_deleted_and_taken_is_not_given_back(tmp_path: Path) -> None:
    first, second = of(tmp_path / "run"), of(tmp_path / "run")
    first.acquire()
    first.path.unlink()
    second.acquire()
    first.release()
    assert second.path.exists()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run directory .*file/run cannot be used: .*choose another root="):
        lock_run(tmp_path / "file" / "run", Peers.alone())
