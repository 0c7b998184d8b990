"""Exports of every objective, and ways in which an export goes wrong; run in a process of its own, since the gate starts process groups."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pretrain.convert.config import HubConfig
from pretrain.convert.gate import run_gate
from pretrain.convert.hub_export import open_export, write_folder
from pretrain.errors import UserError
from pretrain.objectives.config import EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig

OBJECTIVES = {
    "ar": ObjectiveConfig(name="ar"),
    "mdlm": ObjectiveConfig(name="mdlm"),
    "duo": ObjectiveConfig(name="duo"),
    "esolm": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "replaid": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=4, schedule_hidden=8, prior_ramp_steps=0)),
    "mdm_prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=4)),
}
TEXT = "the queen and king of a play sing loud of the king and a queen " * 20
Damage = Callable[[Path], None]


def weights(change: Callable[[dict[str, Tensor]], None]) -> Damage:
    """A damage to the tensors."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def settings(**values: object) -> Damage:
    """Another value in config.json."""

    def damage(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(found | values))

    return damage


def code(file: str, old: str, new: str) -> Damage:
    """Another line in the shipped code."""

    def damage(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return damage


def fused_rows_read_in_another_order(tensors: dict[str, Tensor]) -> None:
    """[heads, q k v, width] taken for [q k v, heads, width]."""
    names = [f"network.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    grouped = torch.stack([tensors[name].unflatten(0, (2, -1)) for name in names], dim=1)
    for name, rows in zip(names, grouped.flatten(0, 2).chunk(3), strict=True):
        tensors[name] = rows


def rotary_pairs_interleaved(tensors: dict[str, Tensor]) -> None:
    for part in "qk":
        name = f"network.layers.1.self_attn.{part}_proj.weight"
        tensors[name] = tensors[name].unflatten(0, (2, 2, -1)).transpose(1, 2).flatten(0, 2)


def halves_of_the_mlp_swapped(tensors: dict[str, Tensor]) -> None:
    gate, up = "network.layers.0.mlp.gate_proj.weight", "network.layers.0.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def padding_rows_kept(tensors: dict[str, Tensor]) -> None:
    for name in ("network.embed_tokens.weight", "network.lm_head.weight", "network.lm_head.bias"):
        rows = tensors[name]
        tensors[name] = torch.cat((rows, rows.new_zeros(16 - len(rows), *rows.shape[1:])))


def one_weight_changed(tensors: dict[str, Tensor]) -> None:
    tensors["network.norm.weight"] = tensors["network.norm.weight"] + 0.01


def two_codes_swapped(tensors: dict[str, Tensor]) -> None:
    code_V = tensors["constants.digit_code"].clone()
    code_V[[2, 5]] = code_V[[5, 2]]
    tensors["constants.digit_code"] = code_V


def endpoint_of_the_schedule(tensors: dict[str, Tensor]) -> None:
    values = tensors["constants.schedule_bits"].view(torch.float64).clone()
    values[1] += 0.5
    tensors["constants.schedule_bits"] = values.view(torch.int64)


def pieces_swapped(folder: Path) -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = found["model"]["vocab"]
    vocabulary["king"], vocabulary["queen"] = vocabulary["queen"], vocabulary["king"]
    (folder / "tokenizer.json").write_text(json.dumps(found))


def nothing(folder: Path) -> None:
    pass


WHOLE = {"nothing": (nothing, "")}
BY_LOGITS = r"logits on random sequences at .* differ by .* of the largest one, and 0\.0001 is allowed"
CASES = {
    "mdlm": {
        "fused rows": (weights(fused_rows_read_in_another_order), rf"{BY_LOGITS}: network\.layers\.0\.self_attn\.q_proj\.weight is not the check"),
        "rotary pairs": (weights(rotary_pairs_interleaved), rf"{BY_LOGITS}: network\.layers\.1\.self_attn\.q_proj\.weight is not the checkpoint's"),
        "a weight": (weights(one_weight_changed), rf"{BY_LOGITS}: network\.norm\.weight is not the checkpoint's"),
        "RoPE base": (settings(rope_base=500.0), r"rope_base is 500 in config\.json, and backbone\.rope_base of the run is 10000"),
        "RoPE layout": (settings(rope_layout="interleaved"), r"rope_layout is interleaved in config\.json"),
        "mask": (settings(mask_token_id=3), r"mask_token_id is 3 in config\.json, and objective\.mask_id of the run is 11"),
        "padding, not said": (weights(padding_rows_kept), r"transformers cannot load .*"),
        "padding, said": (settings(vocab_size=16), r"vocab_size is 16 in config\.json, and classes of the model of the run is 12"),
        "tokenizer": (pieces_swapped, "the exported tokenizer gives other ids for"),
        "code of the network": (code("modeling_dit.py", "(1 + scale_B1D)", "(1.01 + scale_B1D)"), BY_LOGITS),
        "code of the bound": (code("likelihood_draws.py", "weight_B=1 / t_B, hidden=masked_BL", "weight_B=t_B, hidden=masked_BL"), r"the likelihood"),
        "code of the law": (code("sampling_draw.py", "scores_NV.argmax(-1", "scores_NV.argmin(-1"), "exported model cannot sample .*left 24 masks"),
    },
    "ar": {"halves": (weights(halves_of_the_mlp_swapped), rf"{BY_LOGITS}: network\.layers\.0\.mlp\.gate_proj\.weight is not the checkpoint's")},
    "duo": {"schedule": (settings(schedule_eps=1e-2), r"schedule_eps is 0\.01 in config\.json, and objective\.schedule_eps of the run is 0\.001")},
    "esolm": {"share": (settings(alpha_0=1.0), r"alpha_0 is 1 in config\.json, and objective\.esolm\.alpha_0 of the run is 0\.5")},
    "replaid": {"schedule": (weights(endpoint_of_the_schedule), r"constants\.schedule_bits is not what the objective has learned or fixed")},
    "mdm_prime": {"code": (weights(two_codes_swapped), r"constants\.digit_code is not what the objective has learned or fixed")},
}  # fmt: skip
"""objective -> name of a damage -> (the damage, what the gate says)."""


def gate_answers(run: str, out: str, objective: str, config: dict[str, object]) -> dict[str, str]:
    """Name of a damage of the objective -> what the gate says of a fresh export with it; empty where it passes. Before them, of no damage."""
    answers = {}
    text = Path(out) / "text.txt"
    text.parent.mkdir(exist_ok=True)
    text.write_text(TEXT)
    for number, (name, (damage, _)) in enumerate((WHOLE | CASES.get(objective, {})).items()):
        folder = Path(out) / f"{Path(run).parent.name}_{number}"
        export = open_export(HubConfig(checkpoint=run, output=str(folder), text=str(text), **config))  # type: ignore[arg-type]
        folder.mkdir()
        write_folder(export, folder)
        damage(folder)
        try:
            run_gate(folder, export.trained, export.objective, export.source, key=export.key, dtype=export.dtype, text=str(text))
            answers[name] = ""
        except UserError as error:
            answers[name] = str(error)
        assert json.loads((folder / "gate.json").read_text())["passed"] == (answers[name] == "")
    return answers
