"""ZeRO files written without an engine are those that the engine of that layout writes: every value of every file."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import parameter_table
from pretrain.checkpoint.layout import Layout, step_name
from pretrain.checkpoint.reshape import LogicalFolder, write_logical
from pretrain.checkpoint.zero_writer import Target, write_zero
from tests.checkpoint.runs import DIT, LLAMA, LR, STEPS, fill_and_save, save_run
from tests.distributed import run_distributed
from tests.engine.world import SEQUENCES

DEEP = replace(DIT, backbone=BackboneConfig(kind="dit", hidden=32, layers=4, heads=4, cond_dim=16), optimizer=replace(DIT.optimizer, decay="all"))
MODELS = {"dit": DIT, "llama": LLAMA, "bf16": replace(LLAMA, dtype=torch.bfloat16), "deep": DEEP}
SOURCES = {"dit": (4, {"tensor": 2, "pipeline": 2}), "llama": (2, {"zero_stage": 3}), "bf16": (2, {}), "deep": (2, {"pipeline": 2})}
CASES = [
    ("dit", 1, {}),
    ("dit", 4, {"tensor": 2, "pipeline": 2}),
    ("dit", 7, {}),  # of which no group's size is a multiple, so that the alignment to twice as many shows
    ("dit", 3, {"zero_stage": 2}),
    ("dit", 4, {"tensor": 2, "zero_stage": 3}),
    ("llama", 4, {"tensor": 2}),
    ("llama", 3, {"zero_stage": 3}),
    ("bf16", 4, {"pipeline": 2}),
    ("bf16", 2, {"zero_stage": 2}),
    ("bf16", 3, {"zero_stage": 3}),
    ("deep", 2, {"pipeline": 2, "virtual_pipeline": 2}),
]


@pytest.fixture(scope="module")
def logical(tmp_path_factory):
    @cache
    def of(model):
        run = tmp_path_factory.mktemp(model)
        ranks, sizes = SOURCES[model]
        run_distributed(save_run, ranks, MODELS[model].laid(**sizes), str(run))
        write_logical(run / "checkpoints" / step_name(STEPS), run / "logical")
        return run / "logical"

    return of


def target_of(world, ranks):
    parallel = world.parallel
    return Target(
        layout=Layout.of(parallel, ranks // (parallel.tensor * parallel.pipeline)), optimizer=world.optimizer, dtype=world.dtype, lr=LR,
        table=parameter_table(world.network, 128), micro_sequences=world.micro_sequences, global_sequences=SEQUENCES,
    )  # fmt: skip


def same(got, want, where=""):
    """Equal in type, structure and every bit."""
    assert type(got) is type(want), where
    if isinstance(want, Tensor):
        assert (got.dtype, got.shape, got.requires_grad) == (want.dtype, want.shape, want.requires_grad), where
        assert torch.equal(got, want), where
        same(vars(got), vars(want), f"{where} attributes")
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            same(got[key], want[key], f"{where}/{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            same(mine, theirs, f"{where}/{i}")
    elif type(want).__module__.startswith("deepspeed") and hasattr(want, "__dict__"):
        same(vars(got), vars(want), where)
    else:
        assert got == want, where


@pytest.mark.slow
@pytest.mark.parametrize(("model", "ranks", "sizes"), CASES)
def test_files_are_the_engine_s(logical, tmp_path, model, ranks, sizes):
    world = replace(MODELS[model].laid(**sizes), micro_sequences=1)
    run_distributed(fill_and_save, ranks, world, str(logical(model)), str(tmp_path / "engine"))
    for _ in write_zero(LogicalFolder.open(logical(model)), tmp_path / "written", target_of(world, ranks)):
        pass
    want, got = ({path.name: path for path in (Path(tmp_path) / who / "zero").iterdir()} for who in ("engine", "written"))
    assert got.keys() == want.keys() and [path.name for path in (tmp_path / "written").iterdir()] == ["zero"]
    for name in want:
        same(torch.load(got[name], weights_only=False), torch.load(want[name], weights_only=False), name)
