"""Saves in the background: training goes on meanwhile, every refusal of the disk is survived, and all ranks learn of it together."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint.files import inspect
from pretrain.checkpoint.layout import step_name
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.peers import Peers
from pretrain.checkpoint.saving import Saved, Saving
from tests.checkpoint.examples import state, writer
from tests.checkpoint.faults import FaultyDisk, slow
from tests.checkpoint.runs import DIT
from tests.checkpoint.saves import every_fault, held_back, refused_in_flight
from tests.distributed import run_distributed

DP2 = DIT.laid()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asynchronous", "code", "forever", "stride"),
    [(True, errno.ENOSPC, False, 1), (False, errno.EIO, False, 1), (True, errno.EACCES, True, 3), (False, errno.ENOSPC, True, 3)],
)
def test_every_operation_of_a_save_may_fail(tmp_path: Path, asynchronous: bool, code: int, forever: bool, stride: int) -> None:
    assert run_distributed(every_fault, 1, DIT, str(tmp_path), asynchronous, code, forever, stride)[0] > 60


@pytest.mark.slow
@pytest.mark.parametrize(("asynchronous", "failing", "stride"), [(True, 0, 9), (True, 1, 4), (False, 1, 7)])
def test_on_one_rank_of_two(tmp_path: Path, asynchronous: bool, failing: int, stride: int) -> None:
    run_distributed(every_fault, 2, DP2, str(tmp_path), asynchronous, errno.ENOSPC, False, stride, failing)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_while_the_disk_does_not_answer(tmp_path: Path, ranks: int) -> None:
    answers = run_distributed(held_back, ranks, DP2, str(tmp_path))
    for before, between, same, left, said in answers:
        assert before == (1, False), "three steps were made while nothing was saved"
        assert between == (2, []) and same, "it was complete when the next one began, with the state of its own step"
        assert left in (None, [step_name(5)]) and said == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_learn_of_a_refusal_at_the_same_boundary(tmp_path: Path, ranks: int) -> None:
    answers = run_distributed(refused_in_flight, ranks, DP2, str(tmp_path))
    assert len(set(answers)) == 1
    assert "checkpoint step_00000002 could not be saved: No space left on device" in answers[0][0] and answers[0][1] >= 3


# ---- without an engine --------------------------------------------------------------------------------------------------------------


class Engine:
    """Saves what tests.checkpoint.examples.writer writes."""

    def __init__(self, step: int) -> None:
        self.write = writer(step)
        self.base_optimizer: Any = torch.optim.SGD([torch.zeros(1)])
        self.objective_optimizer: Any = torch.nn.ParameterList()
        self.objective_optimizer.parameters = []

    def flat_partitions(self) -> list[torch.Tensor]:
        return []

    def save(self, folder: Path) -> None:
        self.write(folder)

    def snapshot(self) -> "Engine":
        return self


def save(run: Path, *steps: int, keep: int = 1, asynchronous: bool = True) -> list[Saved]:
    reported: list[Saved] = []
    saving = Saving(CheckpointManager(run, keep), Peers.alone(), Peers.alone() if asynchronous else None, reported.append)
    for step in steps:
        saving.boundary(step)
        saving.start(step, Engine(step), state(step), "name: x\n")
    saving.finish()
    saving.close(print)
    return reported


def killed_at(number: int, run: Path, asynchronous: bool) -> bool:
    """Save step 2 over step 1 in a child process that kills itself before its n-th operation; whether it came to that."""
    child = os.fork()
    if child == 0:
        try:
            with FaultyDisk(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == number else None):
                save(run, 2, asynchronous=asynchronous)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_kill_9_at_every_operation(tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing, sealing, renaming, deleting the old one: the run always has a complete checkpoint, and its next start leaves no rubbish."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # there is no power cut here
    resumed, number = set(), 1
    while True:
        run = tmp_path / f"run{number}"
        save(run, 1)
        if not killed_at(number, run, asynchronous):
            break
        found = CheckpointManager(run, 1, say=lambda text: pytest.fail(text)).begin("auto")
        assert found is not None and inspect(found.folder) == []
        resumed.add(found.step)
        assert {path.name for path in (run / "checkpoints").iterdir()} <= {step_name(1), step_name(2)}
        save(run, 3)
        assert [path.name for path in (run / "checkpoints").iterdir()] == [step_name(3)]
        number += 1
    assert number > 30 and resumed == {1, 2}


def test_a_slow_disk_is_measured(tmp_path: Path) -> None:
    with FaultyDisk(slow(0.005)) as disk:
        saved = save(tmp_path, 1, 2)
    assert [each.step for each in saved] == [1, 2] and len(disk.seen) > 60
    assert all(each.blocked_seconds < each.seconds and each.seconds >= 0.1 for each in saved)
    assert saved[0].bytes > 512 and "for which training waited" in str(saved[0])
    assert saved[0].figures.keys() == {"save_seconds", "save_blocked_milliseconds", "checkpoint_bytes"}
    (at_once,) = save(tmp_path / "other", 1, asynchronous=False)
    assert at_once.blocked_seconds == at_once.seconds


@pytest.mark.parametrize("asynchronous", [True, False])
def test_nothing_is_deleted_for_a_checkpoint_that_no_step_has_followed(tmp_path: Path, asynchronous: bool) -> None:
    """Also where the same step is saved again, as on a signal that comes right after a save."""
    saving = Saving(CheckpointManager(tmp_path, 1), Peers.alone(), Peers.alone() if asynchronous else None, lambda saved: None)
    for step in (1, 2, 2):
        saving.boundary(step)
        saving.start(step, Engine(step), state(step), "")
    saving.wait()
    saving.boundary(2)
    saving.close(pytest.fail)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [step_name(1), step_name(2)]


def test_an_end_by_another_error_waits_for_the_save_and_tells_its_own_trouble(tmp_path: Path) -> None:
    reported: list[Saved] = []
    told: list[str] = []
    with FaultyDisk(slow(0.005)):
        saving = Saving(CheckpointManager(tmp_path, 1), Peers.alone(), Peers.alone(), reported.append)
        saving.start(1, Engine(1), state(1), "")
        saving.close(told.append)
    assert [saved.step for saved in reported] == [1] and told == [] and inspect(tmp_path / "checkpoints" / step_name(1)) == []

    class Failing(Engine):
        def save(self, folder: Path) -> None: ...

        def write(self, folder: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    failing = Failing.__new__(Failing)
    failing.base_optimizer, failing.objective_optimizer = Engine(1).base_optimizer, Engine(1).objective_optimizer
    saving = Saving(CheckpointManager(tmp_path, 1), Peers.alone(), Peers.alone(), reported.append)
    saving.start(2, failing, state(2), "")
    saving.close(told.append)
    assert len(told) == 1 and "step_00000002 could not be saved" in told[0]
