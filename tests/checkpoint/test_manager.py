"""A checkpoint is complete or it is not there: crashes, damage, full disks, retention, and starting over."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pretrain.checkpoint import files
from pretrain.checkpoint.layout import TrainState, step_name, step_of
from pretrain.checkpoint.manager import CheckpointManager, find_checkpoint
from pretrain.checkpoint.peers import Peers
from pretrain.errors import UserError
from tests.checkpoint.examples import state, writer


class Crash(BaseException):
    """Stands for kill -9: nothing in the program may catch it."""


def make(run: Path, keep: int = 3, said: list[str] | None = None) -> CheckpointManager:
    return CheckpointManager(run, keep, say=(said if said is not None else []).append)


def save(run: Path, *steps: int, keep: int = 0) -> None:
    for step in steps:
        save_one(make(run, keep), step)


def save_one(checkpoints: CheckpointManager, step: int) -> None:
    checkpoints.save(step, writer(step), state(step), "name: x\n")
    checkpoints.prune()


def names(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


def test_saved_is_found_with_its_state(tmp_path: Path) -> None:
    save(tmp_path, 10, 9)
    found = make(tmp_path).latest()
    assert found is not None and found.step == 10 and found.state == state(10)
    assert TrainState.from_json(found.state.to_json(), tmp_path) == state(10)
    assert find_checkpoint(tmp_path).step == 10
    assert find_checkpoint(tmp_path / "checkpoints" / step_name(9)).step == 9
    assert step_of("step_00000009") == 9 and step_of("step_00000009.partial") is None


# ---- crashes ----------------------------------------------------------------------------------------------------------------------


def boundaries(patch: pytest.MonkeyPatch, on_call: Callable[[int], None]) -> None:
    """Call `on_call(n)` before the n-th operation that changes or syncs the disk."""
    count = 0

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            on_call(count)
            return original(*args, **kwargs)

        patch.setattr(owner, name, wrapped)

    for owner, name in ((os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (Path, "mkdir"), (Path, "open"), (Path, "write_bytes")):
        wrap(owner, name)


def count_boundaries(run: Path, patch: pytest.MonkeyPatch) -> int:
    seen: list[int] = []
    with patch.context() as context:
        boundaries(context, seen.append)
        save(run, 2, keep=1)
    return seen[-1]


def test_a_crash_at_any_boundary_leaves_a_complete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "rehearsal", 1)
    total = count_boundaries(tmp_path / "rehearsal", monkeypatch)
    assert total > 15
    resumed = set()
    for boundary in range(1, total + 1):
        run = tmp_path / f"run{boundary}"
        save(run, 1)

        def crash(number: int, at: int = boundary) -> None:
            if number == at:
                raise Crash

        with monkeypatch.context() as context:
            boundaries(context, crash)
            with pytest.raises(Crash):
                save(run, 2, keep=1)
        said: list[str] = []
        found = make(run, said=said).begin("auto")
        assert found is not None and not said, f"boundary {boundary}: {said}"
        resumed.add(found.step)
        assert all(step_of(name) for name in names(run)), f"boundary {boundary} left {names(run)}"
        save(run, 2, 3, keep=1)
        assert names(run) == [step_name(3)]
    assert resumed == {1, 2}


# ---- a disk that refuses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_a_refusing_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    save(tmp_path / "rehearsal", 1)
    total = count_boundaries(tmp_path / "rehearsal", monkeypatch)
    for boundary in range(1, total + 1):
        run = tmp_path / f"run{boundary}"
        save(run, 1)

        def refuse(number: int, at: int = boundary) -> None:
            if number == at:
                raise OSError(code, os.strerror(code), "some/file")

        said: list[str] = []
        with monkeypatch.context() as context:
            boundaries(context, refuse)
            try:
                save_one(make(run, 1, said), 2)
            except UserError as error:
                advice = " free)" if code == errno.ENOSPC else "check the path and its permissions"
                assert os.strerror(code) in str(error) and advice in str(error) and "\n" not in str(error)
            else:
                # Only deleting the old one failed; or it could not be read to be counted, and stays.
                assert os.strerror(code) in said[0] if said else names(run) == [step_name(1), step_name(2)], f"boundary {boundary} of {total}"
        found = make(run).latest()
        assert found is not None and found.step in (1, 2)


def test_a_really_full_disk(tmp_path: Path) -> None:
    """/dev/full answers ENOSPC as a full disk does, to Python and to torch.save's own writer."""
    import torch

    save(tmp_path, 1)

    def through_python(folder: Path) -> None:
        (folder / "state.bin").symlink_to("/dev/full")
        (folder / "state.bin").write_bytes(b"x")

    def through_torch(folder: Path) -> None:
        (folder / "state.pt").symlink_to("/dev/full")
        torch.save({"x": torch.zeros(1 << 20)}, folder / "state.pt")

    for write in (through_python, through_torch):
        with pytest.raises(UserError, match="step_00000002 could not be saved: .*earlier checkpoints are intact"):
            make(tmp_path).save(2, write, state(2), "")
    assert names(tmp_path) == [step_name(1)]


