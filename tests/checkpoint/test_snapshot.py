"""A snapshot writes the files that a save at once would have written, byte for byte, whatever happens to the state afterwards."""

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.engine.snapshot import HostMemory, Snapshot, write_file
from pretrain.objectives.config import ObjectiveConfig
from tests.checkpoint.runs import DIT, LR
from tests.distributed import run_distributed
from tests.engine.world import World, make_engine, shard


def intricate_state() -> dict[str, Any]:
    """Views of one storage, one tensor twice, tuples, a parameter, attributes on a dictionary, an empty tensor."""
    flat = torch.arange(24, dtype=torch.float32)
    module = OrderedDict(a=flat[3:9].view(2, 3), b=flat[10:].t(), twice=flat)
    module._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
    pair = (flat, torch.Size([2, 3]))
    return {
        "module": module, "again": [flat, pair, pair], "half": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0),
        "parameter": torch.nn.Parameter(torch.ones(2)), "step": torch.tensor(3.0), "names": ["x", "x"], "shape": (2, 3), 1: {"k": None},
    }  # fmt: skip


def test_it_writes_the_file_that_torch_save_would(tmp_path: Path) -> None:
    state = intricate_state()
    write_file(state, tmp_path / "at_once")
    snapshot = Snapshot(HostMemory())
    snapshot.add(Path("later"), state)
    snapshot.finish()
    for tensor in (state["module"]["twice"], state["half"], state["parameter"].data):
        tensor.add_(1)
    state["again"].clear()
    snapshot.write(tmp_path)
    assert (tmp_path / "later").read_bytes() == (tmp_path / "at_once").read_bytes()
    assert (tmp_path / "later").stat().st_size < 8000, "a shared storage is written once"


def test_its_memory_is_used_again() -> None:
    memory = HostMemory()

    def take() -> list[int]:
        snapshot = Snapshot(memory)
        snapshot.add(Path("x"), intricate_state())
        snapshot.finish()
        return [buffer.data_ptr() for buffer in memory.buffers if buffer.nbytes()]

    assert take() == take() and len(set(take())) == 4
    smaller = Snapshot(memory)
    smaller.add(Path("x"), {"x": torch.zeros(7)})
    smaller.finish()
    assert [buffer.nbytes() for buffer in memory.buffers] == [28]


def both_ways(world: World, folder: str) -> int:
    """The engine's files by a snapshot that is written after two more steps, and at once; how many files are the same."""
    engine, objective, groups = make_engine(world)
    for step in range(3):
        if step == 1:
            own = Path(folder)
            engine.save(own / "at_once")
            snapshot = engine.snapshot()
        engine.train_step(shard(world, objective, groups, step), LR)
    snapshot.write(own / "later")
    torch.distributed.barrier()
    files = sorted(path.relative_to(own / "at_once") for path in (own / "at_once").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(own / "later") for path in (own / "later").rglob("*") if path.is_file())
    for name in files:
        assert (own / "at_once" / name).read_bytes() == (own / "later" / name).read_bytes(), name
    return len(files)


REPLAID = replace(DIT, objective=ObjectiveConfig(name="replaid"))


@pytest.mark.parametrize(
    ("ranks", "world", "files"),
    [
        (1, REPLAID, 3),  # with what the objective itself learns
        (2, DIT.laid(tensor=2), 4),
        (2, DIT.laid(zero_stage=2), 3),
        (2, DIT.laid(zero_stage=3), 4),
        (1, replace(DIT, dtype=torch.bfloat16), 2),
    ],
)
def test_the_engine_writes_the_same_files_later(tmp_path: Path, ranks: int, world: World, files: int) -> None:
    assert run_distributed(both_ways, ranks, world, str(tmp_path)) == [files] * ranks
