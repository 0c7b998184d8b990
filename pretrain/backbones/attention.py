"""Core attention for megatron-core's SelfAttention: scaled_dot_product_attention, or FlexAttention for document masks on CUDA.

Shape suffixes: L positions, B sequences, H query heads of this rank, G key/value heads of this rank, K head width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.hf_model.network_input import Attention

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def order_function(attention: Attention, length: int, noisy: int = 0) -> Callable[[Tensor, Tensor], Tensor] | None:
    """(query, key) -> may the query see the key as far as their places go; None: always.

    length  of the whole sequence; noisy: how much of it is the noisy stream, where there are two.
    """
    if attention is Attention.FULL:
        return None
    if attention is Attention.CAUSAL:
        return lambda q, k: q >= k
    ahead = length - noisy  # a noisy query's own place in the clean stream lies this far behind it
    # A noisy query sees itself and the clean tokens before it; a clean one sees the clean tokens up to itself.
    return lambda q, k: ((q < noisy) & ((k == q) | ((k >= noisy) & (k < q + ahead)))) | ((q >= noisy) & (k >= noisy) & (k <= q))


def mask_function(attention: Attention, documents_BL: Tensor, noisy: int = 0) -> MaskFunction:
    """(batch, head, query, key) -> may the query see the key: same document number, and in an order that the pattern allows."""
    order = order_function(attention, documents_BL.shape[1], noisy)

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = documents_BL[b, q] == documents_BL[b, k]
        return same if order is None else same & order(q, k)

    return allowed


def dense_mask(attention: Attention, documents_BL: Tensor, noisy: int = 0) -> Tensor:
    """bool [B, 1, L, L] of `mask_function` over all pairs."""
    mask = documents_BL[:, :, None] == documents_BL[:, None, :]
    order = order_function(attention, documents_BL.shape[1], noisy)
    if order is not None:
        place = torch.arange(documents_BL.shape[1], device=documents_BL.device)
        mask = mask & order(place[:, None], place[None, :])
    return mask[:, None]


class Masks:
    """Masks of the last micro-batch's documents, made once and shared by the layers of a chunk.

    Two streams are told by a third axis, as long as the noisy one: their documents come as [B, L, noisy], expanded, not copied. (Recomputed
    layers get the tensor again and nothing else.)
    """

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self._documents: Tensor | None = None
        self._mask: Any = None

    def of(self, documents: Tensor) -> Any:
        """A dense bool mask on CPU, a FlexAttention block mask on CUDA."""
        if self._documents is not documents:
            self._documents, self._mask = documents, self._make(documents)
        return self._mask

    def _make(self, documents: Tensor) -> Any:
        attention, noisy, documents_BL = self.attention, 0, documents
        if documents.dim() == 3:
            attention, noisy, documents_BL = Attention.TWO_STREAM, documents.shape[2], documents[:, :, 0]
        if not documents_BL.is_cuda:
            return dense_mask(attention, documents_BL, noisy)
        from torch.nn.attention.flex_attention import create_block_mask

        batch, length = documents_BL.shape
        return create_block_mask(mask_function(attention, documents_BL, noisy), batch, None, length, length, device=documents_BL.device)


class CoreAttention(nn.Module):
    """What megatron-core calls between the query-key-value projection (after RoPE) and the output projection.

    `attention_mask` carries the documents (an integer tensor survives megatron-core's activation recomputation, a block mask would not).
    """

    _flex: Callable[..., Tensor] | None = None

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, masks: Masks, **_: Any) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, q_LBHK: Tensor, k_LBGK: Tensor, v_LBGK: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        q_BHLK, k_BGLK, v_BGLK = (x.permute(1, 2, 0, 3) for x in (q_LBHK, k_LBGK, v_LBGK))
        grouped = q_BHLK.shape[1] != k_BGLK.shape[1]
        if attention_mask is None:
            causal = self.masks.attention is Attention.CAUSAL
            out_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BGLK, v_BGLK, is_causal=causal, enable_gqa=grouped)
        elif q_BHLK.is_cuda:
            out_BHLK = self._flex_attention()(q_BHLK, k_BGLK, v_BGLK, block_mask=self.masks.of(attention_mask), enable_gqa=grouped)
        else:
            out_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BGLK, v_BGLK, attn_mask=self.masks.of(attention_mask), enable_gqa=grouped)
        return out_BHLK.permute(2, 0, 1, 3).flatten(2)

    @classmethod
    def _flex_attention(cls) -> Callable[..., Tensor]:
        """Compiled once per process: without compilation FlexAttention materialises the scores."""
        if CoreAttention._flex is None:
            from torch.nn.attention.flex_attention import flex_attention

            CoreAttention._flex = torch.compile(flex_attention, dynamic=False)
        return CoreAttention._flex
