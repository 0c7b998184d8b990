"""The plain networks against implementations by other hands, and against themselves where masks and caches must not matter."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import count_parameters
from pretrain.convert.param_map import network_config
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.network_input import Attention, NetworkInput

V = 50
DIT = NetworkConfig(kind="dit", vocab_size=V, hidden=32, layers=2, heads=4, kv_heads=4, ffn=64, cond_dim=16)
LLAMA = NetworkConfig(kind="llama", vocab_size=V, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, qk_norm=True)
BOTH = pytest.mark.parametrize("config", [DIT, LLAMA], ids=["dit", "llama"])
PATTERNS = pytest.mark.parametrize("attention", [Attention.CAUSAL, Attention.FULL])


def randomised(config: NetworkConfig, seed: int = 0) -> DiT | Llama:
    """A network with no zeros or ones left: AdaLN-Zero starts blind."""
    network = build_network(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.5 / math.sqrt(parameter.shape[-1])))
    return network.eval()


def inputs(ids_BL: Tensor, attention: Attention, **fields: Tensor) -> NetworkInput:
    defaults = {"positions_BL": torch.arange(ids_BL.shape[1]).expand_as(ids_BL), "conditioning_B": torch.full((len(ids_BL),), 0.7)}
    return NetworkInput(ids_BL=ids_BL, attention=attention, **{**defaults, **fields})


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_llama_equals_transformers(qk_norm: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": V, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }  # fmt: skip
    torch.manual_seed(0)
    stock = (Qwen3ForCausalLM(Qwen3Config(**shape)) if qk_norm else LlamaForCausalLM(LlamaConfig(**shape))).eval()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    config = NetworkConfig(kind="llama", vocab_size=V, hidden=48, layers=3, heads=6, kv_heads=2, ffn=80, qk_norm=qk_norm, rope_base=500.0)
    network = Llama(config)
    network.load_state_dict({name.removeprefix("model."): value for name, value in stock.state_dict().items()})
    ids_BL = torch.randint(V, (2, 17))
    positions_BL = torch.stack((torch.arange(17), torch.arange(17) * 3 + 5))
    with torch.no_grad():
        ours = network(inputs(ids_BL, Attention.CAUSAL, positions_BL=positions_BL))
        theirs = stock(ids_BL, position_ids=positions_BL).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_dit_equals_its_equations() -> None:
    """One sequence, one layer, head by head and position by position in float64, written from the paper's equations."""
    config = NetworkConfig(kind="dit", vocab_size=V, hidden=8, layers=1, heads=2, kv_heads=2, ffn=12, cond_dim=6)
    network = randomised(config).double()
    network.config = NetworkConfig(**{**vars(config), "fp32_residual": False})
    w = {name: value.detach() for name, value in network.named_parameters()}
    ids, positions, sigma = [3, 41, 3, 7], [0, 5, 2, 9], 1.3

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5) * weight

    def turn(x: Tensor, position: int) -> Tensor:
        pairs = torch.complex(x[:2], x[2:]) * torch.exp(1j * position * torch.tensor([1.0, 10000.0**-0.5], dtype=torch.float64))
        return torch.cat((pairs.real, pairs.imag))

    angles = torch.tensor([sigma * 10000 ** (-i / 128) for i in range(128)], dtype=torch.float64)
    c = torch.cat((angles.cos(), angles.sin()))
    for part in ("in_proj", "out_proj"):
        c = F.silu(w[f"time_embedding.{part}.weight"] @ c + w[f"time_embedding.{part}.bias"])
    m = (w["layers.0.modulation.weight"] @ c + w["layers.0.modulation.bias"]).split(8)
    x = [w["embed_tokens.weight"][i] for i in ids]
    h = [norm(row, w["layers.0.input_layernorm.weight"]) * (1 + m[1]) + m[0] for row in x]
    q, k, v = ([w[f"layers.0.self_attn.{p}_proj.weight"] @ row for row in h] for p in "qkv")
    out = []
    for i in range(4):
        heads = []
        for cut in (slice(0, 4), slice(4, 8)):
            scores = torch.stack([turn(q[i][cut], positions[i]) @ turn(k[j][cut], positions[j]) / 2 for j in range(4)])
            heads.append(sum(p * v[j][cut] for j, p in enumerate(scores.softmax(0))))
        row = x[i] + m[2] * (w["layers.0.self_attn.o_proj.weight"] @ torch.cat(heads))
        inner = w["layers.0.mlp.up_proj.weight"] @ (norm(row, w["layers.0.post_attention_layernorm.weight"]) * (1 + m[4]) + m[3])
        inner = F.gelu(inner + w["layers.0.mlp.up_proj.bias"], approximate="tanh")
        row = row + m[5] * (w["layers.0.mlp.down_proj.weight"] @ inner + w["layers.0.mlp.down_proj.bias"])
        shift, scale = (w["final_modulation.weight"] @ c + w["final_modulation.bias"]).split(8)
        out.append(w["lm_head.weight"] @ (norm(row, w["norm.weight"]) * (1 + scale) + shift) + w["lm_head.bias"])
    given = inputs(torch.tensor([ids]), Attention.FULL, positions_BL=torch.tensor([positions]), conditioning_B=torch.tensor([sigma]))
    # The norms and the time embedding round to fp32 by design.
    torch.testing.assert_close(network(given)[0], torch.stack(out), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [32001, 131072])
def test_parameter_count_of_the_paper(rows: int) -> None:
    """The 2121M DiT: 1,778.5M parameters at 32,001 classes and 2,209.7M at 131,072."""
    backbone = BackboneConfig(kind="dit", hidden=2176, layers=28, heads=17)
    with torch.device("meta"):
        network = build_network(network_config(backbone, rows))
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == count_parameters(backbone, rows)
    assert round(count / 1e6, 1) == {32001: 1778.5, 131072: 2209.7}[rows]


def test_llama_parameter_count() -> None:
    backbone = BackboneConfig(kind="llama", hidden=64, layers=3, heads=8, kv_heads=2, ffn=96, qk_norm=True)
    with torch.device("meta"):
        network = build_network(network_config(backbone, 300))
    assert sum(parameter.numel() for parameter in network.parameters()) == count_parameters(backbone, 300)


@BOTH
@PATTERNS
def test_documents_do_not_see_each_other(config: NetworkConfig, attention: Attention) -> None:
    """Eight documents alone, packed under document masks, and padded: the same logits."""
    network = randomised(config)
    lengths = [1, 9, 4, 7, 2, 12, 3, 5]
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(V, (n,), generator=generator) for n in lengths]
    alone = [network(inputs(text[None], attention))[0] for text in texts]
    packed = network(
        inputs(
            torch.cat(texts)[None],
            attention,
            positions_BL=torch.cat([torch.arange(n) for n in lengths])[None],
            documents_BL=torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))[None],
        )
    )[0].split(lengths)
    width = max(lengths)
    padded_ids = torch.stack([F.pad(text, (0, width - len(text)), value=13) for text in texts])
    documents_BL = torch.stack([F.pad(torch.zeros(n, dtype=torch.int32), (0, width - n), value=-1) for n in lengths])
    padded = network(inputs(padded_ids, attention, documents_BL=documents_BL))
    assert torch.isfinite(padded).all()
    for i, n in enumerate(lengths):
        torch.testing.assert_close(packed[i], alone[i], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(padded[i, :n], alone[i], rtol=1e-5, atol=1e-5)


@BOTH
def test_patterns_hide_what_they_should(config: NetworkConfig) -> None:
    network = randomised(config)
    ids_BL = torch.randint(V - 1, (1, 10), generator=torch.Generator().manual_seed(2))
    changed_BL = ids_BL.clone()
    changed_BL[0, 6] += 1
    for attention, first in ((Attention.CAUSAL, 6), (Attention.FULL, 0)):
        moved_L = (network(inputs(ids_BL, attention)) - network(inputs(changed_BL, attention))).abs().amax(-1)[0] > 1e-6
        assert moved_L.tolist() == [i >= first for i in range(10)]


@BOTH
@pytest.mark.parametrize("pieces", [[1] * 11, [4, 1, 6], [3, 8]], ids=str)
def test_cached_logits_equal_uncached(config: NetworkConfig, pieces: list[int]) -> None:
    network = randomised(config)
    ids_BL = torch.randint(V, (3, 11), generator=torch.Generator().manual_seed(3))
    whole = inputs(ids_BL, Attention.CAUSAL)
    expected = network(whole)
    cache = network.new_cache(3, 11)
    got = []
    for ids, positions in zip(ids_BL.split(pieces, 1), whole.positions_BL.split(pieces, 1), strict=True):
        got.append(network(inputs(ids, Attention.CAUSAL, positions_BL=positions), cache))
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-5, atol=1e-5)


@BOTH
def test_bf16_weights_keep_an_fp32_residual_stream(config: NetworkConfig) -> None:
    network = randomised(config)
    given = inputs(torch.randint(V, (2, 16), generator=torch.Generator().manual_seed(4)), Attention.FULL)
    exact = network(given)
    low = network.bfloat16()
    assert low.features(given).dtype == torch.float32
    logits = low(given)
    assert logits.dtype == torch.bfloat16
    assert F.cosine_similarity(logits.float().flatten(), exact.flatten(), dim=0) > 0.999


def test_gradients_reach_every_parameter() -> None:
    for config in (DIT, LLAMA):
        network = randomised(config)
        network(inputs(torch.arange(V)[None], Attention.FULL)).square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())
