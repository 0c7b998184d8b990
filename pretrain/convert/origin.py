"""What a run takes its first weights from, and whether they are of its network: `init_from`. No torch here.

    init_from=runs/NAME                                   the newest complete checkpoint of a run, in any layout, or an imported one
    init_from=runs/NAME/checkpoints/step_00001000         that one
    init_from=FOLDER                                      an export of this program, a LlamaForCausalLM or a Qwen3ForCausalLM
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.backbones.config import BackboneConfig
from pretrain.checkpoint.changes import read_config
from pretrain.checkpoint.layout import CHECKPOINTS, COMPLETE, MEANT, TRAIN_STATE, TrainState, step_of
from pretrain.convert.hub_folder import HubFolder, is_hub_folder
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError, spelled
from pretrain.run_config import RunConfig

_FIELDS = ("kind", "hidden", "layers", "heads", "kv_groups", "ffn_width", "qk_norm", "cond_dim", "rope_base", "norm_eps")
_DIGITS = 12
"""Of a hash, as checkpoints keep it."""
_KEYS = {"kv_groups": "kv_heads", "ffn_width": "ffn"}


@dataclass(frozen=True)
class Origin:
    """folder: a checkpoint or a hub folder. rows: of a checkpoint's vocabulary; None for a hub folder, whose rows are padded anew.
    tokenizer: the first digits of its hash; empty where it is not known."""

    folder: Path
    backbone: BackboneConfig
    objective: str
    rows: int | None
    hub: bool
    tokenizer: str = ""


def require_origin(config: RunConfig) -> None:
    """Looks at configurations only, before anything starts. Raises UserError where `init_from` is nothing, or of another network.

    A run that has checkpoints of its own does not look.
    """
    if config.init_from is None:
        if config.init_moments:
            raise UserError("init_moments=true takes moments from where the run starts, and init_from is not set: set it, or leave init_moments out")
        return
    if not any((config.directory / CHECKPOINTS).glob(f"step_*/{COMPLETE}")) or config.resume == "fresh":
        require_fitting(config, read_origin(Path(config.init_from)))


def read_origin(path: Path) -> Origin:
    """What is there, without looking at weights. Raises UserError for anything that is none of the three."""
    if is_hub_folder(path):
        hub = HubFolder.open(path)
        tokenizer = str((hub.found.get("provenance") or {}).get("tokenizer_blake2b", "")) if hub.own else ""
        return Origin(path, hub.backbone, hub.objective.name, None, hub=True, tokenizer=tokenizer[:_DIGITS])
    folder = _newest(path) if os.path.isdir(path / CHECKPOINTS) else path
    if not (folder / TRAIN_STATE).is_file():
        raise UserError(
            f"init_from={path} is no run, checkpoint or model folder; name runs/NAME, runs/NAME/checkpoints/step_00001000, or a folder with "
            "config.json and safetensors"
        )
    state, tree = TrainState.read(folder), read_config(folder)
    tokenizer = str(state.extras.get(MEANT, {}).get("tokenizer", ""))
    return Origin(folder, BackboneConfig.from_dict(state.backbone), str(tree["objective"]["name"]), state.rows, hub=False, tokenizer=tokenizer)


def require_fitting(config: RunConfig, origin: Origin) -> None:
    """Raises UserError for the first field of the network that differs, with the value that fits."""
    for key, theirs, ours in _differing(config.backbone, origin.backbone):
        raise UserError(
            f"init_from={config.init_from} has {key}={spelled(theirs)}, and this run {key}={spelled(ours)}: a run starts from weights of its own "
            f"network; set {key}={spelled(theirs)}, or another init_from"
        )
    _require_objective_and_tokenizer(config, origin)
    theirs, ours = origin.backbone.inputs, config.backbone.inputs
    if theirs.prompt and not ours.prompt:
        raise UserError(
            f"init_from={config.init_from} reads prompts from a table of their own, and this run has none; set "
            "objective.replaid.prompt_embedding=true"
        )
    if replace(ours, prompt=theirs.prompt) != theirs:  # a table that is not there yet is made (initial.add_prompt_table)
        raise UserError(
            f"init_from={config.init_from} was trained with objective={origin.objective}, whose network reads {origin.backbone.inputs.kind}, and "
            f"objective={config.objective.name} reads {config.backbone.inputs.kind}, or others of them; set objective={origin.objective} with "
            "the same constants, or another init_from"
        )
    if origin.hub and config.init_moments:
        raise UserError(f"init_moments=true, and {config.init_from} is a model without moments; leave init_moments out")


def _require_objective_and_tokenizer(config: RunConfig, origin: Origin) -> None:
    """Fine-tuning goes on with its objective; ids mean the same text in every run."""
    if config.sft is not None and origin.objective != config.objective.name:
        raise UserError(
            f"init_from={config.init_from} was trained with objective={origin.objective}, and this run fine-tunes with "
            f"objective={config.objective.name}; choose the preset of that run with +model=PRESET, or another init_from"
        )
    if origin.tokenizer and os.path.exists(config.tokenizer):
        ours = Tokenizer(config.tokenizer).hash[: len(origin.tokenizer)]
        if ours != origin.tokenizer:
            raise UserError(
                f"init_from={config.init_from} was trained with another tokenizer ({origin.tokenizer}) than tokenizer={config.tokenizer} ({ours}), "
                "so that its ids mean other text; set tokenizer= to the one of that run"
            )


def _differing(ours: BackboneConfig, theirs: BackboneConfig) -> Iterator[tuple[str, Any, Any]]:
    for name in _FIELDS:
        if name == "cond_dim" and ours.kind == "llama":
            continue
        if getattr(ours, name) != getattr(theirs, name):
            yield f"backbone.{_KEYS.get(name, name)}", getattr(theirs, name), getattr(ours, name)


def _newest(path: Path) -> Path:
    found = [entry for entry in (path / CHECKPOINTS).iterdir() if step_of(entry.name) is not None and (entry / COMPLETE).is_file()]
    if not found:
        raise UserError(f"init_from={path} holds no complete checkpoint; train it until its next save, or name another run")
    return max(found, key=lambda entry: step_of(entry.name) or 0)
