"""The self-test: every objective passes it in little time, in several layouts, and what is broken on purpose does not."""

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pretrain.engine.zero as zero
from pretrain import quiet, selftest
from pretrain.backbones.config import BackboneConfig
from pretrain.build import OBJECTIVES
from pretrain.command_line import ANSWERED_NO_EXIT
from pretrain.command_line import answer as answer_code
from pretrain.data.config import DataConfig, SourceConfig
from pretrain.data.random_text import RandomText
from pretrain.engine.config import OptimizerConfig, PrecisionConfig
from pretrain.errors import UserError
from pretrain.objectives.base import TokenLoss
from pretrain.objectives.config import EsoLMConfig, MDMPrimeConfig, ObjectiveConfig
from pretrain.objectives.mdlm import MDLM
from pretrain.parallel.config import ParallelConfig
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig
from tests.distributed import run_distributed
from tests.engine.tempered import Tempered
from tests.small_run import small_config

DIT = BackboneConfig(kind="dit", hidden=32, layers=2, heads=4, cond_dim=16)
LLAMA = BackboneConfig(kind="llama", hidden=32, layers=2, heads=4, kv_heads=2, qk_norm=True)
CLASSES = 64
MIXED = ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5))


def tiny(objective: str | ObjectiveConfig = "mdlm", **changes: Any) -> RunConfig:
    """A run whose tokenizer and corpus are nowhere."""
    if isinstance(objective, str):
        digits = {"mdm_prime": MDMPrimeConfig(digits=6)} if objective == "mdm_prime" else {}
        objective = ObjectiveConfig(name=objective, **digits)  # type: ignore[arg-type]
    config = RunConfig(
        name="tiny",
        root="/nowhere",
        tokenizer="/nowhere/tokenizer.model",
        objective=objective,
        backbone=DIT,
        data=DataConfig(train={"words": SourceConfig(path="/nowhere/words")}, loader="plain"),
        batch=BatchConfig(global_sequences=32, micro_sequences=2, length=16),
        duration=DurationConfig(steps=10),
        precision=PrecisionConfig(compute="fp32", loss_chunk=5),
    )
    return replace(config, **changes)


def answer(config: RunConfig, steps: int = 200) -> tuple[bool, str]:
    """The verdict, and what the main rank printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        passed = selftest.run(config, assumed_vocabulary=CLASSES, steps=steps)
    return passed, printed.getvalue()


def failures(printed: str) -> list[str]:
    """Names of the checks that failed."""
    return re.findall(r"^FAIL  ([^:]*):", printed, re.MULTILINE)


@pytest.mark.parametrize("name", [*OBJECTIVES, "esolm mixed", "mdlm llama"])
def test_every_objective_passes(name):
    config = tiny(name) if name in OBJECTIVES else tiny(MIXED) if name == "esolm mixed" else tiny(backbone=LLAMA)
    passed, printed = run_distributed(answer, 1, config)[0]
    assert passed, printed
    assert failures(printed) == []
    assert printed.count("\npass  ") == 7
    assert f"{config.objective.name}, tensor 1 x pipeline 1 x data 1, ZeRO 1, float32 on cpu" in printed
    assert "8 sequences of 16 tokens, random ids of a vocabulary of 64, since tokenizer=/nowhere/tokenizer.model does not exist" in printed
    assert printed.rstrip().endswith("self-test passed: all 7 checks")


def test_known_losses_of_a_zero_head():
    """log V for AR. For MDLM and Eso-LM log of the ids that can be predicted, at masked positions: their share is counted here."""
    found = {}
    for name in ("ar", "mdlm", "esolm"):
        printed = run_distributed(answer, 1, tiny(name), 3)[0][1]
        line = re.search(r"loss at the start: ([\d.]+) nats/token, uniform predictions give ([\d.]+)", printed)
        assert line is not None, printed
        found[name] = float(line[1])
        assert line[1] == line[2]
    words = Vocabulary(tokenizer_size=63, model_size=64, padded_size=128, mask_id=63, eos_id=0)
    mdlm = MDLM(words, ObjectiveConfig(name="mdlm"))

    def corrupt(*arguments):
        return mdlm.corrupt(*arguments, evaluation=False)

    samples = [RandomText(BatchConfig(global_sequences=8, micro_sequences=2, length=16), words, corrupt=corrupt, lookahead=0, seed=1).sample(i)
               for i in range(8)]  # fmt: skip
    masked = np.mean([sample.corrupted.targets["masked"] for sample in samples])
    assert found["ar"] == pytest.approx(np.log(64), abs=1e-4)
    assert found["mdlm"] == pytest.approx(masked * np.log(63), abs=1e-4)
    assert found["esolm"] == pytest.approx(masked * np.log(63), abs=1e-4)  # the same times and the same draws of masks


@pytest.mark.parametrize(
    ("ranks", "sizes", "held"),
    [(4, {"tensor": 2, "pipeline": 2}, "parameters of this rank are on other ranks too"), (2, {"zero_stage": 3}, "the largest difference is 0 ")],
)
def test_layouts(ranks, sizes, held):
    everyone = run_distributed(answer, ranks, tiny(MIXED, parallel=ParallelConfig(**sizes)))
    assert [passed for passed, _ in everyone] == [True] * ranks, everyone[0][1]
    assert held in everyone[0][1]
    assert all(printed == "" for _, printed in everyone[1:]), "only the main rank speaks"


def test_the_run_s_own_text_and_nothing_written(tmp_path):
    config = small_config(tmp_path, "mdlm", optimizer=OptimizerConfig(weight_decay=0.0))
    passed, printed = run_distributed(answer, 1, config)[0]
    assert passed, printed
    assert "8 sequences of 16 tokens, the first of the run's own text" in printed
    assert not config.directory.parent.exists()
    elsewhere = replace(config, data=replace(config.data, train={"web": SourceConfig(path=str(tmp_path / "web"))}))
    printed = run_distributed(answer, 1, elsewhere, 3)[0][1]
    assert re.search(r"random ids of a vocabulary of \d+, since data.train.web.path=\S+web holds no prepared corpus", printed), printed


# ---- broken on purpose --------------------------------------------------------------------------------------------------------------


class Cut(Tempered):
    """No gradient reaches the network."""

    def token_loss(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> TokenLoss:
        loss = super().token_loss(logits_BLv.detach(), targets, vocab)
        return TokenLoss(loss.loss_B + 0 * logits_BLv.sum((1, 2)), loss.nelbo_B)


class Frozen(Tempered):
    """The objective's own parameter gets no gradient; all else does."""

    def _scale(self) -> Tensor:
        return super()._scale().detach()


