"""Every sampler of every objective on checkpoints and exports: outputs that depend on nothing but the problem, and the format of the model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.gsm8k_config import FormatConfig, GSM8KEvaluation
from finetune.gsm8k_run import evaluate_gsm8k
from pretrain.convert.config import HubConfig
from pretrain.convert.hub_export import open_export, write_folder
from pretrain.convert.sampled import open_sampled
from pretrain.errors import UserError
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.sampling_methods import Constants
from pretrain.hf_model.sampling_settings import SAMPLERS
from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from pretrain.sampling.model import SampledModel
from tests.convert.trained import write_run

WORDS = ["Question", ":", "Answer", "how", "many", "apples", "and", "plus", *map(str, range(10)), "="]
OBJECTIVES = {
    "ar": ObjectiveConfig(name="ar"),
    "mdlm": ObjectiveConfig(name="mdlm"),
    "duo": ObjectiveConfig(name="duo", duo=DuoConfig()),
    "esolm": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "replaid": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=8, schedule_hidden=16)),
    "mdm_prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=5)),
}
LEFT_TO_RIGHT = [(objective, "left_to_right", {}) for objective in OBJECTIVES]
# The random network is sure of one token wherever it looks; so hot, RePlaid's first steps go elsewhere.
OWN = [
    (objective, sampler, ({"steps": 4} if "steps" in taken else {}) | ({"temperature": 30.0} if objective == "replaid" else {}))
    for objective, samplers in SAMPLERS.items()
    for sampler, taken in samplers.items()
    if sampler not in ("left_to_right", "ar")
]
CONTEXT, PROBLEMS = 20, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of every objective, and problems of five lengths."""
    place = tmp_path_factory.mktemp("runs")
    for name, objective in OBJECTIVES.items():
        write_run(place / name, objective, words=WORDS)
    rows = [{"question": " and ".join(["how many apples"] * (1 + i % 3) + [str(i)]), "answer": f"1 plus {i}\n#### {i}"} for i in range(PROBLEMS)]
    (place / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def opened(path: Path) -> SampledModel:
    """RePlaid's embeddings and schedule are learned: here the first point anywhere, and latents at t = 0 say which token they are."""
    model = open_sampled(path)

    def load(device: torch.device, dtype: torch.dtype) -> tuple[DiT | Llama, Constants]:
        network, constants = model.load(device, dtype)
        assert constants.space is not None
        table_VE = torch.randn(constants.space.table_VE.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        table_VE /= table_VE.norm(dim=1, keepdim=True)
        return network, replace(constants, space=replace(constants.space, table_VE=table_VE, gamma=lambda t: 16 * t - 8, evidence=1.0))

    return replace(model, load=load) if model.objective == "replaid" else model


def answer(model: Path, folder: Path, output: Path, **fields: Any) -> list[dict[str, Any]]:
    given = {"throughput_items": 0, "format": FormatConfig(context=CONTEXT), "temperature": 1.0} | fields
    config = GSM8KEvaluation(checkpoint=str(model), data=str(folder / "test.jsonl"), output=str(output), **given)  # type: ignore[arg-type]
    evaluate_gsm8k(opened(model), config, device=torch.device("cpu"), host_memory=lambda: 2.0**30, say=lambda _: None)
    records = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return sorted(records, key=lambda record: record["item"])


@pytest.mark.parametrize(("objective", "sampler", "settings"), [*LEFT_TO_RIGHT, *OWN, ("mdlm", "ancestral", {}), ("esolm", "block", {})])
def test_outputs_depend_on_neither_batch_nor_neighbours(folder: Path, tmp_path: Path, objective: str, sampler: str, settings: dict[str, Any]) -> None:
    run = folder / objective / "tiny"
    one, three, eight = (answer(run, folder, tmp_path / str(b), sampler=sampler, batch=b, **settings) for b in (1, 3, 8))
    free = {"seconds": 0}
    assert [record | free for record in one] == [record | free for record in three] == [record | free for record in eight]
    assert len(one) == PROBLEMS and len({record["output"] for record in one}) > 3
    assert all(record["fits"] and record["masked"] == 0 and record["nfe"] > 0 for record in one)
    if sampler == "left_to_right":
        assert all(record["nfe"] == record["tokens"] for record in one)
    assert all(record["ended"] or record["tokens"] == CONTEXT - len(record["prompt"].replace(":", " :").split()) for record in one)
    other = answer(run, folder, tmp_path / "other", sampler=sampler, batch=8, seed=2, **settings)
    assert [record["output"] for record in other] != [record["output"] for record in one]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_exported_folder_answers_as_its_run(folder: Path, tmp_path: Path, objective: str) -> None:
    """Also with the format that config.json says, and in bf16."""
    exported = tmp_path / "hub"
    exported.mkdir()
    write_folder(open_export(HubConfig(checkpoint=str(folder / objective / "tiny"), output=str(tmp_path / "x"))), exported)
    wanted = answer(folder / objective / "tiny", folder, tmp_path / "run")
    tree = json.loads((exported / "config.json").read_text()) | {"prompt_format": {"context": CONTEXT}}
    (exported / "config.json").write_text(json.dumps(tree))
    share = {"clean_share": "all"} if objective == "duo" else {}
    found = answer(exported, folder, tmp_path / "exported", format=FormatConfig(), **share)
    assert [record["output"] for record in found] == [record["output"] for record in wanted]
    assert "config.json" in json.loads((tmp_path / "exported/card.json").read_text())["format_from"]
    assert len(answer(exported, folder, tmp_path / "bf16", format=FormatConfig(), dtype="bf16", items=2)) == 2


def test_wrong_samplers_are_refused(folder: Path, tmp_path: Path) -> None:
    for objective, sampler, sentence in [
        ("ar", "ancestral", "sampler=ancestral cannot sample a model trained with objective=ar; use ar, or auto"),
        ("duo", "first_hitting", "sampler=first_hitting cannot sample a model trained with objective=duo; use ancestral, psi or left_to_right"),
    ]:
        with pytest.raises(UserError, match=sentence):
            answer(folder / objective / "tiny", folder, tmp_path / "out", sampler=sampler)
    with pytest.raises(UserError, match="steps=4 means nothing to sampler=left_to_right of mdlm, which takes tokens"):
        answer(folder / "mdlm" / "tiny", folder, tmp_path / "out", steps=4)
    assert not (tmp_path / "out").exists()
