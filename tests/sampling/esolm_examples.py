"""Small networks and requests for the tests of Eso-LM's samplers.

Shape suffixes: B sequences, L positions.
"""

from typing import Literal

import torch
from torch import Tensor

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
