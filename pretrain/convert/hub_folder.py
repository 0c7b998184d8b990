"""A folder that `transformers` loads, read tensor by tensor: an export of this program, or a stock Llama or Qwen3.

`HubFolder.open` imports no torch: what a run starts from is looked at before anything heavy is imported.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.backbones.config import BackboneConfig
from pretrain.convert.hf_config import MODEL_TYPE, backbone_from, objective_from
from pretrain.convert.stock import stock_backbone, stock_name
from pretrain.errors import UserError
from pretrain.objectives.config import ObjectiveConfig
from pretrain.run_config import input_config

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class HubFolder:
    """found: config.json. own: whether it is an export of this program. files: tensor -> file that holds it (a single file: "")."""

    folder: Path
    found: dict[str, Any]
    own: bool
    backbone: BackboneConfig
    objective: ObjectiveConfig
    files: dict[str, str]

    @staticmethod
    def open(folder: Path) -> "HubFolder":
        """Raises UserError for a folder without configuration or safetensors, and for a network that this program does not have."""
        found = _json(folder / CONFIG)
        own = found.get("model_type") == MODEL_TYPE
        try:
            objective = objective_from(found) if own else ObjectiveConfig(name="ar")
            backbone = backbone_from(found) if own else stock_backbone(found)
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / CONFIG} lacks {error}; give a folder that transformers loads") from None
        if not (folder / _ONE).is_file() and not (folder / _INDEX).is_file():
            raise UserError(f"{folder} has no {_ONE}; save the model again with safetensors, the only weights that are read")
        files = {} if (folder / _ONE).is_file() else dict(_json(folder / _INDEX)["weight_map"])
        backbone = BackboneConfig.from_dict({**vars(backbone), "inputs": vars(input_config(objective))})
        return HubFolder(folder, found, own, backbone, objective, files)

    @property
    def model_size(self) -> int:
        """Classes of the model."""
        return int(self.found["vocab_size"])

    def tensor(self, name: str) -> "Tensor":
        """A tensor by its name in the files, in its own type. Raises UserError where it is missing or the file is damaged."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / self.files.get(name, _ONE)
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{name} cannot be read from {path} ({error}); copy the folder again") from None

    def plain(self, name: str) -> "Tensor":
        """A tensor of the plain network, fp32. A stock model with tied embeddings has no head of its own: it gets a copy."""
        if not self.own and name == "lm_head.weight" and self.found.get("tie_word_embeddings"):
            name = "embed_tokens.weight"
        return self.tensor(f"network.{name}" if self.own else stock_name(name)).float()


def is_hub_folder(path: Path) -> bool:
    """Whether a path looks like one."""
    return (path / CONFIG).is_file()


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{path} cannot be read ({reason}); give a folder that transformers loads") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold an object; give a folder that transformers loads")
    return found
