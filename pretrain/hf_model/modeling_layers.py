"""What both networks are made of: norms in fp32 and rotary self-attention.

Shape suffixes: B sequences, L positions, D width, H query heads, G key/value heads, K head width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention_patterns import Cache, KeyValueCache, Pattern, attend, rotate
from .configuration_network import NetworkConfig


class LayerNorm(nn.Module):
    """Layer norm with a weight and no bias, computed and returned in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x over its root of variance, times weight."""
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), None, self.eps)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019), computed and returned in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x over its root mean square, times weight."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()


class Backbone(nn.Module):
    """What both networks share: recomputation of a layer in the backward pass in place of keeping what it computed.

    `transformers` finds and sets the two attributes (`model.gradient_checkpointing_enable()`).
    """

    gradient_checkpointing: bool
    _gradient_checkpointing_func: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = _recomputed

    def through(self, block: nn.Module, *arguments: Any) -> Tensor:
        """The output of a layer."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(block, *arguments)
        return block(*arguments)


def _recomputed(block: nn.Module, *arguments: Any) -> Any:
    return checkpoint(block, *arguments, use_reentrant=False)


class SelfAttention(nn.Module):
    """Rotary attention without biases; grouped queries and QK-norm where the configuration asks for them."""

    def __init__(self, config: NetworkConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor], pattern: Pattern, cache: Cache | None) -> Tensor:
        """Attention output [B, L, D] in the dtype of the projections; extends `cache` by these positions."""
        x_BLD = x_BLD.to(self.q_proj.weight.dtype)
        q_BLHK, k_BLGK, v_BLGK = (p(x_BLD).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHK, k_BLGK = self.q_norm(q_BLHK).to(v_BLGK.dtype), self.k_norm(k_BLGK).to(v_BLGK.dtype)
        q_BHLK = rotate(q_BLHK.transpose(1, 2), *rotary)
        k_BGSK, v_BGSK = rotate(k_BLGK.transpose(1, 2), *rotary), v_BLGK.transpose(1, 2)
        if cache is not None:
            k_BGSK, v_BGSK = cache.extend(self.layer, k_BGSK, v_BGSK)
        out_BHLK = attend(q_BHLK, k_BGSK, v_BGSK, pattern)
        return self.o_proj(out_BHLK.transpose(1, 2).flatten(2))


def new_cache(config: NetworkConfig, head: nn.Linear, batch: int, capacity: int) -> KeyValueCache:
    """An empty cache in the dtype and on the device of the network that `head` belongs to."""
    return KeyValueCache(
        layers=config.layers,
        batch=batch,
        kv_heads=config.kv_heads,
        capacity=capacity,
        head_dim=config.head_dim,
        dtype=head.weight.dtype,
        device=head.weight.device,
    )
