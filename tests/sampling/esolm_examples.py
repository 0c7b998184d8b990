"""Small networks and requests for the tests of Eso-LM's samplers, and a causal network that is a table.

Shape suffixes: B sequences, L positions, R sequences and Q positions of a window, S keys, K all ids.
"""

from typing import Literal

import torch
from torch import Tensor

from pretrain.hf_model.attention_patterns import KeyValueCache, attention_pattern
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_network import Request


def request(names: int | Tensor, *, law: TokenLaw, seed: int = 1) -> Request:
    assert law.mask_id is not None
    sequences_B = torch.arange(names) if isinstance(names, int) else names
    return Request(law=law, vocab_size=law.mask_id + 1, seed=seed, sequences_B=sequences_B)


def real(kind: Literal["dit", "llama"], mask_id: int) -> DiT | Llama:
    """Two layers with no zeros left."""
    kv_heads = 2 if kind == "dit" else 1
    config = NetworkConfig(kind=kind, vocab_size=mask_id + 1, hidden=16, layers=2, heads=2, kv_heads=kv_heads, ffn=32, cond_dim=8)
    network, generator = build_network(config), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter == 1))
    return network.eval()


def causal(ids_BL: Tensor, positions_BL: Tensor) -> NetworkInput:
    return NetworkInput(ids_BL=ids_BL, positions_BL=positions_BL, conditioning_B=torch.zeros(len(ids_BL)), attention=Attention.CAUSAL)


class CausalTable:
    """Looks up what is known: the clean tokens that attention shows. Ids and positions take the place of keys in an ordinary cache.

    table  [K, …, K, L, K]: scores of the token at each position, for every state of the L positions; the last id is the mask.
    ahead  1: a position says what follows it, as in autoregression.
    """

    def __init__(self, table: Tensor, ahead: int = 0) -> None:
        self.table, self.ahead, self.length, self.mask = table, ahead, table.shape[-2], table.shape[-1] - 1

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        one = {"layers": 1, "kv_heads": 1, "head_dim": 1}
        return KeyValueCache(batch=batch, capacity=capacity, dtype=torch.long, device=torch.device("cpu"), **one)

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        assert inputs.ids_BL is not None and cache is not None
        (rows, width), old = inputs.ids_BL.shape, cache.length
        ids_R1SK, places_R1SK = cache.extend(0, inputs.ids_BL[:, None, :, None], inputs.positions_BL[:, None, :, None])
        pattern, seen = attention_pattern(inputs, old), torch.ones(rows, width, ids_R1SK.shape[2], dtype=torch.bool)
        if pattern.allowed_B1LS is not None:
            seen = pattern.allowed_B1LS[:, 0].expand_as(seen)
        allowed_RQS = seen.tril() if pattern.is_causal else seen
        z_RQL = torch.full((rows, width, self.length), self.mask)
        for s in range(ids_R1SK.shape[2]):
            clean_RQ = allowed_RQS[..., s] & (ids_R1SK[:, 0, s] != self.mask)
            place_RQ1 = places_R1SK[:, 0, s, :, None].expand(rows, width, 1)
            kept_RQ1 = torch.where(clean_RQ[..., None], ids_R1SK[:, 0, s, :, None], z_RQL.gather(2, place_RQ1))
            z_RQL.scatter_(2, place_RQ1, kept_RQ1)
        cache.advance(width)
        asked_RQ = (inputs.positions_BL + self.ahead).clamp(max=self.length - 1)
        return self.table[(*z_RQL.unbind(-1), asked_RQ)]

    def logits(self, features: Tensor) -> Tensor:
        return features