class Doubled(Tempered):
    """Trains on twice the loss."""

    name = "mdlm"

    def token_loss(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> TokenLoss:
        loss = super().token_loss(logits_BLv, targets, vocab)
        return TokenLoss(2 * loss.loss_B, loss.nelbo_B)


class NoNumber(Tempered):
    """A loss that is no number wherever a token is masked."""

    def token_loss(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> TokenLoss:
        loss = super().token_loss(logits_BLv, targets, vocab)
        return TokenLoss(loss.loss_B * torch.nan, loss.nelbo_B)


def broken(kind: type[Tempered], steps: int) -> tuple[bool, str]:
    selftest.build_objective = lambda config, vocabulary: kind(vocabulary)  # type: ignore[attr-defined]
    return answer(tiny(), steps)


@pytest.mark.parametrize(
    ("kind", "caught", "words"),
    [
        (Tempered, ["fall of the loss"], "must be under 30% within 5 steps"),
        (Cut, ["gradients", "fall of the loss"], r"ZERO in (?!objective)\S+, \S+, \S+ …"),
        (Frozen, ["gradients", "fall of the loss"], r"30 of 31 .* ZERO in objective\.scale\.0$"),
        (Doubled, ["loss at the start", "fall of the loss"], r"must be equal"),
        (NoNumber, ["loss at the start", "numbers", "fall of the loss"], r"nan nats/token"),
    ],
)
def test_what_is_broken_is_found(kind, caught, words):
    """In five steps nothing has fallen far; whatever else fails is what was broken."""
    passed, printed = run_distributed(broken, 1, kind, 5)[0]
    assert not passed
    assert failures(printed) == caught, printed
    assert re.search(words, printed, re.MULTILINE), printed
    assert f"self-test FAILED: {len(caught)} of {printed.count('pass  ') + len(caught)} checks" in printed


def drifted(config: RunConfig, name: str) -> tuple[bool, str]:
    """The last data-parallel rank's copy of a parameter moves by one unit in the last place."""
    compare = selftest.replica_difference

    def moved(stage: Any, objective: Any, groups: Any) -> Any:
        if groups.data.last:
            parameter = dict(stage.named_parameters())[name]
            with torch.no_grad():
                parameter[0] = torch.nextafter(parameter[0], torch.tensor(torch.inf))
        return compare(stage, objective, groups)

    selftest.replica_difference = moved  # type: ignore[assignment]
    return answer(config)


def test_a_drifted_replica_is_found():
    passed, printed = run_distributed(drifted, 2, tiny(), "layers.1.mlp.linear_fc1.bias")[0]
    assert not passed
    assert failures(printed) == ["replicas"], printed


def unsummed(config: RunConfig) -> tuple[bool, str]:
    """Ranks that hold a parameter together keep their parts of its gradient to themselves."""
    zero.sum_replicated = lambda *_: None  # type: ignore[assignment]
    return answer(config)


@pytest.mark.parametrize("sizes", [{"tensor": 2, "sequence": True}, {"pipeline": 2}])
def test_gradients_that_are_not_summed_are_found(sizes):
    passed, printed = run_distributed(unsummed, 2, tiny(parallel=ParallelConfig(**sizes)))[0]
    assert not passed
    assert failures(printed) == ["replicas"], printed


# ---- the batch and the command -------------------------------------------------------------------------------------------------------


def test_the_batch_is_as_small_as_the_rules_allow():
    def sequences(config: RunConfig, ranks: int = 1) -> int:
        return selftest.smallest_batch(config, ranks).batch.global_sequences

    assert sequences(tiny()) == 8
    assert sequences(tiny(batch=BatchConfig(global_sequences=4, micro_sequences=2, length=16))) == 4
    assert sequences(tiny(batch=BatchConfig(global_sequences=63, micro_sequences=3, length=16))) == 9
    assert sequences(tiny(MIXED, batch=BatchConfig(global_sequences=64, micro_sequences=8, length=16))) == 16, "both parts in whole micro-batches"
    assert sequences(tiny(), 8) == 16
    interleaved = ParallelConfig(pipeline=2, virtual_pipeline=2)
    deep = replace(DIT, layers=4)
    assert sequences(tiny(backbone=deep, parallel=interleaved, batch=BatchConfig(global_sequences=72, micro_sequences=6, length=16)), 2) == 12


def test_without_a_tokenizer_the_vocabulary_must_be_said():
    with pytest.raises(UserError, match="give the model's vocabulary: plan.vocabulary=32001"):
        selftest.assumed(tiny(), None)
    assert selftest.assumed(tiny(), 64) == Vocabulary(tokenizer_size=63, model_size=64, padded_size=128, mask_id=63, eos_id=0)
    assert selftest.assumed(tiny("ar"), 64) == Vocabulary(tokenizer_size=64, model_size=64, padded_size=128, mask_id=None, eos_id=0)
    kept = selftest.assumed(tiny(ObjectiveConfig(name="mdlm", mask_id=3)), 64)
    assert kept == Vocabulary(tokenizer_size=64, model_size=64, padded_size=128, mask_id=3, eos_id=0)
    batch = BatchConfig(global_sequences=8, micro_sequences=2, length=64)
    text = RandomText(batch, kept, corrupt=lambda tokens, *_: tokens, lookahead=0, seed=1)  # type: ignore[arg-type,return-value]
    ids = np.concatenate([text.sample(i).corrupted for i in range(200)])  # type: ignore[misc]
    assert set(ids.tolist()) == set(range(64)) - {3}


def launched(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of the launcher in this process."""
    from launchers.pretrain import main

    os.chdir(folder)
    sys.argv = ["pretrain.py", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return main(), printed.getvalue()


SMALL = ("+model=ar_tiny", "backbone.hidden=32", "backbone.layers=1", "batch.micro_sequences=4", "batch.length=16", "precision=fp32", "selftest=true")


def test_the_command(tmp_path):
    code, printed = run_distributed(launched, 1, tmp_path, *SMALL)[0]
    assert code == 0
    assert "random ids of a vocabulary of 256" in printed
    assert "self-test passed: all 7 checks" in printed
    assert list(tmp_path.iterdir()) == []


def test_yes_and_no(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert (answer_code(True), answer_code(False)) == (0, 1)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/somewhere")
    assert (answer_code(True), answer_code(False)) == (0, ANSWERED_NO_EXIT)
    assert ANSWERED_NO_EXIT == quiet.ANSWERED_NO


@pytest.mark.slow
def test_the_command_that_fails(tmp_path):
    """As a user starts it: what it prints, leaves and answers."""
    root = Path(__file__).parents[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(root / "launchers" / "pretrain.py"), *SMALL]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run([*words, "selftest_steps=3"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1, done.stderr
    assert not re.search("Traceback|exitcode|ChildFailed|error:", done.stderr), done.stderr
    assert "FAIL  fall of the loss" in done.stdout and "(must be under 30% within 3 steps; fewer than 200 steps may not be enough)" in done.stdout
    assert done.stdout.rstrip().endswith("self-test FAILED: 1 of 7 checks")
    assert list(tmp_path.iterdir()) == []
