"""Policies of the guard in whole runs: what is trained on, what is said, and how a resume decides."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain.audit.run import AuditedRun
from pretrain.checkpoint.layout import TrainState
from pretrain.data.skips import Skips
from pretrain.engine.statistics import StepResult
from pretrain.errors import UserError
from pretrain.guard import parts
from pretrain.parallel.config import ParallelConfig
from pretrain.run_config import CheckpointConfig, DurationConfig, ValidationConfig
from pretrain.telemetry.config import GuardConfig
from pretrain.telemetry.log import read_log
from tests.distributed import run_distributed
from tests.small_run import small_config, train


def spoil(bad: set[int]) -> None:
    """Give the samples of these steps of the data stream a loss that is no number."""
    from pretrain.objectives.mdlm import MDLM

    corrupt = MDLM.corrupt

    def spoiling(objective, tokens, documents, noise, *, evaluation):
        made = corrupt(objective, tokens, documents, noise, evaluation=evaluation)
        if not evaluation and noise.index // 8 in bad and noise.index % 8 == 3:
            made.targets["loss_weight"] = np.full_like(made.targets["loss_weight"], math.nan)
        return made

    MDLM.corrupt = spoiling


def spoiled(config, bad: set[int], kill_at: int | None = None):
    """Train on text of which some is bad; the sentence, if the run stops."""
    spoil(bad)
    try:
        return train(config, kill_at=kill_at)
    except UserError as error:
        return str(error)


def guarded(folder, every: int = 2, layout: ParallelConfig | None = None, **policies):
    return small_config(
        folder, guard=GuardConfig(**policies), checkpoint=CheckpointConfig(every=every, keep=0), validation=ValidationConfig(every=0),
        parallel=layout or ParallelConfig(),
    )  # fmt: skip


def events(config, kind: str) -> list[tuple[int, str]]:
    return [(r["step"], r["message"]) for r in read_log(config.directory / "log.jsonl") if r.get("event") == kind]


def test_stop_names_step_rank_module_sample_and_document(tmp_path):
    config = guarded(tmp_path)
    for sentence in run_distributed(spoiled, 2, config, {4}):
        assert sentence.startswith("step 5 gave loss nan and gradient norm nan, first in the loss on rank ")
        assert "in sample 35 (words: " in sentence and " documents " in sentence and "\n" not in sentence
        assert "the run diverged and stops here" in sentence and "lower schedule.peak" in sentence
    names = sorted(path.name for path in config.directory.glob("checkpoints/*"))
    assert names == ["step_00000002", "step_00000004"]


@pytest.mark.parametrize(("ranks", "layout"), [(4, {"tensor": 2, "pipeline": 2}), (2, {"zero_stage": 3})])
def test_skip_leaves_out_one_update_and_nothing_else(tmp_path, ranks, layout):
    """The step counts: rates and text go on. A resume across it is bitwise the unbroken run."""
    config = guarded(tmp_path, nonfinite="skip", layout=ParallelConfig(**layout))
    whole = run_distributed(spoiled, ranks, config, {3})[0]
    assert [math.isnan(loss) for loss in whole["losses"]] == [False, False, False, True, False, False]
    assert [step for step, _, _ in whole["seen"]] == [0, 1, 2, 3, 4, 5]
    [(step, said)] = events(config, "skip")
    assert step == 4 and said.endswith("its update was left out") and "in sample 27 " in said
    assert [r["step"] for r in read_log(config.directory / "log.jsonl") if r["kind"] == "train"] == [1, 2, 3, 5, 6]
    broken = replace(config, name="broken")
    run_distributed(spoiled, ranks, replace(broken, duration=DurationConfig(steps=6, stop_after=4)), {3})
    state = TrainState.read(broken.directory / "checkpoints/step_00000004")
    assert state.extras["guard"]["left_out"] == [4]
    resumed = run_distributed(spoiled, ranks, broken, {3})[0]
    assert resumed["losses"] == whole["losses"][4:] and torch.equal(resumed["weights"], whole["weights"])


def test_skips_are_bounded(tmp_path):
    config = guarded(tmp_path, nonfinite="skip", max_skips=2)
    sentence = run_distributed(spoiled, 1, config, {1, 2, 3})[0]
    assert sentence.startswith("step 4 gave loss nan") and "more than guard.max_skips=2 steps within guard.window=1000 went wrong" in sentence


def plain(config, left_out):
    """Train on good text that leaves out steps from the start of this run on."""
    import pretrain.trainer as trainer

    trainer.skips_from = lambda _: Skips(left_out)
    return train(config)


@pytest.mark.parametrize(("ranks", "layout"), [(2, {"pipeline": 2}), (2, {"zero_stage": 2})])
def test_rewind_goes_back_and_leaves_out_the_text(tmp_path, ranks, layout):
    """Against a run that never read that text: losses, weights, moments, and where the data stands."""
    config = guarded(tmp_path, nonfinite="rewind", layout=ParallelConfig(**layout))
    wound = run_distributed(spoiled, ranks, config, {3})[0]
    want = run_distributed(plain, ranks, replace(config, name="plain"), [[2, 2]])[0]
    assert [step for step, _, _ in wound["seen"]] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert [ids[0][0] // 8 for _, ids, _ in wound["seen"]] == [0, 1, 2, 3, 4, 5, 6, 7], "text goes on"
    assert wound["losses"][4:] == want["losses"][2:] and wound["rates"][4:] == want["rates"][2:]
    assert torch.equal(wound["weights"], want["weights"]) and torch.equal(wound["moments"], want["moments"])
    [(step, said)] = events(config, "rewind")
    assert step == 2 and "back to step 2, leaving out the text of 2 steps" in said and "in sample 27 " in said
    records = [r["step"] for r in read_log(config.directory / "log.jsonl") if r["kind"] == "train"]
    assert records == [1, 2, 3, 4, 5, 6], "the log is neither doubled nor holed"
    state = TrainState.read(config.directory / "checkpoints/step_00000006")
    assert state.extras["data_skips"] == [[2, 2]] and state.samples == (6 + 2) * 8
    audited = AuditedRun(config.directory, 3)
    assert list(audited.samples.numbers(2)) == list(range(32, 40)), "an audit knows what the third step read"


def test_a_resume_after_a_rewind_reads_the_same_text(tmp_path):
    config = guarded(tmp_path, nonfinite="rewind")
    whole = run_distributed(spoiled, 1, replace(config, name="whole"), {3})[0]
    run_distributed(spoiled, 1, replace(config, duration=DurationConfig(steps=6, stop_after=4)), {3})
    resumed = run_distributed(spoiled, 1, config, {3})[0]
    assert resumed["losses"] == whole["losses"][-2:] and torch.equal(resumed["weights"], whole["weights"])


def test_a_rewind_without_a_checkpoint_stops(tmp_path):
    sentence = run_distributed(spoiled, 2, guarded(tmp_path, every=100, nonfinite="rewind"), {1})[0]
    assert "there is no checkpoint yet to rewind to" in sentence


def test_rewinds_on_rewinds():
    """Against a list of what each optimizer step has read."""
    skips, read = Skips(), {}
    for bad, to in ((7, 4), (5, 4), (9, 8), (9, 2)):
        for step in range(bad + 1):
            read[step] = skips.data_step(step)
        left = skips.rewind(to, bad)
        assert left == read[bad] + 1 - read[to] and skips.data_step(to) == read[bad] + 1
        assert [skips.data_step(step) for step in range(to)] == [read[step] for step in range(to)]
        assert all(skips.step_of(skips.data_step(step)) == step for step in range(20))
        assert Skips(skips.entries).data_step(15) == skips.data_step(15)


def spiking(config, factor: float):
    """Train with the fifth step's loss multiplied."""
    from pretrain.objectives.mdlm import MDLM

    corrupt = MDLM.corrupt

    def raising(objective, tokens, documents, noise, *, evaluation):
        made = corrupt(objective, tokens, documents, noise, evaluation=evaluation)
        if not evaluation and noise.index // 8 == 29:
            made.targets["loss_weight"] = made.targets["loss_weight"] * np.float32(factor)
        return made

    MDLM.corrupt = raising
    return train(config)


