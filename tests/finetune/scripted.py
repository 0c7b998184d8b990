"""A model that says what a script says, so that scores, cards and files can be compared with what is known beforehand."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from pretrain.checkpoint.layout import CONFIG, MANIFEST
from pretrain.hf_model.attention_patterns import KeyValueCache
from pretrain.hf_model.network_input import NetworkInput
from pretrain.hf_model.sampling_methods import Constants
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.sampling.model import SampledModel

EOS, SIZE = 0, 128


class Letters:
    """A codec of single ASCII characters; 0 is EOS."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]

    def decode(self, ids: list[list[int]]) -> list[str]:
        return ["".join(map(chr, row)) for row in ids]


class Scripted(torch.nn.Module):
    """Autoregressive: after a prompt that `script` has, its text, letter by letter, and EOS; the letter "~" stands for no EOS ever.

    later  what follows a text that has once ended.
    asked  prompts, when their first letter is asked for.
    """

    def __init__(self, script: Mapping[str, str], later: Mapping[str, str]) -> None:
        super().__init__()
        self.script, self.later, self.asked, self.ended = script, later, list[str](), set[str]()
        self._ending: list[str] = []
        self.lm_head = torch.nn.Linear(1, 1)
        self.config = SimpleNamespace(layers=1, kv_heads=1, head_dim=1, hidden=1, ffn=1)

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        one = {"layers": 1, "kv_heads": 1, "head_dim": 1}
        return KeyValueCache(batch=batch, capacity=capacity, dtype=torch.long, device=torch.device("cpu"), **one)

    def features(self, inputs: NetworkInput, cache: KeyValueCache) -> Tensor:
        assert inputs.ids_BL is not None
        (rows, width), first = inputs.ids_BL.shape, inputs.positions_BL[:, 0]
        ids_BGSK, _ = cache.extend(0, inputs.ids_BL[:, None, :, None], inputs.ids_BL[:, None, :, None])
        cache.advance(width)
        logits = torch.zeros(rows, width, SIZE)
        for row in range(rows):
            for place in range(width):
                text = "".join(map(chr, ids_BGSK[row, 0, : int(first[row]) + place + 1, 0].tolist()))
                logits[row, place, self._next(text)] = 50.0
        self.ended |= self.later.keys() & set(self._ending)
        self._ending = []
        return logits

    def _next(self, text: str) -> int:
        texts = {text: answer for text, answer in self.later.items() if text in self.ended}
        for prompt, answer in (texts | dict(self.script)).items():
            said = text.removeprefix(prompt)
            if text.startswith(prompt) and answer.startswith(said.rstrip("~")):
                if not said:
                    self.asked.append(prompt)
                if len(said) == len(answer):
                    self._ending.append(text)
                return ord(answer[len(said)]) if len(said) < len(answer) else ord("~") if answer.endswith("~") else EOS
        return EOS

    def logits(self, features: Tensor) -> Tensor:
        return features


def scripted_model(
    folder: Path, script: Mapping[str, str], *, sft: Any = None, later: Mapping[str, str] | None = None
) -> tuple[SampledModel, Scripted]:
    """The model of a run in `folder` whose checkpoint says that it was fine-tuned as `sft` does."""
    checkpoint = folder / "checkpoints" / "step_00000007"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / CONFIG).write_text(yaml.safe_dump({"sft": sft}))
    (checkpoint / MANIFEST).write_text("{}")
    network = Scripted(script, later or {})
    vocabulary = Vocabulary(tokenizer_size=SIZE, model_size=SIZE, padded_size=SIZE, mask_id=None, eos_id=EOS)
    model = SampledModel(
        objective="ar", vocabulary=vocabulary, codec=Letters(), trained_length=256, home=folder, folder=checkpoint, origin={"step": 7},
        load=lambda device, dtype: (network, Constants(objective="ar")),  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    return model, network
