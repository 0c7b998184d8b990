"""What a run takes its first weights from, and whether they are of its network: `init_from`. No torch here.

    init_from=runs/NAME                                   the newest complete checkpoint of a run, in any layout, or an imported one
    init_from=runs/NAME/checkpoints/step_00001000         that one
    init_from=FOLDER                                      an export of this program, a LlamaForCausalLM or a Qwen3ForCausalLM
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.backbones.config import BackboneConfig
from pretrain.checkpoint.changes import read_config
from pretrain.checkpoint.layout import CHECKPOINTS, COMPLETE, TRAIN_STATE, TrainState, step_of
from pretrain.convert.hub_folder import HubFolder, is_hub_folder
from pretrain.errors import UserError, spelled
from pretrain.run_config import RunConfig

_FIELDS = ("kind", "hidden", "layers", "heads", "kv_groups", "ffn_width", "qk_norm", "cond_dim", "rope_base", "norm_eps")
_KEYS = {"kv_groups": "kv_heads", "ffn_width": "ffn"}


@dataclass(frozen=True)
class Origin:
    """folder: a checkpoint or a hub folder. rows: of a checkpoint's vocabulary; None for a hub folder, whose rows are padded anew."""

    folder: Path
    backbone: BackboneConfig
    objective: str
    rows: int | None
    hub: bool


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
        return Origin(path, hub.backbone, hub.objective.name, None, hub=True)
    folder = _newest(path) if os.path.isdir(path / CHECKPOINTS) else path
    if not (folder / TRAIN_STATE).is_file():
        raise UserError(
            f"init_from={path} is no run, checkpoint or model folder; name runs/NAME, runs/NAME/checkpoints/step_00001000, or a folder with "
            "config.json and safetensors"
        )
    state, tree = TrainState.read(folder), read_config(folder)
    return Origin(folder, BackboneConfig.from_dict(state.backbone), str(tree["objective"]["name"]), state.rows, hub=False)


def require_fitting(config: RunConfig, origin: Origin) -> None:
    """Raises UserError for the first field of the network that differs, with the value that fits."""
    for key, theirs, ours in _differing(config.backbone, origin.backbone):
        raise UserError(
            f"init_from={config.init_from} has {key}={spelled(theirs)}, and this run {key}={spelled(ours)}: a run starts from weights of its own "
            f"network; set {key}={spelled(theirs)}, or another init_from"
        )
    if config.backbone.inputs != origin.backbone.inputs:
        raise UserError(
            f"init_from={config.init_from} was trained with objective={origin.objective}, whose network reads {origin.backbone.inputs.kind}, and "
            f"objective={config.objective.name} reads {config.backbone.inputs.kind}, or others of them; set objective={origin.objective} with "
            "the same constants, or another init_from"
        )
    if origin.hub and config.init_moments:
        raise UserError(f"init_moments=true, and {config.init_from} is a model without moments; leave init_moments out")


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
