"""Seen-set equality: readers that are killed at random steps and go on with another number of ranks read what one that is never stopped reads."""

import hashlib
import json
import multiprocessing as mp
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.data.config import DataConfig, PhaseConfig, SourceConfig
from pretrain.data.corpus import Corpus
from pretrain.data.loader import build_loader
from pretrain.data.samples import TrainingSamples
from tests.data.examples import Batch, corrupt

STEPS, GLOBAL, LENGTH = 60, 16, 16
PHASES = [(23 * GLOBAL * LENGTH, {"a": 3.0, "b": 1.0}), (41 * GLOBAL * LENGTH, {"b": 1.0}), (None, {"a": 0.2, "b": 0.8})]
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])  # the server of tests.distributed: torch is imported once


def read(folders: dict[str, str], kind: str, rank: int, ranks: int, micro: int, start: int, kill_at: int | None, said: str) -> None:
    """One rank: a line per step with sample numbers, addresses and a hash of the noised arrays; dies by SIGKILL in step `kill_at`."""
    data = DataConfig(
        train={name: SourceConfig(path=path) for name, path in folders.items()}, loader=kind, workers=2,  # type: ignore[arg-type]
        phases=[PhaseConfig(until=until, mix=mix) for until, mix in PHASES],
    )  # fmt: skip
    batch = Batch(global_sequences=GLOBAL, micro_sequences=micro, length=LENGTH)
    corpora = {name: Corpus(path, name=name) for name, path in folders.items()}
    samples = TrainingSamples(data, corpora, batch, corrupt=corrupt, lookahead=1, random_length=False, seed=11)
    with Path(said).open("a") as out, build_loader(samples, data, batch, dp_rank=rank, dp_size=ranks, start_step=start) as loader:
        for shard in loader:
            if shard.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if shard.step >= STEPS:
                return
            for micro_batch in shard.micro_batches:
                for row, number in enumerate(micro_batch.sample_ids):
                    digest = hashlib.blake2b(digest_size=8)
                    for tensors in (micro_batch.inputs, micro_batch.targets):
                        for key in sorted(tensors.keys() - {"documents"}):
                            digest.update(tensors[key][row].numpy().tobytes())
                    address = samples.mixture.address(number)
                    out.write(json.dumps([shard.step, number, str(address), digest.hexdigest()]) + "\n")
            out.flush()


def start(corpora: dict[str, Corpus], kind: str, ranks: int, micro: int, begin: int, kill_at: int | None, folder: Path) -> list[list[Any]]:
    """What a start of so many ranks has read when all of them have ended."""
    folder.mkdir()
    folders = {name: str(corpus.folder) for name, corpus in corpora.items()}
    processes = [
        _CONTEXT.Process(target=read, args=(folders, kind, rank, ranks, micro, begin, kill_at, str(folder / str(rank)))) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert all(process.exitcode == (-signal.SIGKILL if kill_at is not None else 0) for process in processes)
    return [json.loads(line) for rank in range(ranks) for line in (folder / str(rank)).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "dali"])
def test_killed_readers_see_what_an_unstopped_one_sees(corpora: dict[str, Corpus], tmp_path: Path, kind: str) -> None:
    """DP 4 -> 2 -> 8, each killed within a step, going on from the last checkpoint (every 5 steps), over three phases."""
    whole = {number: (step, address, digest) for step, number, address, digest in start(corpora, "plain", 1, 16, 0, None, tmp_path / "whole")}
    assert sorted(whole) == list(range(STEPS * GLOBAL))
    chance = random.Random(7 if kind == "dali" else 8)
    first, second = chance.randrange(10, 30), chance.randrange(32, 55)
    seen: dict[int, tuple[int, str, str]] = {}
    begin = 0
    for ranks, micro, kill_at in ((4, 2, first), (2, 8, second), (8, 1, None)):
        lines = start(corpora, kind, ranks, micro, begin, kill_at, tmp_path / f"dp{ranks}")
        end = STEPS if kill_at is None else kill_at - kill_at % 5  # what came after the last checkpoint is read again
        part = {number: (step, address, digest) for step, number, address, digest in lines if step < end}
        assert len(part) == (end - begin) * GLOBAL and not part.keys() & seen.keys(), "each sample once"
        seen |= part
        begin = end
    assert seen == whole


def read_watched(folders: dict[str, str], said: str, opened: str) -> None:
    """The same from step 58 on, with a list of every file that was opened for writing."""
    found: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            found.append(str(arguments[0]))

    sys.addaudithook(hook)
    read(folders, "plain", 0, 1, 16, 58, None, said)
    Path(opened).write_text("\n".join(found))


def test_reading_writes_no_file(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    """No index is built at launch, beside the corpora or anywhere else."""
    folders = {name: str(corpus.folder) for name, corpus in corpora.items()}
    said, opened = tmp_path / "said", tmp_path / "opened"
    process = _CONTEXT.Process(target=read_watched, args=(folders, str(said), str(opened)))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert set(opened.read_text().splitlines()) == {str(said)}
    assert len(said.read_text().splitlines()) == 2 * GLOBAL
