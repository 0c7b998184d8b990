"""HF -> checkpoint -> HF is the identity, bit for bit, for any shape of network, through tensor-parallel pieces, own format and stock classes."""

import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from pretrain.backbones.config import BackboneConfig
from pretrain.checkpoint.reshape import LogicalFolder
from pretrain.convert.hub_folder import HubFolder
from pretrain.convert.hub_import import write_hub_logical
from pretrain.convert.param_map import ParameterMap, network_config
from pretrain.convert.stock import stock_name
from pretrain.hf_model.modeling_network import build_network
from pretrain.parallel.vocabulary import Vocabulary


@st.composite
def networks(draw: st.DrawFn) -> tuple[BackboneConfig, Vocabulary, int]:
    """A network, a padded vocabulary, and over how many tensor-parallel ranks it is cut."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    groups, share = ranks * draw(st.integers(1, 2)), draw(st.integers(1, 3))
    llama = draw(st.booleans())
    multiple = ranks * draw(st.sampled_from([1, 8]))
    backbone = BackboneConfig(
        kind="llama" if llama else "dit", hidden=groups * share * draw(st.sampled_from([2, 4])), layers=draw(st.integers(1, 4)), heads=groups * share,
        kv_heads=groups if llama else None, ffn=ranks * draw(st.integers(1, 5)), qk_norm=llama and draw(st.booleans()),
        cond_dim=draw(st.integers(1, 4)) if not llama else 128, vocab_multiple=multiple,
    )  # fmt: skip
    size = draw(st.integers(2, 40))
    return backbone, Vocabulary(tokenizer_size=size, model_size=size, padded_size=Vocabulary.padded(size, multiple), mask_id=None, eos_id=0), ranks


def own_folder(folder: Path, backbone: BackboneConfig, size: int) -> dict[str, Tensor]:
    """An export with random weights, without its code; the weights under the plain network's names."""
    plain = {name: torch.randn(value.shape) for name, value in build_network(network_config(backbone, size)).state_dict().items()}
    save_file({f"network.{name}": value for name, value in plain.items()}, folder / "model.safetensors")
    found = {
        "model_type": "pretrain_language_model", "objective": "ar", "backbone": backbone.kind, "vocab_size": size, "tokenizer_size": size,
        "mask_token_id": None, "hidden_size": backbone.hidden, "num_hidden_layers": backbone.layers, "num_attention_heads": backbone.heads,
        "num_key_value_heads": backbone.kv_groups, "intermediate_size": backbone.ffn_width, "qk_norm": backbone.qk_norm,
        "cond_dim": backbone.cond_dim, "rope_base": 10000.0, "rope_layout": "half_split", "norm_eps": 1e-5, "low_variance": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(found))
    return plain


def stock_folder(folder: Path, backbone: BackboneConfig, size: int, *, tied: bool) -> dict[str, Tensor]:
    """A Llama or Qwen3 as `transformers` would save it, in two files with an index."""
    plain = {name: torch.randn(value.shape) for name, value in build_network(network_config(backbone, size)).state_dict().items()}
    if tied:
        plain["lm_head.weight"] = plain["embed_tokens.weight"]
    named = [(stock_name(name), value) for name, value in plain.items() if not (tied and name == "lm_head.weight")]
    places = {}
    for number, part in enumerate((named[::2], named[1::2])):
        save_file({name: value.clone() for name, value in part}, folder / f"part{number}.safetensors")
        places |= {name: f"part{number}.safetensors" for name, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = {
        "architectures": ["Qwen3ForCausalLM" if backbone.qk_norm else "LlamaForCausalLM"], "vocab_size": size, "hidden_size": backbone.hidden,
        "num_hidden_layers": backbone.layers, "num_attention_heads": backbone.heads, "num_key_value_heads": backbone.kv_groups,
        "intermediate_size": backbone.ffn_width, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(found))
    return plain


@settings(max_examples=25, deadline=None)
@given(networks(), st.booleans(), st.booleans())
def test_round_trips_are_bitwise(network: tuple[BackboneConfig, Vocabulary, int], stock: bool, tied: bool) -> None:
    backbone, vocabulary, ranks = network
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if stock and backbone.kind == "llama":
            plain = stock_folder(folder, backbone, vocabulary.model_size, tied=tied)
        else:
            plain = own_folder(folder, backbone, vocabulary.model_size)
        hub = HubFolder.open(folder)
        assert (hub.backbone.kv_groups, hub.backbone.qk_norm, hub.model_size) == (backbone.kv_groups, backbone.qk_norm, vocabulary.model_size)
        write_hub_logical(hub, backbone, vocabulary, folder / "logical")
        logical, mapping = LogicalFolder.open(folder / "logical"), ParameterMap(backbone, vocabulary.model_size)
        back = {}
        for name, spec in logical.table.items():
            pieces = [logical.shard(name, "fp32", ranks, rank) for rank in range(ranks)]
            assert spec.axis is None or {tuple(piece.shape) for piece in pieces} == {spec.local_shape(ranks)}
            whole = spec.unshard(pieces)
            back |= mapping.split(name, whole)
            if mapping.rows[name].form == "padded":
                assert not whole[vocabulary.model_size :].any()
        assert back.keys() == plain.keys()
        assert all(torch.equal(back[name], plain[name]) for name in plain)


def test_rows_of_a_padded_hub_vocabulary_are_dropped(tmp_path: Path) -> None:
    backbone = BackboneConfig(kind="llama", hidden=8, layers=1, heads=2, ffn=4, vocab_multiple=4)
    plain = stock_folder(tmp_path, backbone, 32, tied=False)
    vocabulary = Vocabulary(tokenizer_size=10, model_size=10, padded_size=12, mask_id=None, eos_id=0)
    write_hub_logical(HubFolder.open(tmp_path), backbone, vocabulary, tmp_path / "logical")
    head = LogicalFolder.open(tmp_path / "logical").shard("head.weight", "fp32", 1, 0)
    assert torch.equal(head[:10], plain["lm_head.weight"][:10]) and head.shape == (12, 8) and not head[10:].any()
