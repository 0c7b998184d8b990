"""Saves of a real engine onto a faulty disk, for the tests that run on several processes (the functions must be importable)."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.checkpoint.files import inspect
from pretrain.checkpoint.layout import step_name
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.peers import Peers
from pretrain.checkpoint.saving import Saved, Saving
from pretrain.errors import UserError
from tests.checkpoint.faults import FaultyDisk, refusing
from tests.checkpoint.runs import LR, train_state
from tests.engine.world import World, make_engine, shard


class Runs:
    """One engine, and as many run directories as wanted, each with a checkpoint of step 1."""

    def __init__(self, world: World, root: str, asynchronous: bool) -> None:
        self.world, self.root = world, Path(root)
        self.engine, self.objective, self.groups = make_engine(world)
        self.train(0)
        self.peers = Peers.world()
        self.background = Peers.apart() if asynchronous else None
        self.reported: list[Saved] = []
        self.said: list[str] = []
        self.run = self.root / "first"
        self.save(1)

    def train(self, step: int) -> None:
        self.engine.train_step(shard(self.world, self.objective, self.groups, step), LR)

    def manager(self) -> CheckpointManager:
        return CheckpointManager(self.run, 1, self.peers, self.said.append)

    def saving(self) -> Saving:
        return Saving(self.manager(), self.peers, self.background, self.reported.append)

    def start(self, saving: Saving, step: int) -> None:
        saving.start(step, self.engine, train_state(self.world, self.groups, step), "name: x\n")

    def save(self, step: int) -> str:
        """Save, and delete what that replaces; the sentence of a refusal, or nothing."""
        saving = self.saving()
        try:
            self.start(saving, step)
            saving.finish()
        except UserError as error:
            return str(error)
        finally:
            saving.close(self.said.append)
            self.peers.exchange(None)  # the writer has deleted what it was to delete
        return ""

    def another(self, name: str) -> None:
        """Go on in a new run directory."""
        self.run = self.root / name
        self.peers.writer(lambda: shutil.copytree(self.root / "first", self.run))


def every_fault(world: World, root: str, asynchronous: bool, code: int, forever: bool, stride: int = 1, failing: int = 0) -> int:
    """Refuse one operation of a save after another (on rank `failing`); how many there were."""
    runs = Runs(world, root, asynchronous)
    rank = dist.get_rank()
    runs.another("rehearsal")
    with FaultyDisk() as rehearsal:
        assert runs.save(2) == ""
    total = runs.peers.exchange(len(rehearsal.seen))[failing]
    for number in range(1, total + 1, stride):
        runs.another(f"{number}")
        runs.said.clear()
        with FaultyDisk(refusing(number, code, forever=forever) if rank == failing else lambda n: None) as disk:
            sentence = runs.save(2)
        if not forever:  # the disk answers again: what was half written is gone at once
            assert not [path for path in (runs.run / "checkpoints").iterdir() if sentence and path.name.endswith(".partial")], disk.seen[number - 1]
        check_what_is_left(runs, sentence, code, f"operation {number} of {total}: {disk.seen[number - 1 : number]}, {sentence!r}, {runs.said}")
        runs.peers.writer(lambda: shutil.rmtree(runs.run))
    return total


def check_what_is_left(runs: Runs, sentence: str, code: int, where: str) -> None:
    """What every refusal must leave: a sentence, the old checkpoint or the new one, no half of one, and a run that goes on."""
    assert len(set(runs.peers.exchange(sentence))) == 1, f"ranks disagree: {where}"
    if sentence:
        assert os.strerror(code) in sentence and "earlier checkpoints are intact" in sentence and "\n" not in sentence, where
        assert "make space there" in sentence if code == errno.ENOSPC else "check the path and its permissions" in sentence, where
    folders = {step: runs.run / "checkpoints" / step_name(step) for step in (1, 2)}
    whole = [step for step, folder in folders.items() if folder.exists()]
    assert all(inspect(folders[step]) == [] for step in whole), where
    assert 1 in whole if sentence else 2 in whole, where
    found = runs.manager().begin("auto")
    assert found is not None and found.step == whole[-1], where
    assert sorted(path.name for path in (runs.run / "checkpoints").iterdir()) == [step_name(step) for step in whole], where
    assert runs.save(3) == "" and [path.name for path in (runs.run / "checkpoints").iterdir()] == [step_name(3)], where
    runs.peers.exchange(None)  # all have looked


def held_back(world: World, root: str) -> list[Any]:
    """Train on while the last rank's disk does not answer; what was there after the steps, and whether the files are those of a save at once."""
    runs = Runs(world, root, True)
    last = dist.get_rank() == dist.get_world_size() - 1
    runs.another("held")
    runs.engine.save(runs.root / "at_once")
    saving, gate = runs.saving(), threading.Event()
    with FaultyDisk(lambda number: (gate.wait(60), None)[1] if last else None):
        runs.start(saving, 2)
        for step in (2, 3, 4):
            runs.train(step)
            saving.boundary(step + 1)
        before = runs.reported[-1].step, (runs.run / "checkpoints" / step_name(2)).exists()
        runs.peers.exchange(None)
        gate.set()
        runs.start(saving, 5)  # waits for the one before
        between = runs.reported[-1].step, inspect(runs.run / "checkpoints" / step_name(2))
        saved = {path.name: path.read_bytes() for path in (runs.run / "checkpoints" / step_name(2) / "zero").iterdir()}
        saving.finish()
    saving.close(runs.said.append)
    same = saved == {path.name: path.read_bytes() for path in (runs.root / "at_once" / "zero").iterdir()}
    left = [path.name for path in (runs.run / "checkpoints").iterdir()]
    return [before, between, same, left if dist.get_rank() == 0 else None, runs.said]


def _dawdling(exchange: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    def exchange_slowly(value: Any) -> list[Any]:
        values = exchange(value)
        time.sleep(0.2)
        return values

    return exchange_slowly


def refused_in_flight(world: World, root: str) -> tuple[str, int]:
    """The last rank's disk is full, and the other threads are slow to notice: the sentence, and the boundary at which this rank learnt of it."""
    runs = Runs(world, root, True)
    last = dist.get_rank() == dist.get_world_size() - 1
    assert runs.background is not None
    if not last:
        runs.background = replace(runs.background, exchange=_dawdling(runs.background.exchange))
    runs.another("full")
    saving = runs.saving()
    with FaultyDisk(refusing(3, errno.ENOSPC) if last else lambda number: None):
        runs.start(saving, 2)
        for step in range(2, 400):
            runs.train(step)
            try:
                saving.boundary(step + 1)
            except UserError as error:
                saving.close(runs.said.append)
                return str(error), step + 1
    return "", 0
