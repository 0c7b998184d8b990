"""The shape of a network. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass
from typing import Literal


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

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def kv_groups(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads
