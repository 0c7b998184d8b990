"""The parameter map: complete, invertible, and in megatron-core's row order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import parameter_table
from pretrain.convert.param_map import ParameterMap, network_config
from pretrain.hf_model.modeling_network import build_network


@st.composite
def shapes(draw: st.DrawFn) -> tuple[BackboneConfig, int]:
    kind = draw(st.sampled_from(["dit", "llama"]))
    groups, share = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    llama = kind == "llama"
    config = BackboneConfig(
        kind=kind,
        hidden=groups * share * draw(st.sampled_from([2, 4])),
        layers=draw(st.integers(1, 3)),
        heads=groups * share,
        kv_heads=groups if llama else None,
        ffn=draw(st.sampled_from([None, 6, 10])),
        qk_norm=llama and draw(st.booleans()),
        cond_dim=draw(st.integers(1, 4)),
        vocab_multiple=draw(st.sampled_from([1, 8, 16])),
    )
    return config, draw(st.integers(1, 40))


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_round_trips_are_bitwise(shape: tuple[BackboneConfig, int]) -> None:
    config, model_size = shape
    mapping = ParameterMap(config, model_size)
    network = build_network(network_config(config, model_size))
    plain = {name: torch.randn(value.shape) for name, value in network.state_dict().items()}
    logical = mapping.to_logical(plain)
    table = parameter_table(config, mapping.padded_size)
    assert {name: tuple(value.shape) for name, value in logical.items()} == {name: spec.shape for name, spec in table.items()}
    again = mapping.to_plain(logical)
    assert again.keys() == plain.keys()
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert sum(value.numel() for value in plain.values()) == sum(s.size for s in parameter_table(config, model_size).values())
    back = mapping.to_logical(again)
    assert all(torch.equal(back[name], logical[name]) for name in logical)
    network.load_state_dict(again, strict=True)


def test_fused_rows_have_megatron_order() -> None:
    """2 groups of 2 query heads, 2 rows a head: row r of the fused matrix is filled with r."""
    config = BackboneConfig(kind="llama", hidden=8, layers=1, heads=4, kv_heads=2, ffn=3, vocab_multiple=4)
    mapping = ParameterMap(config, 6)
    rows = torch.arange(16.0)[:, None].expand(16, 8)
    pieces = mapping.split("layers.0.self_attention.linear_qkv.weight", rows)
    assert [piece[:, 0].int().tolist() for piece in pieces.values()] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    gate, up = mapping.split("layers.0.mlp.linear_fc1.weight", torch.arange(6.0)[:, None].expand(6, 8)).values()
    assert gate[:, 0].tolist() == [0, 1, 2] and up[:, 0].tolist() == [3, 4, 5]


def test_padding_rows_are_dropped_and_come_back_as_zeros() -> None:
    config = BackboneConfig(kind="dit", hidden=4, layers=1, heads=2, vocab_multiple=8)
    mapping = ParameterMap(config, 5)
    (piece,) = mapping.split("head.bias", torch.arange(8.0)).values()
    assert piece.tolist() == [0, 1, 2, 3, 4]
    assert mapping.join("head.bias", lambda name: piece).tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_wrong_tensors_are_refused() -> None:
    mapping = ParameterMap(BackboneConfig(kind="dit", hidden=4, layers=1, heads=2, vocab_multiple=8), 5)
    with pytest.raises(ValueError, match="head.bias has shape"):
        mapping.split("head.bias", torch.zeros(5))
    with pytest.raises(ValueError, match="missing or unknown"):
        mapping.to_plain({"head.bias": torch.zeros(8)})
    with pytest.raises(ValueError, match="missing or unknown"):
        mapping.to_logical({"lm_head.bias": torch.zeros(5)})
