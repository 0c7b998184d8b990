"""Fine-tuning runs: killed and resumed bitwise, whole epochs, from any checkpoint to any layout, noised alike everywhere."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finetune.problems import open_problems
from pretrain.audit.run import AuditedRun
from pretrain.checkpoint.consolidate import consolidate
from pretrain.convert.config import HubConfig
from pretrain.convert.held_out import HeldOut
from pretrain.convert.hub_export import export_to_hub
from pretrain.convert.plain_network import open_trained
from pretrain.data.problems import problem_lines
from pretrain.engine.config import ScheduleConfig
from pretrain.errors import UserError
from pretrain.evaluation.config import EvaluationConfig
from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from pretrain.parallel.config import ParallelConfig
from pretrain.run_config import DurationConfig, RunConfig
from tests.convert.test_initial import hub_of, newest
from tests.distributed import run_distributed, run_until_killed
from tests.small_run import noised_samples, sft_config, small_config, train, word_problems

LATENT = RePlaidConfig(latent=8, schedule_hidden=32, prior_ramp_steps=4)
METHODS = {
    "ar": ObjectiveConfig(name="ar"),
    "mdlm": ObjectiveConfig(name="mdlm"),
    "duo": ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk", top_k=4, curriculum_end=2)),
    "esolm": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "replaid": ObjectiveConfig(name="replaid", replaid=replace(LATENT, prompt_embedding=True)),
    "prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=9)),
}
STILL = ScheduleConfig(kind="constant", peak=1e-12, warmup_steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_run_resumes_bitwise(tmp_path: Path, method: str) -> None:
    """Two epochs of two steps; kill -9 in the third, so that what goes on begins an epoch after a step of three examples."""
    config = sft_config(tmp_path, METHODS[method])
    whole = run_distributed(train, 1, replace(config, name="whole"))[0]
    assert len(whole["losses"]) == 4 and torch.tensor(whole["losses"]).isfinite().all()
    run_until_killed(train, 1, config, kill_at=3)
    resumed = run_distributed(train, 1, config)[0]
    for key in ("seen", "losses", "rates", "norms"):
        assert resumed[key] == whole[key][-len(resumed[key]) :], key
    assert len(resumed["losses"]) == 2
    for key in ("weights", "moments", "objective"):
        assert torch.equal(resumed[key], whole[key]), key


def test_an_epoch_is_every_example_once_and_the_last_step_is_not_filled_up(tmp_path: Path) -> None:
    """On two data-parallel ranks: what they saw together."""
    config = sft_config(tmp_path, "mdlm")
    ranks = run_distributed(train, 2, config)
    samples, _ = open_problems(config).build_samples(config, _Objective(), None, (0, 1))  # type: ignore[arg-type]
    for epoch in (0, 1):
        steps = (2 * epoch, 2 * epoch + 1)
        seen = [[number for rank in ranks for ids in rank["seen"][step][1] for number in ids if number >= 0] for step in steps]
        assert [len(step) for step in seen] == [8, 3]
        assert sorted(samples.example(number) for step in seen for number in step) == list(range(11))


class _Objective:
    lookahead, parts, evaluation_parts, importance = 0, (1.0,), 1, 1

    def corrupt(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "mdlm", "replaid"])
def test_from_a_sharded_checkpoint_the_first_loss_is_that_of_the_consolidated_weights(tmp_path: Path, method: str) -> None:
    """Pretrained at TP2 x PP2; fine-tuned at DP2 with ZeRO 3 and at TP2 from its checkpoint, and alone from its export, whose weights are
    consolidated. (RePlaid's export lacks the running moments that divide its batch: it is compared with one process from the checkpoint.)"""
    before = replace(METHODS[method], replaid=LATENT) if method == "replaid" else METHODS[method]
    first = small_config(
        tmp_path, before, name="first", duration=DurationConfig(steps=3), parallel=ParallelConfig(tensor=2, pipeline=2)
    )
    run_distributed(train, 4, first)
    one_step = DurationConfig(steps=1, stop_after=1)
    consolidated = first.directory if method == "replaid" else hub_of(first, tmp_path / "hub")
    losses = {}
    for name, origin, ranks, sizes in [
        ("consolidated", consolidated, 1, {}),
        ("zero3", first.directory, 2, {"zero_stage": 3}),
        ("tensor", newest(first), 2, {"tensor": 2, "sequence": True}),
        ("scratch", None, 1, {}),
    ]:
        init_from = None if origin is None else str(origin)
        config = sft_config(tmp_path, METHODS[method], name=name, init_from=init_from, parallel=ParallelConfig(**sizes), duration=one_step)
        (losses[name],) = run_distributed(train, ranks, config)[0]["losses"]
    assert losses["zero3"] == pytest.approx(losses["consolidated"], rel=1e-5)
    assert losses["tensor"] == pytest.approx(losses["consolidated"], rel=1e-5)
    assert abs(losses["scratch"] / losses["consolidated"] - 1) > 1e-3, "the weights did arrive"


@pytest.mark.slow
def test_replaids_table_starts_as_the_network_reads_clean_embeddings(tmp_path: Path) -> None:
    """Row v is (W_z + W_e) sqrt(E) e_v; everything else is the origin's, from a run and from its imported export alike."""
    first = small_config(tmp_path, replace(METHODS["replaid"], replaid=LATENT), name="first", duration=DurationConfig(steps=3))
    run_distributed(train, 1, first)
    still = replace(METHODS["replaid"], replaid=replace(LATENT, prompt_embedding=True, learning_rate=1e-12))
    config = sft_config(tmp_path, still, init_from=str(first.directory), schedule=STILL)
    run_distributed(train, 1, config)
    before, after = consolidate(newest(first)), consolidate(newest(config))
    table_RD = after.pop("embedding.prompt.weight")
    assert before.keys() == after.keys() and all(torch.allclose(before[name], after[name], atol=1e-9) for name in before)
    from pretrain.engine.safe_files import read_safely

    raw_RE = read_safely(newest(first) / "objective.pt")["modules"]["embedding.weight"]
    clean_RE = raw_RE / raw_RE.norm(dim=-1, keepdim=True)
    want_RD = 8**0.5 * clean_RE @ (before["embedding.latent.weight"] + before["embedding.estimate.weight"]).T
    torch.testing.assert_close(table_RD, want_RD, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["esolm", "replaid"])
def test_noised_examples_are_bitwise_the_same_in_every_layout(tmp_path: Path, method: str) -> None:
    config = sft_config(tmp_path, METHODS[method])
    want = run_distributed(noised_samples, 1, config)[0]
    batch = replace(config.batch, micro_sequences=1)
    held = run_distributed(noised_samples, 4, replace(config, name="laid", batch=batch, parallel=ParallelConfig(tensor=2)))
    assert len([number for number in want if number >= 0]) == 11
    for rank in held:
        assert all(want[number] == digest for number, digest in rank.items() if number >= 0)


def test_a_run_of_another_kind_is_not_continued(tmp_path: Path) -> None:
    config: RunConfig = sft_config(tmp_path, "mdlm")
    run_distributed(train, 1, config)
    (tmp_path / "others.jsonl").write_bytes(problem_lines(word_problems(200, 11)))
    with pytest.raises(AssertionError, match="does not go on as it was .*others.jsonl now gives another text"):
        run_distributed(train, 1, sft_config(tmp_path, "mdlm", sft=replace(config.sft, train=str(tmp_path / "others.jsonl"))))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="belongs to another run .*sft.format.context: 48 -> absent"):
        run_distributed(train, 1, small_config(tmp_path, "mdlm", name="tuned", batch=config.batch))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "esolm", "replaid", "prime"])
