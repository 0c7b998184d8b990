"""The shape of a network: what a checkpoint's weights need to be understood."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Fields as in training's backbone configuration, and the vocabulary without its padding.

    vocab_size     classes of the model: the tokenizer's ids, and the mask id where there is one.
    fp32_residual  keep the residual stream in fp32 when the weights are bf16.
    reads          what stands at each position: token ids, digits of ids, or continuous latents.
    digits, digit_base, digit_join   digits per token, their base, and how their embeddings make one.
    latent         width of continuous latents.
    prompt_table   latents: prompts are read from a table of their own.
    """

    kind: Literal["dit", "llama"]
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    qk_norm: bool = False
    cond_dim: int = 128
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    fp32_residual: bool = True
    reads: Literal["tokens", "digits", "latents"] = "tokens"
    digits: int = 1
    digit_base: int = 2
    digit_join: Literal["concat_shared", "concat", "sum"] = "concat_shared"
    latent: int = 1
    prompt_table: bool = False

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.head_dim % 2:
            raise ValueError(f"hidden {self.hidden} over {self.heads} heads must give an even head width: RoPE rotates halves against each other")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads: the first must be a multiple of the second")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads
