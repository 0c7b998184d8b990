"""What a sampling command takes. No torch here: configuration must load in milliseconds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pretrain.errors import UserError, nearest
from pretrain.hf_model.sampling_settings import SAMPLERS, SETTINGS

_RANGES = {
    "step": (0, 2**63 - 1, "leave it out for the newest checkpoint"),
    "count": (1, 10**6, "start the command again with another seed for more"),
    "batch": (1, 2**16, "use for example 16"),
    "length": (1, 2**20, "leave it out for the length that the model was trained with"),
    "top_k": (0, 2**31 - 1, "use 0 for all tokens"),
    "seed": (0, 2**63 - 1, "use for example 1"),
}
_NOT_EMPTY = {
    "checkpoint": "give runs/NAME",
    "output": "leave it out for samples.jsonl beside the model",
    "device": "leave it out, or use cpu",
    "prompts": "name a file with one prompt per line",
    "blank": "use for example [MASK]",
}
_TEMPERATURES = (1e-6, 1e6)
"""Beyond them logits over temperature overflow, or all tokens are as likely as each other."""
_NAMES = sorted({"auto", *(name for samplers in SAMPLERS.values() for name in samplers)})
_TEXTS = ("prompt", "blank")


def quoted(words: Sequence[str], texts: Sequence[str] = _TEXTS) -> list[str]:
    """A command line whose texts are taken as they stand, with the commas, apostrophes and brackets that Hydra would read as its own."""
    return [_quoted(word) if word.partition("=")[0] in texts and "=" in word else word for word in words]


def _quoted(word: str) -> str:
    key, _, text = word.partition("=")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return word  # quoted by somebody who knows Hydra
    # Backslashes are halved before a quote by Hydra, before an interpolation by OmegaConf, and left alone elsewhere.
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return f"{key}='" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """What belongs to some samplers only; None: the sampler's default. What each means: hf_model/sampling_settings.py."""

    steps: int | None = None
    noise_removal: str | None = None
    tokens: int | None = None
    block: int | None = None
    psi: str | None = None
    eta: float | None = None
    loop: bool | None = None
    loop_alpha: float | None = None
    loop_rise: float | None = None
    loop_fall: float | None = None
    alpha_0: float | None = None
    order: str | None = None
    segments: int | None = None
    given: str | None = None
    score_temperature: float | None = None
    self_conditioning: bool | None = None
    clean_share: str | None = None
    joint_above: float | None = None

    def settings(self) -> dict[str, Any]:
        """What was said of them."""
        return {name: getattr(self, name) for name in SETTINGS if getattr(self, name) is not None}


def check_values(config: object, ranges: Mapping[str, tuple[int, int, str]], not_empty: Mapping[str, str]) -> None:
    """UserError for the first field of a configuration that is out of its range, or an empty text. None is legal; the texts say what to do."""
    for name, (low, high, advice) in ranges.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise UserError(f"{name}={value} must lie in [{low}, {high}]; {advice}")
    for name, advice in not_empty.items():
        if getattr(config, name) is not None and not getattr(config, name).strip():
            raise UserError(f"{name} is empty; {advice}")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SamplerSettings):
    """How to sample from a trained model.

    checkpoint   a run directory (runs/NAME): its newest complete checkpoint; one checkpoint's folder; or an exported Hugging Face folder.
    step         which checkpoint of the run directory; None: the newest complete one.
    sampler      a sampler of the model's objective (hf_model/sampling_settings.py, or --help); auto: the first of them.
    count        sequences per prompt.
    batch        how many are sampled at once; the samples do not depend on it.
    length       tokens per sequence, prompt included; None: the length that the model was trained with, or that of a prompt with blanks.
    prompt       text that every sequence begins with; or, with blanks in it, text to fill in.
    prompts      a file of prompts, one per line, or .jsonl with {"prompt": TEXT} in each; None: `prompt` alone.
    blank        what stands for one token to fill in, in a prompt; followed by *N for N of them.
    temperature  divides the logits; 0 takes the most likely token.
    top_k        only the k most likely tokens; 0: all.
    top_p        only the most likely tokens that hold this probability; 1: all.
    seed         the same seed gives the same samples.
    output       file for the samples: text in .txt, otherwise JSON lines; None: samples.jsonl beside the model, or samples-2.jsonl and so on.
    view         show the first sequence of a batch after every step: live on a terminal, otherwise as some twenty lines.
    device       auto: CUDA where there is one; or a torch device such as cpu or cuda:1.
    dtype        arithmetic of the network.
    """

    checkpoint: str
    step: int | None = None
    sampler: str = "auto"
    count: int = 3
    batch: int = 16
    length: int | None = None
    prompt: str = ""
    prompts: str | None = None
    blank: str = "[MASK]"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    output: str | None = None
    view: bool = False
    device: str = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        """Raises UserError for what no model could be sampled with."""
        check_values(self, _RANGES, _NOT_EMPTY)
        if self.sampler not in _NAMES:
            raise UserError(f"there is no sampler={self.sampler}{nearest(self.sampler, _NAMES)}")
        if self.prompt and self.prompts is not None:
            raise UserError(f"prompt and prompts={self.prompts} both say how to begin; give one of them")
        self._check_law()

    def _check_law(self) -> None:
        coldest, hottest = _TEMPERATURES
        if not (self.temperature == 0 or coldest <= self.temperature <= hottest):
            rule = f"must be 0 (the most likely token) or lie in [{coldest:g}, {hottest:g}]"
            raise UserError(f"temperature={self.temperature} {rule}; use for example {0 if self.temperature < coldest else 1}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is no share of the probability; give a value above 0 and at most 1 (all tokens)")
        for name, everything in (("top_k", 0), ("top_p", 1.0)):
            if self.temperature == 0 and getattr(self, name) != everything:
                rule = "means nothing at temperature=0, which takes the most likely token"
                raise UserError(f"{name}={getattr(self, name)} {rule}; leave one of them out")