def test_the_export_of_a_fine_tuned_model_passes_its_gate_and_says_how_it_is_asked(tmp_path: Path, method: str) -> None:
    config = sft_config(tmp_path, METHODS[method], duration=DurationConfig(steps=1, stop_after=1))
    run_distributed(train, 1, config)
    run_distributed(export, 1, str(config.directory), str(tmp_path / "hub"))
    found, card = json.loads((tmp_path / "hub/config.json").read_text()), (tmp_path / "hub/README.md").read_text()
    assert found["prompt_format"]["question"] == "Question: {question}\n" and found["prompt_format"]["context"] == 48
    assert found.get("prompt_table", False) == (method == "replaid")
    assert 'question: "Question: {question}\\n"' in card and "problems of sft.train (BLAKE2b)" in card
    gate = json.loads((tmp_path / "hub/gate.json").read_text())
    assert gate["passed"] and sum("prompted" in check["name"] for check in gate["checks"]) == 4, "three logits and a likelihood with prompts"
    # From the export the network starts with the same weights, the table for prompts included.
    again = replace(config, name="again", init_from=str(tmp_path / "hub"), schedule=STILL)
    run_distributed(train, 1, again)
    one, two = consolidate(newest(config)), consolidate(newest(again))
    classes = {name: 320 for name in one if name.startswith(("head.", "embedding.weight", "embedding.prompt"))}
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name][: classes.get(name)], two[name][: classes.get(name)], atol=1e-8, rtol=0)


def export(checkpoint: str, output: str) -> None:
    export_to_hub(HubConfig(checkpoint=checkpoint, output=output))


def test_what_a_fine_tuning_run_has_not(tmp_path: Path) -> None:
    """Windows of text: their likelihood and their documents are refused in a sentence."""
    config = sft_config(tmp_path, "mdlm", duration=DurationConfig(steps=1, stop_after=1))
    run_distributed(train, 1, config)
    trained = open_trained(config.directory, None)
    with pytest.raises(UserError, match="is a fine-tuning run: its log has the likelihood of held-out answers"):
        HeldOut(trained, EvaluationConfig(checkpoint=str(config.directory)), torch.device("cpu"))
    with pytest.raises(UserError, match="is a fine-tuning run, which reads problems and no documents"):
        AuditedRun(config.directory, 1)
