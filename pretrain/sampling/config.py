"""What a sampling command takes. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass
from typing import Literal

from pretrain.errors import UserError

_RANGES = {
    "step": (0, 2**63 - 1, "leave it out for the newest checkpoint"),
    "count": (1, 10**6, "start the command again with another seed for more"),
    "batch": (1, 2**16, "use for example 16"),
    "length": (1, 2**20, "leave it out for the length that the model was trained with"),
    "steps": (1, 10**6, "leave it out for one per token"),
    "top_k": (0, 2**31 - 1, "use 0 for all tokens"),
    "seed": (0, 2**63 - 1, "use for example 1"),
}
_NOT_EMPTY = {"checkpoint": "give runs/NAME", "output": "leave it out for samples.jsonl in the run's directory", "device": "leave it out, or use cpu"}
_TEMPERATURES = (1e-6, 1e6)
"""Beyond them logits over temperature overflow, or all tokens are as likely as each other."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How to sample from a trained model.

    checkpoint   a run directory (runs/NAME): its newest complete checkpoint; or one checkpoint's folder.
    step         which checkpoint of the run directory; None: the newest complete one.
    sampler      auto: ar for autoregressive models, ancestral for masked diffusion; first_hitting: exact masked diffusion, one token at a time.
    count        sequences.
    batch        how many are sampled at once; the samples do not depend on it.
    length       tokens per sequence, prompt included; None: the length that the model was trained with.
    steps        steps of the ancestral sampler; None: one per token.
    prompt       text that every sequence begins with.
    temperature  divides the logits; 0 takes the most likely token.
    top_k        only the k most likely tokens; 0: all.
    top_p        only the most likely tokens that hold this probability; 1: all.
    seed         the same seed gives the same samples.
    output       JSONL file for the samples; None: samples.jsonl beside the checkpoints of the run.
    device       auto: CUDA where there is one; or a torch device such as cpu or cuda:1.
    dtype        arithmetic of the network.
    """

    checkpoint: str
    step: int | None = None
    sampler: Literal["auto", "ar", "ancestral", "first_hitting"] = "auto"
    count: int = 3
    batch: int = 16
    length: int | None = None
    steps: int | None = None
    prompt: str = ""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    output: str | None = None
    device: str = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        for name, (low, high, advice) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UserError(f"{name}={value} must lie in [{low}, {high}]; {advice}")
        for name, advice in _NOT_EMPTY.items():
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise UserError(f"{name} is empty; {advice}")
        coldest, hottest = _TEMPERATURES
        if not (self.temperature == 0 or coldest <= self.temperature <= hottest):
            rule = f"must be 0 (the most likely token) or lie in [{coldest:g}, {hottest:g}]"
            raise UserError(f"temperature={self.temperature} {rule}; use for example {0 if self.temperature < coldest else 1}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is no share of the probability; give a value above 0 and at most 1 (all tokens)")
        if self.steps is not None and self.sampler in ("ar", "first_hitting"):
            raise UserError(f"steps={self.steps} means nothing to sampler={self.sampler}, which draws one token at a time; leave steps out")
