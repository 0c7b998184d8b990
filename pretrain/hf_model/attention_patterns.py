"""Which keys a query sees, where tokens stand, and what is kept between decoding steps.

Shape suffixes: B sequences, L positions of the input, S keys (cached ones first), H query heads, G key/value heads, K head width, R = K / 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .network_input import Attention, NetworkInput


@dataclass(frozen=True)
class Pattern:
    """allowed_B1LS: True where a query sees a key, or None where no mask is needed beyond `is_causal`, or `blocks` says it.

    blocks  a FlexAttention block mask, on CUDA: whole blocks that nobody sees are skipped, and no mask of L x L exists.
    """

    allowed_B1LS: Tensor | None
    is_causal: bool
    blocks: Any = None


def attention_pattern(inputs: NetworkInput, cached: int | Tensor = 0) -> Pattern:
    """The pattern of `inputs` when `cached` earlier positions, or one number of them per sequence [B] on the CPU, are already in a cache.

    Raises ValueError for a cache with document masks or any attention but causal (what was computed before would have to see what comes
    now), and for two streams in an odd number of positions.
    """
    causal = inputs.attention is Attention.CAUSAL
    if (isinstance(cached, Tensor) or cached) and (not causal or inputs.documents_BL is not None):
        raise ValueError("a key/value cache needs plain causal attention")
    length, device = inputs.positions_BL.shape[1], inputs.positions_BL.device
    if isinstance(cached, Tensor):
        return Pattern(staggered_triangles(length, cached, device), is_causal=False)
    if cached:
        # SDPA's is_causal aligns the first query with the first key; cached keys come before the first query.
        return Pattern(None if length == 1 else lower_triangle(length, cached, device), is_causal=False)
    two_stream = inputs.attention is Attention.TWO_STREAM
    if (two_stream or inputs.documents_BL is not None) and flex_helps(device):
        return Pattern(None, is_causal=False, blocks=block_mask(inputs))
    if inputs.documents_BL is None:
        return Pattern(two_streams(length, inputs.noisy_length, device) if two_stream else None, is_causal=causal)
    allowed_B1LS = (inputs.documents_BL[:, :, None] == inputs.documents_BL[:, None, :])[:, None]
    if causal or two_stream:
        allowed_B1LS = allowed_B1LS & (two_streams(length, inputs.noisy_length, device) if two_stream else lower_triangle(length, 0, device))
    return Pattern(allowed_B1LS, is_causal=False)


def flex_helps(device: torch.device) -> bool:
    """FlexAttention is compiled for CUDA; on a CPU it has no backward pass, and a dense mask costs about the same as none."""
    return device.type == "cuda"


def block_mask(inputs: NetworkInput) -> Any:
    """FlexAttention's block mask of documents or two streams: pair by pair what the dense masks below hold."""
    from torch.nn.attention.flex_attention import create_block_mask

    (batch, length), device = inputs.positions_BL.shape, inputs.positions_BL.device
    documents_BL, attention = inputs.documents_BL, inputs.attention
    noisy = inputs.noisy_length if attention is Attention.TWO_STREAM else 0
    ahead = length - 2 * noisy  # the clean key of a noisy query's own place stands at query + noisy + ahead

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if attention is Attention.TWO_STREAM:
            from_noisy = (k == q) | ((k >= noisy) & (k - noisy < q + ahead))
            order = torch.where(q < noisy, from_noisy, (k >= noisy) & (k <= q))
        else:
            order = q >= k if attention is Attention.CAUSAL else q >= 0
        return order if documents_BL is None else order & (documents_BL[b, q] == documents_BL[b, k])

    return create_block_mask(allowed, batch if documents_BL is not None else None, None, length, length, device=str(device))


def scored_positions(x_BLD: Tensor, inputs: NetworkInput) -> Tensor:
    """The positions that have logits: all of them, or the first of two streams."""
    return x_BLD[:, : inputs.noisy_length] if inputs.attention is Attention.TWO_STREAM else x_BLD


def lower_triangle(length: int, cached: int, device: torch.device) -> Tensor:
    """[1, 1, L, cached + L]: query i sees the cached keys and new keys 0..i."""
    return torch.ones(length, cached + length, dtype=torch.bool, device=device).tril(cached)[None, None]


def staggered_triangles(length: int, cached_B: Tensor, device: torch.device) -> Tensor:
    """[B, 1, L, most cached + L]: query i of a sequence sees its own cached keys and new keys 0..i, which lie right after them."""
    key_S = torch.arange(int(cached_B.max()) + length, device=device)
    last_BL = cached_B.to(device)[:, None] + torch.arange(length, device=device)
    return (key_S <= last_BL[:, :, None])[:, None]


def two_streams(length: int, noisy: int, device: torch.device) -> Tensor:
    """[1, 1, L, L] for a noisy stream of `noisy` positions, the last of the order, and the clean one after it (`Attention.TWO_STREAM`).

    No query sees another noisy position: a clean one must not, or what it computes would differ from what a cache holds when sampling.
    """
    clean = length - noisy
    own = torch.eye(noisy, dtype=torch.bool, device=device)
    before = torch.ones(noisy, clean, dtype=torch.bool, device=device).tril(clean - noisy - 1)
    upto = torch.ones(clean, clean, dtype=torch.bool, device=device).tril()
    nothing = torch.zeros(clean, noisy, dtype=torch.bool, device=device)
    return torch.cat((torch.cat((own, before), 1), torch.cat((nothing, upto), 1)))[None, None]