def test_a_mistake_in_the_program_is_no_disk_error(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        make(tmp_path).save(1, write, state(1), "")


# ---- damage -------------------------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FILES = ["zero/a.pt", "objective.pt", "train_state.json", "config.yaml", "manifest.json", "COMPLETE"]


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, name: str, harm: Callable[[Path], None]) -> None:
    save(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints" / step_name(2)
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == sorted(FILES)
    harm(folder / name)
    said: list[str] = []
    found = make(tmp_path, said=said).latest()
    assert found is not None and found.step == 1
    assert ("manifest.json" if name == "COMPLETE" and harm is not Path.unlink else name) in said[0] and step_name(2) in said[0]
    assert f"renamed to {step_name(2)}.damaged-1" in said[0] and step_name(1) in said[1]
    assert names(tmp_path) == [step_name(1), step_name(2) + ".damaged-1"]  # kept, but out of the way
    save(tmp_path, 2)
    assert find_checkpoint(tmp_path).step == 2


def test_only_damaged_ones_are_an_error_and_stay(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    flip(tmp_path / "checkpoints" / step_name(1) / "objective.pt")
    truncate(tmp_path / "checkpoints" / step_name(2) / "zero/a.pt")
    for name in FILES:
        truncate(tmp_path / "checkpoints" / step_name(3) / name)
    several = f"{step_name(3)} is damaged: .*{step_name(2)} is damaged: zero/a.pt has 767 bytes.* of 768; .*{step_name(1)} is damaged: objective"
    with pytest.raises(UserError, match=several):
        make(tmp_path).begin("auto")
    assert names(tmp_path) == [step_name(1), step_name(2), step_name(3)]
    with pytest.raises(UserError, match=several):
        find_checkpoint(tmp_path)
    with pytest.raises(UserError, match="objective.pt does not have the checksum"):
        find_checkpoint(tmp_path / "checkpoints" / step_name(1))


def test_every_damaged_one_is_named_and_set_aside(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for step in (2, 3):
        flip(tmp_path / "checkpoints" / step_name(step) / "objective.pt")
    said: list[str] = []
    found = make(tmp_path, said=said).latest()
    assert found is not None and found.step == 1
    assert [step_name(3) in said[0], step_name(2) in said[1], step_name(1) in said[2], len(said)] == [True, True, True, 3]
    assert names(tmp_path) == [step_name(1), *(step_name(step) + ".damaged-1" for step in (2, 3))]


def test_a_folder_that_is_no_checkpoint_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(UserError, match="photos is not a checkpoint .*name a run directory") as caught:
        find_checkpoint(tmp_path / "photos")
    assert "damaged" not in str(caught.value)
    with pytest.raises(UserError, match="there is no checkpoint at .*nowhere"):
        find_checkpoint(tmp_path / "nowhere")
    save(tmp_path / "run", 1)
    assert find_checkpoint(tmp_path / "run" / "checkpoints").step == 1
    (tmp_path / "run" / "checkpoints" / step_name(2)).mkdir()
    said: list[str] = []
    found = make(tmp_path / "run", said=said).latest()
    assert found is not None and found.step == 1 and f"{step_name(2)} is not a checkpoint" in said[0]


def test_space_is_told_in_units_that_say_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(total: int, free: int) -> str:
        monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(total=total, used=total - free, free=free))
        return files.free_space(tmp_path / "not" / "there")

    assert disk(2_000_000_000_000, 1_500_000_000) == "1.5 GB of 2.0 TB free"
    assert disk(65_536, 0) == "0 bytes of 65.5 kB free"
    assert disk(0, 0) == "free space unknown"


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    text = state(1).to_json().replace('"format": 1', '"format": 99')
    with pytest.raises(UserError, match="format 99"):
        TrainState.from_json(text, tmp_path)
    with pytest.raises(UserError, match="not a training state"):
        TrainState.from_json('{"format": 1, "step": 3}', tmp_path)


# ---- retention ------------------------------------------------------------------------------------------------------------------------


def test_retention_counts_complete_ones_only(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoints" / step_name(3) / "COMPLETE").unlink()
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == [step_name(2), step_name(3), step_name(4)]  # 3 is not complete: neither counted nor deleted
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == [step_name(3), step_name(5)]


def test_milestones_stay_whatever_is_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        checkpoints = make(tmp_path, keep=1)
        checkpoints.save(step, writer(step), replace(state(step), milestone=step in (2, 5)), "")
        checkpoints.prune()
    assert names(tmp_path) == [step_name(2), step_name(5), step_name(6)]
    assert find_checkpoint(tmp_path / "checkpoints" / step_name(2)).state.milestone
    older = state(1).to_json().replace(',\n  "milestone": false', "")
    assert "milestone" not in older and TrainState.from_json(older, tmp_path) == state(1)
    torn = tmp_path / "checkpoints" / step_name(5) / "train_state.json"
    torn.write_bytes(b"x" * torn.stat().st_size)  # of the right size: what cannot be asked is not deleted
    save(tmp_path, 7, keep=1)
    assert names(tmp_path) == [step_name(2), step_name(5), step_name(7)]


def test_saving_a_step_again_keeps_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    make(tmp_path).save(1, lambda _: pytest.fail("nothing to write"), state(1), "")


def test_nothing_is_deleted_before_the_run_says_so(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)
    checkpoints = make(tmp_path, keep=1)
    checkpoints.save(2, writer(2), state(2), "")
    assert names(tmp_path) == [step_name(1), step_name(2)]
    checkpoints.prune()
    assert names(tmp_path) == [step_name(2)]


def test_nothing_starts_over_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert make(run).begin("auto") is None
    run.mkdir()
    (run / "config.yaml").write_text("")
    assert make(run).begin("auto") is None  # frozen, but nothing was done
    (run / "log.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"is not empty \(log.jsonl\).*resume=fresh"):
        make(run).begin("auto")
    said: list[str] = []
    assert make(run, said=said).begin("fresh") is None
    assert (tmp_path / "run.old-1" / "log.jsonl").exists() and not run.exists() and "run.old-1" in said[0]
    save(run, 1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    found = make(run).begin("fresh")  # the scheduler repeats the command line; work done since must not be moved aside
    assert found is not None and found.step == 1
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert make(run).begin("fresh") is None
    assert (tmp_path / "run.old-2" / "checkpoints").exists()


# ---- several ranks --------------------------------------------------------------------------------------------------------------------


def together(size: int, action: Callable[[Peers], Any]) -> list[Any]:
    """Run `action` on `size` threads that exchange as ranks do; a rank that is missing breaks the barrier."""
    barrier, values, results = threading.Barrier(size, timeout=20), [None] * size, [None] * size

    def rank(number: int) -> None:
        def exchange(value: Any) -> list[Any]:
            values[number] = value
            barrier.wait()
            answer = list(values)
            barrier.wait()
            return answer

        try:
            results[number] = action(Peers(number, size, exchange))
        except Exception as error:
            results[number] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_share_the_work_and_agree(tmp_path: Path) -> None:
    hashed: list[tuple[int, str]] = []

    def run(peers: Peers) -> int:
        def write(folder: Path) -> None:
            (folder / f"rank{peers.rank}").write_bytes(b"x" * 100)

        checkpoints = CheckpointManager(tmp_path, 1, peers, say=lambda _: None)
        checkpoints.save(1, write, state(1), "name: x\n")
        found = checkpoints.latest()
        assert found is not None
        hashed.append((peers.rank, found.folder.name))
        return found.step

    assert together(3, run) == [1, 1, 1]
    assert files.inspect(tmp_path / "checkpoints" / step_name(1)) == []
    assert {"rank0", "rank1", "rank2", "train_state.json", "config.yaml"} == set(files.content(tmp_path / "checkpoints" / step_name(1)))
    flip(tmp_path / "checkpoints" / step_name(1) / "rank2")
    answers = together(3, lambda peers: CheckpointManager(tmp_path, 1, peers, say=lambda _: None).latest())
    assert all(isinstance(answer, UserError) for answer in answers)


def test_one_rank_fails_and_all_learn_of_it(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def run(peers: Peers, error: Exception) -> None:
        def write(folder: Path) -> None:
            if peers.rank == 1:
                raise error
            (folder / f"rank{peers.rank}").write_bytes(b"x")

        CheckpointManager(tmp_path, 1, peers, say=lambda _: None).save(2, write, state(2), "")

    answers = together(3, lambda peers: run(peers, OSError(errno.ENOSPC, "No space left on device", "rank1")))
    assert all(isinstance(answer, UserError) and "No space left on device: rank1 (rank 1)" in str(answer) for answer in answers)
    answers = together(3, lambda peers: run(peers, ZeroDivisionError("bug")))
    assert [type(answer) for answer in answers] == [RuntimeError, ZeroDivisionError, RuntimeError]
    assert names(tmp_path)[0] == step_name(1) and find_checkpoint(tmp_path).step == 1


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No scheduler, and no waiting for the disk: there is no power cut here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    yield

