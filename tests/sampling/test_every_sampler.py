"""Every sampler of every objective on a checkpoint that was really trained, through the code of the launcher."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.convert.config import HubConfig
from pretrain.convert.hub_export import open_export, write_folder
from pretrain.convert.sampled import open_sampled
from pretrain.errors import UserError
from pretrain.hf_model.sampling_network import BLANK, Snapshot
from pretrain.hf_model.sampling_settings import SAMPLERS
from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.generate import choose_method, generate
from pretrain.sampling.memory import bytes_per_token
from pretrain.sampling.model import SampledModel
from pretrain.sampling.prompts import canvases
from pretrain.sampling.session import run_sampling
from tests.distributed import run_distributed
from tests.small_run import small_config, train

OBJECTIVES = {
    "ar": ObjectiveConfig(name="ar"),
    "mdlm": ObjectiveConfig(name="mdlm"),
    "duo": ObjectiveConfig(name="duo", schedule_eps=0.01, duo=DuoConfig()),
    "esolm": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "replaid": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=8, schedule_hidden=16, prior_ramp_steps=12)),
    "mdm_prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=9, joint_mask_above=0.5)),
}
MORE: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("mdlm", "ancestral"): [{"steps": 4, "noise_removal": "greedy"}],
    ("mdlm", "confidence"): [{"tokens": 3, "block": 5}],
    ("mdlm", "psi"): [{"steps": 9, "loop": True, "psi": "constant", "eta": 0.5}],
    ("duo", "ancestral"): [{"steps": 4, "noise_removal": "greedy"}],
    ("duo", "psi"): [{"steps": 9, "loop": True, "psi": "remdm", "eta": 0.1}],
    ("esolm", "ancestral"): [{"steps": 4, "alpha_0": 1.0, "given": "shuffled"}],
    ("esolm", "block"): [{"steps": 4, "order": "shuffled"}],
    ("esolm", "block_autoregressive"): [{"steps": 2, "segments": 3, "order": "shuffled_steps"}],
    ("replaid", "ddpm"): [{"steps": 5, "score_temperature": 0.9, "self_conditioning": False}],
    ("mdm_prime", "ancestral"): [{"steps": 4, "joint_above": 0.0}, {"joint_above": 1.0}],
}
CASES = [
    (objective, sampler, options)
    for objective, samplers in SAMPLERS.items()
    for sampler in samplers
    for options in [{}, *MORE.get((objective, sampler), [])]
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampledModel]:
    found = {}
    for name, objective in OBJECTIVES.items():
        config = small_config(tmp_path_factory.mktemp(name), objective)
        run_distributed(train, 1, config)
        found[name] = open_sampled(config.directory)
    return found


def sample(model: SampledModel, folder: Path, **fields: Any) -> list[dict[str, Any]]:
    output = folder / "samples.jsonl"
    config = SamplingConfig(checkpoint="run", output=str(output), **fields)
    run_sampling(model, config, device=torch.device("cpu"), host_memory=lambda: 2.0**33)
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize(("objective", "sampler", "options"), CASES)
def test_samples(
    runs: dict[str, SampledModel], tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str, sampler: str, options: dict[str, Any]
) -> None:
    """Prompts kept, ids of the tokenizer, nothing left open, the same samples in other batches and while watched, and what was done on record."""
    model = runs[objective]
    prompt = "and the "
    begins = model.codec.encode([prompt])[0]
    law = {"temperature": 0.8, "top_p": 0.9}
    records = sample(model, tmp_path, sampler=sampler, count=4, prompt=prompt, view=True, **law, **options)
    said = capsys.readouterr()
    for record in records:
        assert len(record["ids"]) == 16 and record["ids"][: len(begins)] == begins
        assert all(0 <= token < model.vocabulary.tokenizer_size for token in record["ids"])
        assert record["nfe"] >= 1 and record["settings"] | options == record["settings"]
        assert (record["settings"]["sampler"], record["settings"]["objective"], record["settings"]["step"]) == (sampler, objective, 6)
    if objective != "duo" or "noise_removal" not in options:  # after six steps p says the same everywhere, and its most likely token too
        assert len({tuple(record["ids"]) for record in records}) > 1
    again = sample(model, tmp_path, sampler=sampler, count=4, prompt=prompt, batch=3, **law, **options)
    assert again == [record | {"settings": record["settings"] | {"batch": 3, "view": False}} for record in records]
    shown = said.err.splitlines()
    assert 2 <= len(shown) <= 20 and all(line.startswith("sequence 1, step ") for line in shown)
    assert "tokens/s" in said.out and "network evaluations (NFE) per sequence" in said.out


@pytest.mark.parametrize(("objective", "sampler"), [(objective, sampler) for objective in SAMPLERS for sampler in SAMPLERS[objective]])
def test_what_is_watched(runs: dict[str, SampledModel], objective: str, sampler: str) -> None:
    """From little to everything, a snapshot for each step; the last is the sample."""
    model, seen = runs[objective], list[Snapshot]()
    network, constants = model.load(torch.device("cpu"), torch.float32)
    config = SamplingConfig(checkpoint="run", sampler=sampler, count=2, length=8)
    found = canvases([""], model.codec, config, trained_length=16, continues=objective == "ar")
    method = choose_method(config, objective)
    samples = list(generate(network, constants, config, method, vocabulary=model.vocabulary, canvases=found, watch=seen.append))
    skip = int(objective == "ar")
    assert seen[-1].ids_BL[:, skip:].tolist() == [list(sample.ids) for sample in samples]
    open_T = [int((snapshot.ids_BL == BLANK).sum()) for snapshot in seen]
    assert open_T[-1] == 0 and (objective in ("duo", "replaid") or open_T[0] > 0)
    if sampler != "psi":
        assert objective == "duo" or all(before >= after for before, after in pairwise(open_T))
    per_step = {"heun": 2}.get(sampler, 1)
    assert len(seen) >= max(sample.evaluations for sample in samples) // per_step
    assert all(snapshot.sequences_B.tolist() == [0, 1] and (snapshot.digits_BLJ is None) == (objective != "mdm_prime") for snapshot in seen)
    if objective == "mdm_prime":
        hidden_T = [int((snapshot.digits_BLJ == BLANK).sum()) for snapshot in seen if snapshot.digits_BLJ is not None]
        assert all(before >= after for before, after in pairwise(hidden_T)) and hidden_T[-1] == 0
        whole_B = [(snapshot.digits_BLJ == BLANK).any(-1) == (snapshot.ids_BL == BLANK) for snapshot in seen if snapshot.digits_BLJ is not None]
        assert all(bool(same.all()) for same in whole_B)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "ar"])
def test_gaps_are_filled(runs: dict[str, SampledModel], tmp_path: Path, objective: str) -> None:
    model = runs[objective]
    [record, _] = sample(model, tmp_path, count=2, prompt="and [MASK]*3 the", steps=3)
    first, last = model.codec.encode(["and"])[0], model.codec.encode([" the"])[0]
    assert len(record["ids"]) == len(first) + 3 + len(last)
    assert record["ids"][: len(first)] == first and record["ids"][-len(last) :] == last


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_in_bf16(runs: dict[str, SampledModel], tmp_path: Path, objective: str) -> None:
    [record] = sample(runs[objective], tmp_path, count=1, dtype="bf16")
    assert len(record["ids"]) == 16 and all(0 <= token < runs[objective].vocabulary.tokenizer_size for token in record["ids"])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_exported_folder_gives_the_samples_of_its_checkpoint(runs: dict[str, SampledModel], tmp_path: Path, objective: str) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    write_folder(open_export(HubConfig(checkpoint=str(runs[objective].home), output=str(tmp_path / "out"))), folder)
    fields: dict[str, Any] = {"count": 2, "prompt": "and the ", "top_p": 0.9}
    exported = open_sampled(folder)
    assert exported.trained_length == 16 and exported.vocabulary.eos_id == runs[objective].vocabulary.eos_id
    found = sample(exported, tmp_path, **fields)
    wanted = sample(runs[objective], tmp_path, **fields)
    assert [record["ids"] for record in found] == [record["ids"] for record in wanted]
    assert found[0]["settings"]["exported"] == str(folder) and found[0]["settings"]["step"] == 6
    with pytest.raises(UserError, match="is an exported model, which has no steps; leave step=6 out"):
        open_sampled(folder, 6)


def test_folders_of_other_programs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="holds a model of type llama, which this command does not sample: use generate"):
        open_sampled(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="config.json holds no object"):
        open_sampled(tmp_path)


def test_constants_are_those_of_training(runs: dict[str, SampledModel]) -> None:
    cpu = torch.device("cpu")
    constants = {name: model.load(cpu, torch.float32)[1] for name, model in runs.items()}
    assert all(constants[name].objective == name for name in runs)
    assert constants["duo"].schedule_eps == 0.01 and constants["esolm"].alpha_0 == 0.5
    assert constants["mdm_prime"].joint_above == 0.5 and constants["mdm_prime"].code is not None and constants["mdm_prime"].code.digits == 9
    space = constants["replaid"].space
    assert space is not None and space.self_conditioning and space.evidence == pytest.approx(6 / 12)
    stored = torch.load(runs["replaid"].home / "checkpoints/step_00000006/objective.pt", weights_only=True)["modules"]
    rows = stored["embedding.weight"][: len(space.table_VE)].double()
    torch.testing.assert_close(space.table_VE, rows / rows.norm(dim=1, keepdim=True), rtol=1e-6, atol=1e-6)
    assert space.levels(4, cpu)[[0, -1]].tolist() == [float(stored["schedule.gamma_1"]), float(stored["schedule.gamma_0"])]


def test_what_a_model_lacks_is_said(runs: dict[str, SampledModel], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="score temperature 0.01 is too small for 12 steps, and the latents ran away"):
        sample(runs["replaid"], tmp_path, steps=12, score_temperature=0.01)
    config = small_config(tmp_path, ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=8, schedule_hidden=16, self_conditioning=0.0)))
    run_distributed(train, 1, config)
    with pytest.raises(UserError, match="self_conditioning=true needs a network that was trained to read its estimate"):
        sample(open_sampled(config.directory), tmp_path, steps=2, self_conditioning=True)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_memory_estimate_is_below_what_a_sampler_takes(runs: dict[str, SampledModel], objective: str) -> None:
    """Against all that torch's profiler sees allocated over one batch."""
    from torch.profiler import ProfilerActivity, profile

    model = runs[objective]
    network, constants = model.load(torch.device("cpu"), torch.float32)
    config = SamplingConfig(checkpoint="run", count=2, length=8, **({} if objective == "ar" else {"steps": 1}))
    found = canvases([""], model.codec, config, trained_length=16, continues=objective == "ar")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        method = choose_method(config, objective)
        list(generate(network, constants, config, method, vocabulary=model.vocabulary, canvases=found))
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profiler.key_averages())
    assert found[0].ids == (BLANK,) * 8 and 0 < 2 * 8 * bytes_per_token(network, objective) < allocated
