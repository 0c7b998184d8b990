"""The exported model as the gate drives it: loaded by `transformers` from the written folder, with the code that was written there.

Shape suffixes: B sequences, L positions, V model vocabulary.
"""

import dataclasses
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pretrain.convert.stock import stock_name
from pretrain.hf_model.network_input import NetworkInput


class HubModel:
    """A loaded model, and its own module of network inputs; None for a class that `transformers` ships."""

    def __init__(self, model: Any, inputs: Any) -> None:
        self._model, self._inputs, self._stock = model, inputs, inputs is None

    def to(self, device: torch.device) -> "HubModel":
        """The same model there."""
        self._model.to(device)
        return self

    def state(self) -> dict[str, Tensor]:
        """Its tensors."""
        return self._model.state_dict()

    def name(self, plain: str) -> str:
        """A tensor of the plain network in it."""
        return stock_name(plain) if self._stock else f"network.{plain}"

    @torch.no_grad()
    def logits(self, inputs: NetworkInput) -> Tensor:
        """logits_BLV, fp32, by the loaded code."""
        if self._stock:
            return self._model(inputs.ids_BL).logits.float()
        shipped = self._inputs
        fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        return self._model.network(shipped.NetworkInput(**fields | {"attention": shipped.Attention(str(inputs.attention))})).float()

    @torch.no_grad()
    def nats(self, ids_BL: Tensor, *, seed: int, prompt: int = 0) -> float:
        """-log p of all tokens after the first `prompt` of each sequence (ar: but the first of all), or its bound under this seed."""
        labels_BL = ids_BL.clone()
        labels_BL[:, :prompt] = -100
        if not self._stock:
            return float(self._model.score(ids_BL, labels_BL, seed=seed).nelbo_B.sum())
        return float(self._model(ids_BL, labels=labels_BL).loss) * ids_BL[:, max(prompt, 1) :].numel()

    @torch.no_grad()
    def sample(self, canvas_BL: Tensor, settings: dict[str, Any]) -> Tensor:
        """[B, L]: the canvas filled in."""
        if not self._stock:
            return self._model.sample(canvas_BL, seed=1, **settings).sequences
        blanks = int((canvas_BL < 0).sum(-1).max())
        eos = self._model.config.eos_token_id
        start_BP = torch.cat((torch.full_like(canvas_BL[:, :1], eos), canvas_BL[:, : canvas_BL.shape[1] - blanks]), 1)
        # One token after another, not `generate`, which would stop at the end of a document.
        ids_BL = start_BP
        for _ in range(blanks):
            ids_BL = torch.cat((ids_BL, self._model(ids_BL).logits[:, -1].argmax(-1, keepdim=True)), 1)
        return ids_BL[:, 1:]


def load_hub(folder: Path) -> HubModel:
    """The model of an exported folder, in fp32 and evaluation mode."""
    from transformers import AutoModel, AutoModelForCausalLM

    stock = "auto_map" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if stock:
        return HubModel(AutoModelForCausalLM.from_pretrained(folder).float().eval(), None)
    with _modules_of_its_own():
        model = AutoModel.from_pretrained(folder, trust_remote_code=True).float().eval()
        return HubModel(model, sys.modules[f"{type(model).__module__.rpartition('.')[0]}.network_input"])


@contextmanager
def _modules_of_its_own() -> Iterator[None]:
    """The code of a folder is copied to a temporary place, not to the user's cache, and known under no name afterwards: another folder's code
    may have the same one."""
    from transformers import dynamic_module_utils

    path, before = list(sys.path), _dynamic()
    for name in before:
        del sys.modules[name]
    # A cache that was used before would be looked at first, and it does not know the folder.
    sys.path[:] = [entry for entry in path if not (Path(entry) / "transformers_modules").is_dir()]
    try:
        with tempfile.TemporaryDirectory() as cache, mock.patch.object(dynamic_module_utils, "HF_MODULES_CACHE", cache):
            importlib.invalidate_caches()
            yield
    finally:
        sys.path[:] = path
        for name in _dynamic():
            del sys.modules[name]
        sys.modules.update(before)


def _dynamic() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers_modules"}