@pytest.mark.parametrize("policy", ["warn", "rewind"])
def test_spikes_follow_their_policy(tmp_path, policy):
    config = guarded(tmp_path, every=10, spike=policy, spike_warmup=10, spike_threshold=5)
    config = replace(config, duration=DurationConfig(steps=32), schedule=replace(config.schedule, peak=1e-4, final=1e-4))
    done = run_distributed(spiking, 1, config, 1000.0)[0]
    said = {kind: events(config, kind) for kind in ("spike", "skip", "rewind")}
    expected = {"warn": "spike", "rewind": "rewind"}[policy]
    assert [kind for kind, found in said.items() if found] == [expected]
    step, message = said[expected][0]
    assert step == (20 if policy == "rewind" else 30) and message.startswith("step 30 gave loss ") and "deviations above" in message
    assert len(done["losses"]) == 32 + (10 if policy == "rewind" else 0)


def test_parts_of_a_step():
    time_sums = np.zeros((10, 5))
    time_sums[2, 1:3] = 32, 64.0
    result = StepResult(loss=3.0, nelbo=3.0, gradient_norm=1.0, tokens=48, time_sums=time_sums)
    losses, tokens = parts(result)
    assert (tokens[2], losses[2]) == (32, 64.0) and (tokens[10], losses[10]) == (16, 3.0 * 48 - 64)


def flipping(config):
    """Train; one bit of rank 1's copy changes after the update of the fourth step."""
    import torch.distributed as dist

    from pretrain.engine.zero import Engine

    stepped = Engine.train_step

    def damaging(engine, shard, lr):
        result = stepped(engine, shard, lr)
        if shard.step == 3 and dist.get_rank() == 1:
            next(p for name, p in engine.module.named_parameters() if name == "head.bias").data.view(torch.int32)[5] ^= 1
        return result

    Engine.train_step = damaging
    try:
        train(config)
    except UserError as error:
        return str(error)


def test_unequal_copies_stop_the_run(tmp_path):
    config = guarded(tmp_path, replicas_every=2)
    for sentence in run_distributed(flipping, 2, config):
        assert sentence.startswith("after step 4 copies of a parameter differ between ranks: head.bias (rank 0 against 1);")
    assert not (config.directory / "checkpoints/step_00000004").exists(), "nothing is saved that is known to be wrong"
