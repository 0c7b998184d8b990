"""A trained model as sampling sees it, wherever it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.sampling_methods import Constants
from pretrain.parallel.vocabulary import Vocabulary


class Codec(Protocol):
    """What sampling asks of a tokenizer."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Text of each list of ids."""


@dataclass(frozen=True, kw_only=True)
class SampledModel:
    """What is known before the weights are read, and how to read them.

    home   where samples go that were not sent elsewhere.
    folder where the weights are: a checkpoint's folder, or an exported one.
    origin what a record says of where it is from, for example {"step": 400}.
    load   the network, and the constants of its objective, on a device and in a type.
    """

    objective: str
    vocabulary: Vocabulary
    codec: Codec
    trained_length: int
    home: Path
    folder: Path
    origin: Mapping[str, Any]
    load: Callable[[torch.device, torch.dtype], tuple[DiT | Llama, Constants]]
