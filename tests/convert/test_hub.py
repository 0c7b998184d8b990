"""The export and import commands: what the folder holds, shards, the average, memory, and every refusal."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pretrain.convert import hub_export
from pretrain.convert.config import HubConfig, ImportConfig
from pretrain.convert.gate_reports import GateReport
from pretrain.convert.hub_export import export_to_hub, open_export, write_folder
from pretrain.convert.hub_import import import_from_hub
from pretrain.convert.plain_network import open_trained
from pretrain.convert.shards import Planned, plan_shards, write_shards
from pretrain.errors import UserError
from tests.convert.damages import OBJECTIVES, TEXT
from tests.convert.trained import write_run
from tests.distributed import run_distributed

LLAMA = {"kind": "llama", "heads": 4, "kv_heads": 2, "cond_dim": 128}


def export_here(checkpoint: str, output: str, **settings: object) -> str:
    """The command in a process of its own; what it refuses."""
    try:
        export_to_hub(HubConfig(checkpoint=checkpoint, output=output, **settings))  # type: ignore[arg-type]
        return ""
    except UserError as error:
        return str(error)


def exported(tmp_path: Path, run: Path, name: str = "out", **settings: object) -> Path:
    """An export without its gate, which test_gate covers."""
    folder = tmp_path / name
    export = open_export(HubConfig(checkpoint=str(run), output=str(folder), **settings))  # type: ignore[arg-type]
    folder.mkdir()
    write_folder(export, folder)
    return folder


def test_the_command_publishes_a_whole_folder(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path / "run", "mdlm")
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "hub"
    assert run_distributed(export_command, 1, str(run), str(out), str(tmp_path / "text.txt")) == [""]
    report = json.loads((out / "gate.json").read_text())
    assert report["passed"] and report["likelihood_label"] == "bound" and report["versions"]["torch"]
    assert not list(tmp_path.glob("*unpublished*"))
    card = (out / "README.md").read_text()
    for words in ("masked diffusion (MDLM)", "7 steps", "trust_remote_code=True", "no likelihood of held-out text", "logits, real, t = 0.5"):
        assert words in card, words
    assert str(tmp_path) not in card + (out / "gate.json").read_text() + (out / "config.json").read_text()
    assert (out / "modeling_language_model.py").is_file() and (out / "sampling_mdlm.py").is_file() and not (out / "__init__.py").exists()
    with pytest.raises(UserError, match="exists; name a folder that does not"):
        open_export(HubConfig(checkpoint=str(run), output=str(out)))


def export_command(checkpoint: str, output: str, text: str) -> str:
    warned: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(listener)
    failed = export_here(checkpoint, output, text=text)
    assert not warned, "transformers takes the export for something else"
    return failed


def export_without_text(checkpoint: str, output: str) -> str:
    return export_here(checkpoint, output)


def test_a_failed_gate_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = write_run(tmp_path / "run", "mdlm")

    def refuse(*_: object, **__: object) -> GateReport:
        raise UserError("nothing was published: the logits differ")

    monkeypatch.setattr(hub_export, "run_gate", refuse)
    with pytest.raises(UserError, match="nothing was published"):
        export_to_hub(HubConfig(checkpoint=str(run), output=str(tmp_path / "hub")))
    assert not (tmp_path / "hub").exists()


def test_real_text_must_be_there(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path / "run", "mdlm")
    said = run_distributed(export_without_text, 1, str(run), str(tmp_path / "hub"))[0]
    assert re.search("the gate needs real text, and the run names no held-out text; give text=FILE", said), said


def test_shards_and_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModel

    run, weights = write_run(tmp_path / "run", "mdlm", ema=True)
    monkeypatch.setattr("pretrain.convert.config._SMALLEST_SHARD", 1)
    whole = exported(tmp_path, run, "whole", weights="raw")
    parts = exported(tmp_path, run, "parts", max_shard_bytes=4000, weights="ema")
    one = load_file(whole / "model.safetensors")
    assert torch.equal(one["network.norm.weight"], weights["final_layernorm.weight"])
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and index["weight_map"].keys() == one.keys()
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in one.values())
    for file in files:
        with safe_open(parts / file, "pt") as opened:
            names = list(opened.keys())
            assert all(torch.equal(opened.get_tensor(name), 2 * one[name]) for name in names)
            assert len(names) == 1 or sum(4 * one[name].numel() for name in names) <= 4000
    loaded = AutoModel.from_pretrained(parts, trust_remote_code=True)
    assert torch.equal(loaded.state_dict()["network.norm.weight"], 2 * weights["final_layernorm.weight"])
    assert json.loads((parts / "config.json").read_text())["provenance"]["weights"] == "average (ema)"
    bare, _ = write_run(tmp_path / "bare", "mdlm")
    with pytest.raises(UserError, match="keeps no average of the weights"):
        open_export(HubConfig(checkpoint=str(bare), output=str(tmp_path / "x"), weights="ema"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_import_and_export_give_the_same_bytes(tmp_path: Path, name: str) -> None:
    run, _ = write_run(tmp_path / "run", OBJECTIVES[name], **(LLAMA if name == "mdm_prime" else {}))
    first = exported(tmp_path, run, "first")
    import_from_hub(ImportConfig(source=str(first), output=str(tmp_path / "imported"), vocab_multiple=8))
    trained = open_trained(tmp_path / "imported")
    assert trained.run.objective.name == name and trained.run.batch.length == 12 and trained.vocabulary.padded_size % 8 == 0
    second = exported(tmp_path, tmp_path / "imported", "second")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    one, two = (json.loads((folder / "config.json").read_text()) for folder in (first, second))
    assert {**one, "provenance": 0} == {**two, "provenance": 0}
    assert (one["provenance"]["step"], two["provenance"]["imported"]) == (7, "first")
    network = trained.network(device=torch.device("cpu"), dtype=torch.float32)  # samples and scores like any other checkpoint
    assert torch.equal(network.state_dict()["norm.weight"], load_file(first / "model.safetensors")["network.norm.weight"])


def test_stock_classes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run, weights = write_run(tmp_path / "run", "ar", qk_norm=True, **LLAMA)
    folder = exported(tmp_path, run, format="stock")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert torch.equal(model.model.norm.weight, weights["final_layernorm.weight"])
    model.save_pretrained(tmp_path / "saved")
    shutil.copy(folder / "tokenizer.json", tmp_path / "saved")
    shutil.copy(folder / "tokenizer_config.json", tmp_path / "saved")
    import_from_hub(ImportConfig(source=str(tmp_path / "saved"), output=str(tmp_path / "again")))
    again = exported(tmp_path, tmp_path / "again", "second", format="stock")
    assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    for objective, backbone, said in (("mdlm", LLAMA, "objective=mdlm has no stock class"), ("ar", {}, "backbone.kind=dit has no stock class")):
        other, _ = write_run(tmp_path / f"{objective}{len(backbone)}", objective, **backbone)
        with pytest.raises(UserError, match=said):
            open_export(HubConfig(checkpoint=str(other), output=str(tmp_path / "x"), format="stock"))


def test_what_cannot_be_imported_is_named(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path / "run", "ar", **LLAMA)
    folder, out = exported(tmp_path, run, format="stock"), tmp_path / "imported"

    def refused(said: str, **changes: object) -> None:
        found = json.loads((folder / "config.json").read_text())
        broken = shutil.copytree(folder, tmp_path / "broken", dirs_exist_ok=True)
        (broken / "config.json").write_text(json.dumps(found | changes))
        with pytest.raises(UserError, match=said):
            import_from_hub(ImportConfig(source=str(broken), output=str(out)))
        assert not out.exists()

    refused("config.json names GPT2LMHeadModel, and weights are read from", architectures=["GPT2LMHeadModel"])
    refused("the model has attention_bias, which", attention_bias=True)
    refused("the model has RoPE scaling, which", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})
    refused("does not hold the network of its config.json", intermediate_size=24)
    refused("has 11 ids, and the model 5 classes", vocab_size=5)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:200])
    refused("cannot be read from", bos_token_id=1)
    (folder / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "broken")
    refused("has no model.safetensors; save the model again with safetensors", bos_token_id=1)
    with pytest.raises(UserError, match="config.json cannot be read"):
        import_from_hub(ImportConfig(source=str(tmp_path), output=str(out)))


def test_a_planned_tensor_must_come(tmp_path: Path) -> None:
    shards = plan_shards([Planned("a", (2,), torch.float32), Planned("b", (3, 1), torch.int64)], 10)
    assert [[tensor.name for tensor in shard] for shard in shards] == [["a"], ["b"]]
    with pytest.raises(ValueError, match="b .* came where"):
        write_shards(tmp_path, shards, [("a", torch.zeros(2)), ("b", torch.zeros(3, dtype=torch.int64))])
