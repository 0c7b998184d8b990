"""The diffusion transformer of MDLM and its successors: rotary attention and AdaLN-Zero (Peebles and Xie 2023; Sahoo et al. 2024).

Residual stream in fp32 where asked, branches in the dtype of the weights. A scalar per sequence conditions every block; masked diffusion
and autoregression feed zero, and then the modulation is a learned constant of each layer.

Shape suffixes: B sequences, L positions, D width, C width of the conditioning, V model vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_patterns import Cache, KeyValueCache, Pattern, attention_pattern, rotary_angles, scored_positions
from .configuration_network import NetworkConfig
from .modeling_inputs import build_input, residual_stream
from .modeling_layers import Backbone, LayerNorm, SelfAttention, new_cache
from .network_input import NetworkInput

TIME_FREQUENCIES = 256
TIME_MAX_PERIOD = 10000.0


class TimeEmbedding(nn.Module):
    """sigma -> [cos | sin] of 128 frequencies -> Linear, SiLU, Linear, SiLU, all in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(TIME_FREQUENCIES, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, sigma_B: Tensor) -> Tensor:
        """[B, C], fp32."""
        with torch.autocast(sigma_B.device.type, enabled=False):
            half = TIME_FREQUENCIES // 2
            frequencies = torch.exp(-math.log(TIME_MAX_PERIOD) * torch.arange(half, device=sigma_B.device).float() / half)
            angles = sigma_B.float()[:, None] * frequencies
            x = torch.cat((angles.cos(), angles.sin()), dim=-1)
            for linear in (self.in_proj, self.out_proj):
                x = F.silu(F.linear(x, linear.weight.float(), linear.bias.float()))
            return x


class MLP(nn.Module):
    """Linear, GELU (tanh form), Linear, with biases."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden, config.ffn)
        self.down_proj = nn.Linear(config.ffn, config.hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """[B, L, D] in the dtype of the weights."""
        return self.down_proj(F.gelu(self.up_proj(x_BLD.to(self.up_proj.weight.dtype)), approximate="tanh"))


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map with bias that starts at zero: the "Zero" of AdaLN-Zero."""
    linear = nn.Linear(inputs, outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def modulation_chunks(linear: nn.Linear, condition_BC: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """The linear map's output as `chunks` tensors [B, 1, D]."""
    return linear(condition_BC.to(linear.weight.dtype))[:, None].chunk(chunks, dim=-1)


def modulate(x_BLD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
    """x (1 + scale) + shift."""
    return x_BLD * (1 + scale_B1D) + shift_B1D


class DiTBlock(nn.Module):
    """x += gate_a Attention(mod(LN x)); x += gate_m MLP(mod(LN x))."""

    def __init__(self, config: NetworkConfig, layer: int) -> None:
        super().__init__()
        self.modulation = zero_linear(config.cond_dim, 6 * config.hidden)
        self.input_layernorm = LayerNorm(config.hidden, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = LayerNorm(config.hidden, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x_BLD: Tensor, condition_BC: Tensor, rotary: tuple[Tensor, Tensor], pattern: Pattern, cache: Cache | None
    ) -> Tensor:
        """The residual stream after this block."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation_chunks(self.modulation, condition_BC, 6)
        x_BLD = x_BLD + gate_a * self.self_attn(modulate(self.input_layernorm(x_BLD), shift_a, scale_a), rotary, pattern, cache)
        return x_BLD + gate_m * self.mlp(modulate(self.post_attention_layernorm(x_BLD), shift_m, scale_m))


class DiT(Backbone):
    """Inputs to logits over the model vocabulary; input and output embeddings are untied."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        if config.kind != "dit" or config.kv_heads != config.heads or config.qk_norm:
            raise ValueError("a DiT has one key/value head per head and no QK-norm")
        self.config = config
        self.embed_tokens = build_input(config)
        self.time_embedding = TimeEmbedding(config.cond_dim)
        self.layers = nn.ModuleList(DiTBlock(config, i) for i in range(config.layers))
        self.norm = LayerNorm(config.hidden, config.norm_eps)
        self.final_modulation = zero_linear(config.cond_dim, 2 * config.hidden)
        self.lm_head = zero_linear(config.hidden, config.vocab_size)

    def features(self, inputs: NetworkInput, cache: Cache | None = None, pattern: Pattern | None = None) -> Tensor:
        """What the head reads, [B, L, D] (half as long for two streams); `cache` holds the positions before these and is extended by them.

        pattern  which keys are seen, in place of what `inputs` and `cache` say.
        """
        pattern = pattern or attention_pattern(inputs, 0 if cache is None else cache.length)
        rotary = rotary_angles(inputs.positions_BL, self.config.head_dim, self.config.rope_base)
        condition_BC = self.time_embedding(inputs.conditioning_B)
        x_BLD = residual_stream(self.embed_tokens, inputs, fp32=self.config.fp32_residual, dtype=self.lm_head.weight.dtype)
        for block in self.layers:
            x_BLD = self.through(block, x_BLD, condition_BC, rotary, pattern, cache)
        if cache is not None:
            cache.advance(x_BLD.shape[1])
        return modulate(self.norm(scored_positions(x_BLD, inputs)), *modulation_chunks(self.final_modulation, condition_BC, 2))

    def logits(self, features: Tensor) -> Tensor:
        """Features of any positions [..., D] to logits [..., V] in the dtype of the head."""
        return self.lm_head(features.to(self.lm_head.weight.dtype))

    def forward(self, inputs: NetworkInput, cache: Cache | None = None) -> Tensor:
        """logits_BLV."""
        return self.logits(self.features(inputs, cache))

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """An empty key/value cache for causal decoding."""
        return new_cache(self.config, self.lm_head, batch, capacity)
