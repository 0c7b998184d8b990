"""verify=resume finds nothing where a run resumes, and finds each defect that a broken resume has."""

import json
import os
from dataclasses import replace

import pytest

from pretrain.compose import command_from_tree
from pretrain.errors import UserError
from pretrain.launch_config import VerifyConfig
from pretrain.objectives.config import ObjectiveConfig, RePlaidConfig
from pretrain.parallel.config import ParallelConfig
from pretrain.verify import run
from tests.broken_resume import launch
from tests.small_run import small_config

TERMS = VerifyConfig(verify="resume", verify_steps=[2, 2])
REPLAID = ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=8, schedule_hidden=32, prior_ramp_steps=4))


def report_of(config):
    return json.loads(config.directory.with_name("small.verify.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "sizes"), [("mdlm", {"pipeline": 2}), (REPLAID, None)])
def test_a_run_that_resumes(tmp_path, objective, sizes):
    config = small_config(tmp_path, objective)
    terms = replace(TERMS, verify_layout=ParallelConfig(**sizes) if sizes else None)
    assert run(config, terms, launch())
    report = report_of(config)
    assert report["verdict"] == "passed" and report["layouts"]["resumed"] == "TP1 PP1 DP2 ZeRO-1"
    assert report["layouts"]["moved"] == ("TP1 PP2 DP1 ZeRO-1" if sizes else "TP2 PP1 DP1 ZeRO-1")
    found = {(one["start"], one["what"]): one for one in report["comparisons"]}
    assert found["moved", "samples with their noise"]["compared"] == 16
    assert 0 < found["moved", "masters, moments, objective at the end"]["difference"] < 1e-3, "another order of summation does show"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["small.verify.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "starts", "what"),
    [
        ("position", {"resumed", "moved"}, {"steps", "text (documents and windows)", "samples with their noise"}),
        ("moments", {"resumed"}, {"loaded masters, moments, objective", "masters, moments, objective at the end"}),
        ("count", {"moved"}, {"loaded masters, moments, objective", "losses, nats/token (relative)"}),
    ],
)
def test_a_broken_resume_is_caught(tmp_path, defect, starts, what):
    config = small_config(tmp_path)
    assert not run(config, TERMS, launch(defect))
    report = report_of(config)
    failed = {(one["start"], one["what"]) for one in report["comparisons"] if not one["passed"]}
    assert report["verdict"] == "failed" and {start for start, _ in failed} == starts
    assert what <= {name for _, name in failed}


@pytest.mark.slow
def test_real_processes(tmp_path):
    config = small_config(tmp_path)
    assert run(config, VerifyConfig(verify="resume", verify_steps=[1, 1], verify_ranks=1, verify_keep=True))
    assert sorted(path.name for path in (tmp_path / "runs" / "small.verify" / "runs").glob("[a-z]*")) == ["killed", "moved", "resumed", "straight"]


def test_what_cannot_be_verified_is_said(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    with pytest.raises(UserError, match="must be a multiple of parallel.tensor x parallel.pipeline = 4"):
        run(config, replace(TERMS, verify_ranks=2, verify_layout=ParallelConfig(tensor=4)))
    with pytest.raises(UserError, match=r"verify_steps=\[3\] must be"):
        VerifyConfig(verify="resume", verify_steps=[3])
    with pytest.raises(UserError, match="verify_ranks belongs to verify=resume"):
        command_from_tree({"verify_ranks": 2})
    with pytest.raises(UserError, match="verify='everything' must be 'resume'|verify=everything must be 'resume'"):
        command_from_tree({"verify": "everything"})
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(UserError, match="with python instead of torchrun"):
        run(config, TERMS)
