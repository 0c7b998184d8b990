"""What a batch of sequences needs at the least, compared with what the device has left: a refusal instead of a killed process."""

from collections.abc import Callable

import torch

from pretrain.errors import UserError
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama

_NOISE_BYTES = 80
"""Per token, or pair of latent components: the ten 64-bit words that make uniform numbers."""
_GIB = 2**30


def bytes_per_token(network: DiT | Llama, objective: str) -> int:
    """A lower limit: the cache of keys and values where there is one, or one block's activations, which the other models hold for all positions
    at once; and noise, of which there is a number for each digit of a token and two for each pair of latent components."""
    shape, size = network.config, network.lm_head.weight.element_size()
    if objective in ("ar", "esolm"):
        return _NOISE_BYTES + 2 * shape.layers * shape.kv_heads * shape.head_dim * size
    activations = (2 * shape.hidden + max(shape.ffn, 3 * shape.hidden)) * size
    if objective == "replaid":
        # Latents, clean embeddings, the last estimate and the new one are float64.
        return max(_NOISE_BYTES * -(-shape.latent // 2), activations) + 4 * 8 * shape.latent
    return _NOISE_BYTES * (shape.digits if objective == "mdm_prime" else 1) + activations


def require_memory(network: DiT | Llama, objective: str, host_memory: Callable[[], float], *, batch: int, count: int, length: int) -> None:
    """UserError where a batch of `length` tokens per sequence cannot fit.

    batch, count  sequences at once, at most, and in all.
    host_memory   bytes that this process could still take without CUDA.
    """
    device = network.lm_head.weight.device
    sequences = min(batch, count)
    each = length * bytes_per_token(network, objective)
    free = int(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory())
    if sequences * each <= free:
        return
    fitting = free // each
    advice = f"use batch={fitting}" if fitting else f"use length={max(length * free // each, 1)} with batch=1"
    raise UserError(
        f"{sequences} sequences of length={length} at once need at least {sequences * each / _GIB:,.1f} GiB, and {free / _GIB:,.1f} GiB are free; "
        f"{advice}, or less"
    )
