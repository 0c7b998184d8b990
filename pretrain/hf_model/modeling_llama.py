"""The Llama-style network: pre-norm with RMSNorm, rotary attention, SwiGLU, no biases, no time conditioning (Touvron et al. 2023).

Grouped queries (Ainslie et al. 2023) and RMSNorm on queries and keys before the rotation are options.

Shape suffixes: B sequences, L positions, D width, V model vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .attention_patterns import Cache, KeyValueCache, Pattern, attention_pattern, rotary_angles, scored_positions
from .configuration_network import NetworkConfig
from .modeling_inputs import build_input, residual_stream
from .modeling_layers import Backbone, RMSNorm, SelfAttention, new_cache
from .network_input import NetworkInput


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """[B, L, D] in the dtype of the weights."""
        x_BLD = x_BLD.to(self.gate_proj.weight.dtype)
        return self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))


class LlamaBlock(nn.Module):
    """x += Attention(RMSNorm x); x += SwiGLU(RMSNorm x)."""

    def __init__(self, config: NetworkConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor], pattern: Pattern, cache: Cache | None) -> Tensor:
        """The residual stream after this block."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), rotary, pattern, cache)
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))


class Llama(Backbone):
    """Inputs to logits over the model vocabulary; `conditioning_B` is not read, the head is untied."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        if config.kind != "llama":
            raise ValueError(f"a Llama cannot be built from a {config.kind} configuration")
        self.config = config
        self.embed_tokens = build_input(config)
        self.layers = nn.ModuleList(LlamaBlock(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def features(self, inputs: NetworkInput, cache: Cache | None = None, pattern: Pattern | None = None) -> Tensor:
        """What the head reads, [B, L, D] (half as long for two streams); `cache` holds the positions before these and is extended by them.

        pattern  which keys are seen, in place of what `inputs` and `cache` say.
        """
        pattern = pattern or attention_pattern(inputs, 0 if cache is None else cache.length)
        rotary = rotary_angles(inputs.positions_BL, self.config.head_dim, self.config.rope_base)
        x_BLD = residual_stream(self.embed_tokens, inputs, fp32=self.config.fp32_residual, dtype=self.lm_head.weight.dtype)
        for block in self.layers:
            x_BLD = self.through(block, x_BLD, rotary, pattern, cache)
        if cache is not None:
            cache.advance(x_BLD.shape[1])
        return self.norm(scored_positions(x_BLD, inputs))

    def logits(self, features: Tensor) -> Tensor:
        """Features of any positions [..., D] to logits [..., V] in the dtype of the head."""
        return self.lm_head(features.to(self.lm_head.weight.dtype))

    def forward(self, inputs: NetworkInput, cache: Cache | None = None) -> Tensor:
        """logits_BLV."""
        return self.logits(self.features(inputs, cache))

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """An empty key/value cache for causal decoding."""
        return new_cache(self.config, self.lm_head, batch, capacity)
