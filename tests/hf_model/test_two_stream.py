"""Two-stream attention: what a prediction depends on, by gradient, and the same predictions from plain causal attention, one by one.

Shape suffixes: B sequences, L positions of one stream, V vocabulary.
"""

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from pretrain.hf_model.attention_patterns import attention_pattern
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.network_input import Attention, NetworkInput

V, L, MASK = 50, 9, 49
BOTH = pytest.mark.parametrize(
    "config",
    [
        NetworkConfig(kind="dit", vocab_size=V, hidden=32, layers=3, heads=4, kv_heads=4, ffn=64, cond_dim=16),
        NetworkConfig(kind="llama", vocab_size=V, hidden=32, layers=3, heads=4, kv_heads=2, ffn=48, qk_norm=True),
    ],
    ids=["dit", "llama"],
)
DOCUMENTS = torch.tensor([[1, 0, 0, 1, 2, 1, 0, -1, -1]], dtype=torch.int32)


def randomised(config: NetworkConfig) -> DiT | Llama:
    """A network with no zeros or ones left: AdaLN-Zero starts blind."""
    network, generator = build_network(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.5 / math.sqrt(parameter.shape[-1])))
    return network.eval()


def two_streams(z_BL: Tensor, x_BL: Tensor, positions_BL: Tensor, documents_BL: Tensor | None = None) -> NetworkInput:
    return NetworkInput(
        ids_BL=torch.cat((z_BL, x_BL), 1),
        positions_BL=torch.cat((positions_BL, positions_BL), 1),
        conditioning_B=torch.zeros(len(z_BL)),
        attention=Attention.TWO_STREAM,
        documents_BL=None if documents_BL is None else torch.cat((documents_BL, documents_BL), 1),
    )


def depends_on(network: DiT | Llama, inputs: NetworkInput, i: int) -> set[int]:
    """Positions of both streams whose embeddings move the logits at `i`. Every position holds another id, so a row of the table is one of them."""
    network.zero_grad()
    logits_LV = network(inputs)[0]
    assert logits_LV.shape == (L, V)
    logits_LV[i].square().sum().backward()
    gradient_VD, ids = network.embed_tokens.weight.grad, inputs.ids_BL
    assert gradient_VD is not None and ids is not None and len(set(ids[0].tolist())) == 2 * L
    return set((gradient_VD[ids[0]] != 0).any(-1).nonzero().flatten().tolist())


@BOTH
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_a_prediction_depends_on_itself_and_earlier_clean_tokens_only(config: NetworkConfig, documents: bool) -> None:
    """Not on x at or after its place in the order, nor on another position of z; and on everything that it may depend on."""
    network = randomised(config)
    ids, positions_BL = torch.randperm(V, generator=torch.Generator().manual_seed(1))[: 2 * L], torch.randperm(L)[None]
    inputs = two_streams(ids[None, :L], ids[None, L:], positions_BL, DOCUMENTS if documents else None)
    same = (DOCUMENTS[0][:, None] == DOCUMENTS[0][None, :]).tolist()
    for i in range(L):
        assert depends_on(network, inputs, i) == {i, *(L + j for j in range(i) if not documents or same[i][j])}


@BOTH
def test_each_prediction_is_that_of_causal_attention_after_its_clean_prefix(config: NetworkConfig) -> None:
    """The whole of L_AO in one pass equals L passes over [clean tokens so far, one mask], which is how a sampler asks."""
    network, generator = randomised(config), torch.Generator().manual_seed(2)
    x_BL = torch.randint(V - 1, (2, L), generator=generator)
    positions_BL = torch.stack([torch.randperm(40, generator=generator)[:L] for _ in range(2)])
    at_once = network(two_streams(torch.full_like(x_BL, MASK), x_BL, positions_BL))
    for i in range(L):
        ids_BL = torch.cat((x_BL[:, :i], torch.full((2, 1), MASK)), 1)
        alone = NetworkInput(ids_BL=ids_BL, positions_BL=positions_BL[:, : i + 1], conditioning_B=torch.zeros(2), attention=Attention.CAUSAL)
        torch.testing.assert_close(network(alone)[:, -1], at_once[:, i], rtol=1e-5, atol=1e-5)


@BOTH
def test_documents_in_any_order_do_not_see_each_other(config: NetworkConfig) -> None:
    """Interleaved documents and padding: each as it is alone, and nothing that is not finite."""
    network, generator = randomised(config), torch.Generator().manual_seed(3)
    z_BL, x_BL = torch.randint(V, (2, 1, L), generator=generator)
    positions_BL = torch.randperm(L, generator=generator)[None]
    together = network(two_streams(z_BL, x_BL, positions_BL, DOCUMENTS))
    assert torch.isfinite(together).all()
    for document in (0, 1, 2):
        own = DOCUMENTS[0] == document
        alone = network(two_streams(z_BL[:, own], x_BL[:, own], positions_BL[:, own]))
        torch.testing.assert_close(together[:, own], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("documents_BL", [None, DOCUMENTS, torch.zeros(2, L, dtype=torch.int32)], ids=["none", "some", "one"])
def test_pattern_against_a_loop(documents_BL: Tensor | None) -> None:
    ids_BL = torch.zeros(1 if documents_BL is None else len(documents_BL), L, dtype=torch.long)
    inputs = two_streams(ids_BL, ids_BL, ids_BL, documents_BL)
    pattern = attention_pattern(inputs)
    assert pattern.allowed_B1LS is not None and not pattern.is_causal
    allowed_BLS = pattern.allowed_B1LS[:, 0].expand(len(ids_BL), -1, -1)

    def may(query: int, key: int) -> bool:
        if query < L:
            return key == query or L <= key < L + query
        return L <= key <= query

    for b, q, k in triples(len(ids_BL)):
        same = inputs.documents_BL is None or bool(inputs.documents_BL[b, q] == inputs.documents_BL[b, k])
        assert bool(allowed_BLS[b, q, k]) == (may(q, k) and same)


def triples(batch: int) -> Iterable[tuple[int, int, int]]:
    return ((b, q, k) for b in range(batch) for q in range(2 * L) for k in range(2 * L))


def test_odd_lengths_and_caches_are_programming_errors() -> None:
    ids_BL = torch.zeros(1, 5, dtype=torch.long)
    odd = NetworkInput(ids_BL=ids_BL, positions_BL=ids_BL, conditioning_B=torch.zeros(1), attention=Attention.TWO_STREAM)
    with pytest.raises(ValueError, match="even number of positions, got 5"):
        attention_pattern(odd)
    with pytest.raises(ValueError, match="plain causal"):
        attention_pattern(two_streams(ids_BL, ids_BL, ids_BL), cached=1)
