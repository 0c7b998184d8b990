"""convert.py universal, zero and weights: a run goes on from what they make, bit for bit as from the checkpoint itself."""

import argparse
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from pretrain.checkpoint.consolidate import consolidate
from pretrain.checkpoint.files import inspect
from pretrain.checkpoint.layout import Layout, TrainState
from pretrain.checkpoint.reshape import LOGICAL, LogicalFolder
from pretrain.convert.config import UniversalConfig, WeightsConfig, ZeroConfig
from pretrain.convert.relayout import to_universal, to_weights, to_zero
from pretrain.engine.config import OptimizerConfig
from pretrain.errors import UserError
from pretrain.objectives.config import ObjectiveConfig, RePlaidConfig
from pretrain.parallel.config import ParallelConfig
from pretrain.run_config import DurationConfig
from tests.distributed import run_distributed
from tests.small_run import small_config, train

REPLAID = ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=8, schedule_hidden=32, prior_ramp_steps=4))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two pipeline stages with an average and parameters of its objective, stopped after three steps of six."""
    config = small_config(tmp_path_factory.mktemp("relayout"), REPLAID, optimizer=OptimizerConfig(ema=0.9, decay="matrices"))
    stopped = replace(config, duration=DurationConfig(steps=6, stop_after=3), parallel=ParallelConfig(pipeline=2))
    run_distributed(train, 2, stopped)
    return config


def go_on(config, name, ranks, **sizes):
    answers = run_distributed(train, ranks, replace(config, name=name, parallel=ParallelConfig(**sizes)))
    assert len(answers[0]["losses"]) == 3
    return answers


def alike(answers, others):
    for one, other in zip(answers, others, strict=True):
        assert all(one[key] == other[key] for key in ("seen", "losses", "rates", "norms"))
        assert all(torch.equal(one[key], other[key]) for key in ("weights", "moments", "objective"))


@pytest.mark.slow
def test_training_goes_on_from_each_as_from_the_checkpoint(run):
    root = run.directory.parent
    universal = to_universal(UniversalConfig(checkpoint=str(run.directory), output=str(root / "universal")))
    laid = ParallelConfig(tensor=2)
    zero = to_zero(ZeroConfig(source=str(root / "universal"), output=str(root / "zero"), parallel=laid, data_ranks=2))
    direct = to_zero(ZeroConfig(source=str(run.directory), output=str(root / "direct"), parallel=laid, data_ranks=2))
    assert not inspect(universal) and not inspect(zero)
    assert TrainState.read(zero).layout == Layout(tensor=2, pipeline=1, virtual_pipeline=1, data=2, zero_stage=1)
    assert json.loads((zero / "manifest.json").read_text())["files"].keys() == json.loads((direct / "manifest.json").read_text())["files"].keys()
    for path in (zero / "zero").iterdir():
        assert path.read_bytes() == (direct / "zero" / path.name).read_bytes()
    want = go_on(run, "small", 4, tensor=2)
    alike(go_on(run, "zero", 4, tensor=2), want)
    alike(go_on(run, "universal", 4, tensor=2), want)


@pytest.mark.slow
@pytest.mark.parametrize("average", [False, True])
def test_weights(run, average):
    found = run.directory / "checkpoints" / "step_00000003"
    key, output = ("ema", "average") if average else ("fp32", "raw")
    want = consolidate(found, key)
    config = WeightsConfig(
        checkpoint=str(run.directory), step=3, output=str(run.directory.parent / output), weights="auto" if average else "raw",
        dtype="bf16" if average else "fp32", max_shard_bytes=1_000_000,
    )  # fmt: skip
    folder = to_weights(config)
    got = load_file(folder / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name].to(torch.bfloat16 if average else torch.float32)) for name in want)
    learned = torch.load(found / "objective.pt", weights_only=True)["modules"]
    assert all(torch.equal(tensor, learned[name]) for name, tensor in load_file(folder / "objective.safetensors").items())
    assert json.loads((folder / "weights.json").read_text())["step"] == 3


@pytest.mark.slow
def test_the_tensors_are_those_of_deepspeed_s_converter(run, tmp_path):
    """On two data-parallel ranks: under tensor parallelism its converter needs a pattern for each kind of cut."""
    from deepspeed.checkpoint import ds_to_universal

    root = run.directory.parent
    zero = to_zero(ZeroConfig(source=str(run.directory), step=3, output=str(root / "for_deepspeed"), data_ranks=2))
    universal = to_universal(UniversalConfig(checkpoint=str(zero), output=str(root / "after_deepspeed")))
    given = argparse.Namespace(
        input_folder=str(zero / "zero"), output_folder=str(tmp_path / "out"), num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False,
        strict=True, inject_missing_state=True,
    )  # fmt: skip
    ds_to_universal.main(given)
    logical = LogicalFolder.open(universal / LOGICAL)
    assert logical.keys == ["fp32", "exp_avg", "exp_avg_sq", "ema"]
    for name in logical.table:
        for key in ("fp32", "exp_avg", "exp_avg_sq"):  # it leaves out every other state of the optimizer, such as the average
            theirs = torch.load(tmp_path / "out" / "zero" / name / f"{key}.pt", weights_only=False)["param"]
            assert torch.equal(logical.shard(name, key, 1, 0), theirs.view(logical.table[name].shape)), (name, key)


@pytest.mark.slow
def test_refusals_leave_nothing_behind(run):
    root = run.directory.parent
    before = sorted(path.name for path in root.iterdir())
    for sizes, data, words in [({"tensor": 3}, 1, "parallel.tensor=3"), ({}, 16, "batch"), ({"pipeline": 2, "zero_stage": 3}, 1, "zero_stage=3")]:
        with pytest.raises(UserError, match=words):
            to_zero(ZeroConfig(source=str(run.directory), output=str(root / "refused"), parallel=ParallelConfig(**sizes), data_ranks=data))
    with pytest.raises(UserError, match="exists; name a folder that does not"):
        to_universal(UniversalConfig(checkpoint=str(run.directory), output=str(run.directory)))
    with pytest.raises(UserError, match="has no checkpoint of step 5"):
        to_universal(UniversalConfig(checkpoint=str(run.directory), step=5, output=str(root / "refused")))
    assert sorted(path.name for path in root.iterdir()) == before
