"""What a batch of sequences needs at the least, compared with what the device has left: a refusal instead of a killed process."""

from collections.abc import Callable

import torch

from pretrain.errors import UserError
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.sampling.config import SamplingConfig

_NOISE_BYTES = 80
"""Per token: the ten 64-bit words that make its uniform numbers."""
_GIB = 2**30


def bytes_per_token(network: DiT | Llama, *, autoregressive: bool) -> int:
    """A lower limit: the cache of keys and values, or one block's activations, which masked diffusion holds for all positions at once."""
    shape, size = network.config, network.lm_head.weight.element_size()
    if autoregressive:
        return _NOISE_BYTES + 2 * shape.layers * shape.kv_heads * shape.head_dim * size
    return _NOISE_BYTES + (2 * shape.hidden + max(shape.ffn, 3 * shape.hidden)) * size


def require_memory(network: DiT | Llama, config: SamplingConfig, length: int, host_memory: Callable[[], float], *, autoregressive: bool) -> None:
    """UserError where a batch of `length` tokens per sequence cannot fit. `host_memory`: bytes that this process could still take without CUDA."""
    device = network.lm_head.weight.device
    sequences = min(config.batch, config.count)
    each = length * bytes_per_token(network, autoregressive=autoregressive)
    free = int(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory())
    if sequences * each <= free:
        return
    fitting = free // each
    advice = f"use batch={fitting}" if fitting else f"use length={max(length * free // each, 1)} with batch=1"
    raise UserError(
        f"{sequences} sequences of length={length} at once need at least {sequences * each / _GIB:,.1f} GiB, and {free / _GIB:,.1f} GiB are free; "
        f"{advice}, or less"
    )
