"""A key/value cache whose sequences have read different numbers of positions, against the same positions read at once without a cache.

Shape suffixes: B sequences, L positions, V vocabulary.
"""

import math

import pytest
import torch
from torch import Tensor

from pretrain.hf_model.attention_patterns import KeyValueCache, attention_pattern
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.network_input import Attention, NetworkInput

V, L = 23, 12
BOTH = pytest.mark.parametrize(
    "config",
    [
        NetworkConfig(kind="dit", vocab_size=V, hidden=32, layers=3, heads=4, kv_heads=4, ffn=64, cond_dim=16),
        NetworkConfig(kind="llama", vocab_size=V, hidden=32, layers=3, heads=4, kv_heads=2, ffn=48, qk_norm=True),
    ],
    ids=["dit", "llama"],
)


def randomised(config: NetworkConfig) -> DiT | Llama:
    """A network with no zeros or ones left: AdaLN-Zero starts blind."""
    network, generator = build_network(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.5 / math.sqrt(parameter.shape[-1])))
    return network.eval()


def causal(ids_BL: Tensor, positions_BL: Tensor) -> NetworkInput:
    return NetworkInput(ids_BL=ids_BL, positions_BL=positions_BL, conditioning_B=torch.zeros(len(ids_BL)), attention=Attention.CAUSAL)


@BOTH
@torch.no_grad()
def test_logits_after_rewinding_each_sequence_to_its_own_length(config: NetworkConfig) -> None:
    """Read on from different numbers, forget what was read and read other tokens in its place; then fewer sequences; then all of one length."""
    network, generator = randomised(config), torch.Generator().manual_seed(1)
    ids_BL, other_BL = torch.randint(V, (2, 4, L), generator=generator)
    positions_BL = torch.stack([torch.randperm(40, generator=generator)[:L] for _ in range(4)])
    expected_BLV = network(causal(ids_BL, positions_BL))
    cache = network.new_cache(4, L)

    def read(source_BL: Tensor, starts: list[int], width: int, *, rewind: bool = True) -> Tensor:
        if rewind:
            cache.rewind(torch.tensor(starts))
        index_BL = torch.tensor(starts)[:, None] + torch.arange(width)
        return network(causal(source_BL[: len(starts)].gather(1, index_BL), positions_BL[: len(starts)].gather(1, index_BL)), cache)

    def check(starts: list[int], width: int, *, rewind: bool = True) -> None:
        got_BLV = read(ids_BL, starts, width, rewind=rewind)
        want_BLV = torch.stack([expected_BLV[b, start : start + width] for b, start in enumerate(starts)])
        torch.testing.assert_close(got_BLV, want_BLV, rtol=1e-5, atol=1e-5)

    check([0, 0, 0, 0], 5)
    check([5, 2, 0, 4], 2)
    check([7, 4, 2, 6], 1, rewind=False)
    assert isinstance(cache.length, Tensor) and cache.length.tolist() == [8, 5, 3, 7]
    read(other_BL, [8, 5, 3, 7], 4)
    check([8, 5, 3, 7], 2)
    check([10, 7, 5], 1)
    check([11, 8], 1)
    check([9, 9], 3)
    assert cache.length == 12


def test_staggered_pattern_against_a_loop() -> None:
    cached, length = torch.tensor([3, 0, 5]), 4
    given = causal(torch.zeros(3, length, dtype=torch.long), torch.zeros(3, length, dtype=torch.long))
    pattern = attention_pattern(given, cached)
    assert pattern.allowed_B1LS is not None and not pattern.is_causal and pattern.allowed_B1LS.shape == (3, 1, length, 9)
    for b, start in enumerate(cached.tolist()):
        for query in range(length):
            assert pattern.allowed_B1LS[b, 0, query].tolist() == [key <= start + query for key in range(9)]


def test_misuse_is_a_programming_error() -> None:
    cache = KeyValueCache(layers=1, batch=2, kv_heads=1, capacity=4, head_dim=2, dtype=torch.float32, device=torch.device("cpu"))

    def read(batch: int, new: int) -> None:
        cache.extend(0, torch.zeros(batch, 1, new, 2), torch.zeros(batch, 1, new, 2))
        cache.advance(new)

    with pytest.raises(ValueError, match="holds 4 positions of 2 sequences, asked to hold 5 of 2"):
        read(2, 5)
    with pytest.raises(ValueError, match="asked to hold 1 of 3"):
        read(3, 1)
    read(2, 2)
    for lengths in ([3, 1], [1, 1, 1]):
        with pytest.raises(ValueError, match="only be rewound to what it has read"):
            cache.rewind(torch.tensor(lengths))
    cache.rewind(torch.tensor([2, 1]))
    with pytest.raises(ValueError, match="asked to hold 5 of 2"):
        read(2, 3)
    with pytest.raises(ValueError, match="only be rewound to what it has read"):
        cache.rewind(torch.tensor([2, 2]))
    cache.rewind(torch.tensor([1]))
    with pytest.raises(ValueError, match="only be rewound"):
        cache.rewind(torch.tensor([1, 1]))
    documents = NetworkInput(
        positions_BL=torch.zeros(2, 1), conditioning_B=torch.zeros(2), attention=Attention.CAUSAL, documents_BL=torch.zeros(2, 1)
    )
    with pytest.raises(ValueError, match="plain causal"):
        attention_pattern(documents, torch.tensor([0, 1]))