def rotary_angles(positions_BL: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos_B1LR, sin_B1LR of position * base^(-2r / head_dim), in fp32 whatever the autocast (RoPE, Su et al. 2021)."""
    with torch.autocast(positions_BL.device.type, enabled=False):
        exponent_R = torch.arange(0, head_dim, 2, device=positions_BL.device).float() / head_dim
        angle_B1LR = positions_BL.float()[:, None, :, None] * (1.0 / base**exponent_R)
        return angle_B1LR.cos(), angle_B1LR.sin()


def rotate(x_BHLK: Tensor, cos_B1LR: Tensor, sin_B1LR: Tensor) -> Tensor:
    """Rotate the pairs (x_r, x_{r + R}) by their angle: the half-split layout, over the whole head width."""
    cos_B1LR, sin_B1LR = cos_B1LR.to(x_BHLK.dtype), sin_B1LR.to(x_BHLK.dtype)
    first_BHLR, second_BHLR = x_BHLK.chunk(2, dim=-1)
    return torch.cat((first_BHLR * cos_B1LR - second_BHLR * sin_B1LR, second_BHLR * cos_B1LR + first_BHLR * sin_B1LR), dim=-1)


def attend(q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, pattern: Pattern) -> Tensor:
    """softmax(q k^T / sqrt(K)) v under the pattern; query heads share key/value heads in consecutive runs of H / G."""
    if pattern.blocks is not None:
        return _flex_attention(q_BHLK.is_cuda)(q_BHLK, k_BGSK, v_BGSK, block_mask=pattern.blocks, enable_gqa=q_BHLK.shape[1] != k_BGSK.shape[1])
    return F.scaled_dot_product_attention(
        q_BHLK,
        k_BGSK,
        v_BGSK,
        attn_mask=pattern.allowed_B1LS,
        is_causal=pattern.is_causal,
        enable_gqa=q_BHLK.shape[1] != k_BGSK.shape[1],
    )


_COMPILED: dict[str, Callable[..., Tensor]] = {}


def _flex_attention(compiled: bool) -> Callable[..., Tensor]:
    """Compiled once per process on CUDA: without compilation FlexAttention materialises the scores."""
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    if "flex" not in _COMPILED:
        _COMPILED["flex"] = torch.compile(flex_attention)
    return _COMPILED["flex"]


class Cache(Protocol):
    """What a network asks of a cache: how much it holds, room for one layer's keys and values, and to be told when all layers are through."""

    @property
    def length(self) -> int | Tensor:
        """Positions that each sequence has read."""
        ...

    def extend(self, layer: int, k_BGLK: Tensor, v_BGLK: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, old and new."""
        ...

    def advance(self, positions: int) -> None:
        """Count positions as read."""
        ...


class KeyValueCache:
    """Rotated keys, and values, of the positions that a causal network has read; room for `capacity` of them.

    length  positions that each sequence has read: one number where it is the same for all, otherwise [B] on the CPU.
    """

    def __init__(self, *, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (layers, batch, kv_heads, capacity, head_dim)
        # Zeros: past the end of a shorter sequence attention multiplies what lies here by 0.
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self.length: int | Tensor = 0
        self._longest, self._batch = 0, batch
        self._start_B11 = torch.zeros(batch, 1, 1, dtype=torch.long, device=device)

    def rewind(self, length_B: Tensor) -> None:
        """Go on from the first `length_B` (on the CPU) positions of each sequence; later ones are forgotten, as are sequences past the last."""
        read = self.length if isinstance(self.length, int) else self.length[: len(length_B)]
        if len(length_B) > self._batch or bool((length_B > read).any()):
            raise ValueError("a cache can only be rewound to what it has read")
        self._batch, self._longest = len(length_B), int(length_B.max())
        self.length = self._longest if bool((length_B == self._longest).all()) else length_B
        self._start_B11 = length_B.to(self._keys.device)[:, None, None]

    def extend(self, layer: int, k_BGLK: Tensor, v_BGLK: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values after the `length` old ones; views of all of them.

        The views are as long as the longest sequence. Raises ValueError for more positions than there is room for, and for another number of
        sequences than the cache follows.
        """
        batch, new = k_BGLK.shape[0], k_BGLK.shape[2]
        end = self._longest + new
        if batch != self._batch or end > self._keys.shape[3]:
            raise ValueError(f"cache holds {self._keys.shape[3]} positions of {self._batch} sequences, asked to hold {end} of {batch}")
        keys_BGSK, values_BGSK = self._keys[layer, :batch, :, :end], self._values[layer, :batch, :, :end]
        if isinstance(self.length, int):
            keys_BGSK[:, :, self.length :] = k_BGLK
            values_BGSK[:, :, self.length :] = v_BGLK
        else:
            place_BGLK = (self._start_B11 + torch.arange(new, device=k_BGLK.device)).unsqueeze(-1).expand_as(k_BGLK)
            keys_BGSK.scatter_(2, place_BGLK, k_BGLK.to(keys_BGSK.dtype))
            values_BGSK.scatter_(2, place_BGLK, v_BGLK.to(values_BGSK.dtype))
        return keys_BGSK, values_BGSK

    def advance(self, positions: int) -> None:
        """Count `positions` of each sequence as read, once every layer has extended."""
        self.length = self.length + positions
        self._longest += positions
        self._start_B11 = self._start_B11 + positions
