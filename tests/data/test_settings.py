"""The data part of a configuration: its presets, and how far ahead the loader may read."""

import sys

import pytest
import yaml

from pretrain.compose import CONFIGS, command_from_arguments
from pretrain.errors import UserError
from pretrain.rules import validate
from pretrain.run_config import RunConfig


def composed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> RunConfig:
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *arguments])
    command = command_from_arguments()
    assert command is not None
    return command.run


@pytest.mark.parametrize("model", ["mdlm_6M", "ar_2121M", "mdm_prime_v2_1p1b"])
def test_the_scaling_study_reads_slimpajama_in_llama2_pieces(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setenv("DATA_ROOT", "/data")
    run = composed(monkeypatch, f"+model={model}")
    assert (run.tokenizer, run.data.train["slimpajama"].path) == ("/data/slimpajama/tokenizer.model", "/data/slimpajama/train")
    assert composed(monkeypatch, "+model=mdlm_tiny", "data=slimpajama_llama2").data.train.keys() == {"slimpajama"}


def test_the_presets_old_name_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no data=slimpajama; did you mean slimpajama_llama2"):
        composed(monkeypatch, "+model=mdlm_tiny", "data=slimpajama")


@pytest.mark.parametrize("ahead", ["0", "-1", "65", "1000000000000"])
def test_batches_read_ahead_are_bounded(monkeypatch: pytest.MonkeyPatch, ahead: str) -> None:
    with pytest.raises(UserError, match=rf"data.prefetch={ahead} must lie in \[1, 64\]"):
        validate(composed(monkeypatch, "+model=mdlm_tiny", f"data.prefetch={ahead}"), world_size=1)


@pytest.mark.parametrize(("phase", "sources"), [("nemotron_phase1", 13), ("nemotron_phase2", 10)])
def test_weights_that_are_not_published_must_be_given(monkeypatch: pytest.MonkeyPatch, phase: str, sources: int) -> None:
    with pytest.raises(UserError, match=r"^no value for data\.train\.cc_high_quality\.weight, .*: the weights of this mixture are not published"):
        composed(monkeypatch, "+model=mdlm_1p7b", f"data={phase}")
    folder = yaml.safe_load((CONFIGS / f"prepare_data/{phase}.yaml").read_text())["sources"] | (
        yaml.safe_load((CONFIGS / "prepare_data/nemotron_phase2.yaml").read_text())["sources"]
    )
    weights = [f"data.train.{name}.weight={number}" for number, name in enumerate(folder, start=1)]
    train = composed(monkeypatch, "+model=mdlm_1p7b", f"data={phase}", *weights).data.train
    assert len(train) == sources and train.keys() == folder.keys()
    assert all(source.path.endswith(f"/nemotron/train/{name}") for name, source in train.items())
    with pytest.raises(UserError, match=r"^no value for data\.train\.sft_math\.weight: the weights of this mixture"):
        composed(monkeypatch, "+model=mdlm_1p7b", f"data={phase}", *(word for word in weights if "sft_math" not in word))
    fewer = [*(word for word in weights if "sft_math" not in word), "~data.train.sft_math"]
    assert len(composed(monkeypatch, "+model=mdlm_1p7b", f"data={phase}", *fewer).data.train) == sources - 1
