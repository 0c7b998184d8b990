"""Any layout to any layout: tensors are those that DeepSpeed itself gathers, bit for bit, and training goes on as if nothing had happened."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pretrain.backbones.config import BackboneConfig
from pretrain.checkpoint.consolidate import consolidate, write_consolidated
from pretrain.checkpoint.layout import step_name
from pretrain.checkpoint.reshape import LogicalFolder, write_logical
from pretrain.checkpoint.zero_reader import ZeroCheckpoint
from pretrain.errors import UserError
from tests.checkpoint.runs import DIT, KEYS, LLAMA, STEPS, fill_over, load_run, save_onto_full_disk, save_run
from tests.distributed import run_distributed
from tests.engine.world import World

BF16 = replace(LLAMA, dtype=torch.bfloat16)
DEEP = replace(DIT, backbone=BackboneConfig(kind="dit", hidden=32, layers=4, heads=4, cond_dim=16))
MODELS = {"dit": DIT, "llama": LLAMA, "bf16": BF16, "deep": DEEP}
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "dp2": (2, {}),
    "dp4": (4, {}),
    "dp2-zero2": (2, {"zero_stage": 2}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "tp2-dp2-zero3": (4, {"tensor": 2, "zero_stage": 3}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "tp2-dp2": (4, {"tensor": 2}),
    "pp2-interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2}),
}
PAIRS = [
    ("dit", "tp2-pp2", "one"),
    ("dit", "tp2-pp2", "dp2-zero3"),
    ("dit", "dp2-zero2", "pp2"),
    ("dit", "dp2-zero3", "tp2"),
    ("dit", "dp4", "tp2-dp2-zero3"),
    ("llama", "tp2-dp2", "dp2-zero2"),
    ("llama", "tp2-dp2-zero3", "one"),
    ("llama", "one", "tp2"),
    ("bf16", "tp2-dp2", "one"),
    ("bf16", "dp2", "tp2"),
    ("deep", "one", "pp2-interleaved"),
    ("deep", "pp2-interleaved", "tp2-dp2"),
    ("deep", "pp2-interleaved", "dp2-zero3"),
]


def world(model: str, layout: str) -> tuple[int, World]:
    ranks, sizes = LAYOUTS[layout]
    return ranks, MODELS[model].laid(**sizes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @cache
    def of(model, layout):
        run = tmp_path_factory.mktemp(f"{model}-{layout}")
        ranks, laid = world(model, layout)
        answers = run_distributed(save_run, ranks, laid, str(run))
        return run, *answers[0]

    return of


def same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape and np.array_equal(got[name], want[name]), name
        assert name.endswith("time.input.weight") or name.startswith("fp32") or np.any(want[name]), f"{name} is zero and tests nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "source", "target"), PAIRS)
def test_resume_in_another_layout(saved, model, source, target):
    run, tensors, losses = saved(model, source)
    ranks, laid = world(model, target)
    answers = run_distributed(load_run, ranks, laid, str(run))
    got, continued = answers[0]
    same(got, tensors)
    np.testing.assert_allclose(continued, losses, rtol=1e-5 if model != "bf16" else 5e-3)
    assert [p.name for p in (run / "checkpoints").iterdir()] == [step_name(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "source"), [("dit", "tp2-pp2"), ("llama", "tp2-dp2-zero3"), ("bf16", "tp2-dp2")])
def test_consolidate(saved, tmp_path, model, source):
    run, tensors, _ = saved(model, source)
    folder = run / "checkpoints" / step_name(STEPS)
    whole = consolidate(folder)
    same({f"fp32/{name}": tensor.numpy() for name, tensor in whole.items()}, {name: t for name, t in tensors.items() if name.startswith("fp32/")})
    for key in ("fp32", "ema"):
        write_consolidated(folder, tmp_path / "model.safetensors", key)
        read = {f"{key}/{name}": tensor.numpy() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
        same(read, {name: tensor for name, tensor in tensors.items() if name.startswith(f"{key}/")})
    with pytest.raises(UserError, match="holds no velocity"):
        consolidate(folder, "velocity")
    with pytest.raises(UserError, match="full.safetensors could not be written: No space left on device"):
        (tmp_path / "full.safetensors.partial").symlink_to("/dev/full")
        write_consolidated(folder, tmp_path / "full.safetensors")


@pytest.mark.slow
def test_filling_replaces_what_an_engine_had(saved, tmp_path):
    run, tensors, losses = saved("dit", "tp2-pp2")
    write_logical(run / "checkpoints" / step_name(STEPS), tmp_path / "logical")
    logical = LogicalFolder.open(tmp_path / "logical")
    assert logical.step == STEPS and logical.keys == list(KEYS)
    for layout in ("one", "dp2-zero3"):
        ranks, laid = world("dit", layout)
        got, continued = run_distributed(fill_over, ranks, laid, str(run), str(tmp_path / "logical"))[0]
        same(got, tensors)
        np.testing.assert_allclose(continued, losses, rtol=1e-5)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(saved, tmp_path):
    run, _, _ = saved("dit", "tp2-pp2")
    folder = run / "checkpoints" / step_name(STEPS)
    copy = tmp_path / step_name(STEPS)
    (copy / "zero").mkdir(parents=True)
    for path in (folder / "zero").iterdir():
        (copy / "zero" / path.name).write_bytes(path.read_bytes())
    state = json.loads((folder / "train_state.json").read_text())
    described = state | {"layout": state["layout"] | {"data": 2}}
    (copy / "train_state.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="lacks optimizer file of data-parallel rank 1, model rank 0"):
        ZeroCheckpoint(copy)
    (copy / "train_state.json").write_text(json.dumps(state | {"backbone": state["backbone"] | {"layers": 3}}))
    with pytest.raises(UserError, match="lacks layers.2"):
        ZeroCheckpoint(copy)
    (copy / "train_state.json").write_text(json.dumps(state))
    path = copy / "zero" / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="mp_rank_01_optim_states.pt cannot be read"):
        ZeroCheckpoint(copy)


@pytest.mark.slow
def test_copies_that_differ_are_refused(saved, tmp_path):
    run, _, _ = saved("dit", "tp2-pp2")
    source = ZeroCheckpoint(run / "checkpoints" / step_name(STEPS))
    name = "layers.1.input_layernorm.weight"
    source.tensor(name)
    piece = source._pieces[name][1][1][0]
    piece.flat["fp32"] = piece.flat["fp32"].clone()
    piece.flat["fp32"][piece.start] += 0.1
    with pytest.raises(UserError, match=r"input_layernorm.weight differs .*tensor rank 1, stage 1"):
        source.tensor(name)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_nothing_in_a_file_is_executed(tmp_path, capsys):
    from pretrain.checkpoint import zero_reader

    torch.save({"optimizer_state_dict": Evil()}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="x.pt asks to run builtins.print .*nothing was run"):
        zero_reader._load(tmp_path / "x.pt")
    assert "executed" not in capsys.readouterr().out


@pytest.mark.slow
def test_one_rank_with_a_full_disk_stops_all(tmp_path):
    ranks, laid = world("dit", "dp2")
    answers = run_distributed(save_onto_full_disk, ranks, laid, str(tmp_path), timeout=60)
    for answer in answers:
        assert answer.startswith("UserError: checkpoint step_00000002 could not be saved: No space left on device") and answer.endswith("| 1")
    assert [p.name for p in Path(tmp_path, "checkpoints").iterdir()] == [step_name(1)]
