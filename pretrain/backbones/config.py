"""The shape of a network. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """What stands at each position of a network's input; it follows from the objective.

    kind          tokens: ids of the vocabulary. digits: the sub-tokens of each id. latents: vectors of `latent` numbers, an estimate of their
                  clean values, and the noise level.
    base, digits  digits: each id is `digits` digits of this base, or the masked digit (`base` itself).
    prompt        latents: whether prompts are read from a table of their own, with a row of width D per id of the vocabulary.
    join          digits: how their embeddings make one of width D. concat_shared: one table of width D // digits, concatenated (and padded
                  with zeros to D); concat: the same with a table per digit; sum: a table of width D per digit, added.
    """

    kind: Literal["tokens", "digits", "latents"] = "tokens"
    base: int = 2
    digits: int = 1
    join: Literal["concat_shared", "concat", "sum"] = "concat_shared"
    latent: int = 1
    prompt: bool = False

    def digit_table(self, hidden: int) -> tuple[int, int]:
        """Rows and width of the digits' table."""
        tables = 1 if self.join == "concat_shared" else self.digits
        return tables * (self.base + 1), hidden if self.join == "sum" else hidden // self.digits


GAMMA_FEATURES = 64
"""Sines and cosines that embed the noise level of continuous inputs (Plaid)."""


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """One of two families.

    kind             dit: that of scaling-dllms (AdaLN-Zero, weight-only LayerNorm, GELU-tanh MLP with biases, zero-initialised head with bias).
                     llama: RMSNorm, SwiGLU, no biases, no time conditioning.
    hidden, layers, heads   width, depth, attention heads; hidden must be a multiple of heads.
    kv_heads         grouped-query attention (llama); None means one per head.
    ffn              inner width of the MLP; None means 4 * hidden.
    qk_norm          RMSNorm on queries and keys (llama).
    cond_dim         width of the time conditioning (dit): 128 at every size in the paper.
    rope_base        RoPE base.
    norm_eps         epsilon of the norms.
    vocab_multiple   the padded vocabulary is a multiple of this; a constant of the model, whatever the layout.
    recompute        activation recomputation: none, or full (every layer is recomputed in the backward pass).
    inputs           what stands at each position; set from the objective, not by users.
    """

    kind: Literal["dit", "llama"]
    hidden: int
    layers: int
    heads: int
    kv_heads: int | None = None
    ffn: int | None = None
    qk_norm: bool = False
    cond_dim: int = 128
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    vocab_multiple: int = 128
    recompute: Literal["none", "full"] = "none"
    inputs: InputConfig = field(default_factory=InputConfig, metadata={"derived": True})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "BackboneConfig":
        """The inverse of dataclasses.asdict."""
        return cls(**{**values, "inputs": InputConfig(**values.get("inputs", {}))})

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def kv_groups(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads
