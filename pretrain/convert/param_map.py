"""One map between the training backbone's parameters and the plain network's, used in both directions.

A row of the tables below says which tensors of the plain network make up one logical tensor of training, and how: unchanged, with the
vocabulary's padding rows added, as fused query-key-value rows, or as stacked halves. Nothing else in the project knows both sets of names.

Letters: H query heads, G key/value heads, K head width, V model vocabulary, P padded vocabulary, D width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import parameter_table
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.parallel.vocabulary import Vocabulary

Form = Literal["same", "padded", "qkv", "stacked"]


@dataclass(frozen=True)
class Row:
    """One logical tensor of training (`logical`) and the tensors of the plain network that make it up (`plain`), in order."""

    logical: str
    plain: tuple[str, ...]
    form: Form = "same"


_ATTENTION = (
    Row("self_attention.linear_qkv.weight", ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"), "qkv"),
    Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    Row("input_layernorm.weight", ("input_layernorm.weight",)),
    Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
)
_QK_NORM = (
    Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
_LAYER: dict[str, tuple[Row, ...]] = {
    "dit": (
        *_ATTENTION,
        Row("modulation.weight", ("modulation.weight",)),
        Row("modulation.bias", ("modulation.bias",)),
        Row("mlp.linear_fc1.weight", ("mlp.up_proj.weight",)),
        Row("mlp.linear_fc1.bias", ("mlp.up_proj.bias",)),
        Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
        Row("mlp.linear_fc2.bias", ("mlp.down_proj.bias",)),
    ),
    "llama": (
        *_ATTENTION,
        Row("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "stacked"),
        Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    ),
}
_INPUTS: dict[str, tuple[Row, ...]] = {
    "tokens": (Row("embedding.weight", ("embed_tokens.weight",), "padded"),),
    "digits": (Row("embedding.weight", ("embed_tokens.weight",)),),
    "latents": (
        Row("embedding.latent.weight", ("embed_tokens.latent.weight",)),
        Row("embedding.estimate.weight", ("embed_tokens.estimate.weight",)),
        Row("embedding.gamma.weight", ("embed_tokens.noise.weight",)),
    ),
}
_PROMPT = Row("embedding.prompt.weight", ("embed_tokens.prompt.weight",), "padded")
_ENDS = (
    Row("final_layernorm.weight", ("norm.weight",)),
    Row("head.weight", ("lm_head.weight",), "padded"),
)
_OUTSIDE: dict[str, tuple[Row, ...]] = {
    "dit": (
        *_ENDS,
        Row("head.bias", ("lm_head.bias",), "padded"),
        Row("time.input.weight", ("time_embedding.in_proj.weight",)),
        Row("time.input.bias", ("time_embedding.in_proj.bias",)),
        Row("time.output.weight", ("time_embedding.out_proj.weight",)),
        Row("time.output.bias", ("time_embedding.out_proj.bias",)),
        Row("final_modulation.weight", ("final_modulation.weight",)),
        Row("final_modulation.bias", ("final_modulation.bias",)),
    ),
    "llama": _ENDS,
}


def network_config(backbone: BackboneConfig, model_size: int, *, fp32_residual: bool = True) -> NetworkConfig:
    """The plain network's configuration for a training backbone and a model vocabulary."""
    return NetworkConfig(
        kind=backbone.kind,
        vocab_size=model_size,
        hidden=backbone.hidden,
        layers=backbone.layers,
        heads=backbone.heads,
        kv_heads=backbone.kv_groups,
        ffn=backbone.ffn_width,
        qk_norm=backbone.qk_norm,
        cond_dim=backbone.cond_dim,
        rope_base=backbone.rope_base,
        norm_eps=backbone.norm_eps,
        fp32_residual=fp32_residual,
        reads=backbone.inputs.kind,
        digits=backbone.inputs.digits,
        digit_base=backbone.inputs.base,
        digit_join=backbone.inputs.join,
        latent=backbone.inputs.latent,
        prompt_table=backbone.inputs.prompt,
    )


class ParameterMap:
    """Both directions, one logical tensor at a time, so that a model can be converted without being held in memory whole."""

    def __init__(self, backbone: BackboneConfig, model_size: int) -> None:
        self._backbone = backbone
        self._model_size = model_size
        self.padded_size = Vocabulary.padded(model_size, backbone.vocab_multiple)
        self.rows: dict[str, Row] = {row.logical: row for row in _rows(backbone)}
        self._over_vocabulary = {plain for row in self.rows.values() if row.form == "padded" for plain in row.plain}
        self._shapes = {name: spec.shape for name, spec in parameter_table(backbone, self.padded_size).items()}
        if self.rows.keys() != self._shapes.keys():
            raise ValueError(f"the map and the parameter table disagree on {sorted(self.rows.keys() ^ self._shapes.keys())}")

    def has_vocabulary(self, plain: str) -> bool:
        """Whether the rows of a tensor of the plain network are those of the vocabulary."""
        return plain in self._over_vocabulary

    def split(self, name: str, full: Tensor) -> dict[str, Tensor]:
        """Plain tensors (views of `full` where possible) of the logical tensor `name`. Raises ValueError for a wrong shape."""
        self._check(name, full)
        row = self.rows[name]
        pieces: tuple[Tensor, ...]
        if row.form == "qkv":
            pieces = self._split_qkv(full)
        elif row.form == "stacked":
            pieces = full.chunk(len(row.plain))
        else:
            pieces = (full[: self._model_size] if row.form == "padded" else full,)
        return dict(zip(row.plain, pieces, strict=True))

    def join(self, name: str, fetch: Callable[[str], Tensor]) -> Tensor:
        """The logical tensor `name` from the plain ones that `fetch` gives by name; padding rows are zero. Raises ValueError for a wrong shape."""
        row = self.rows[name]
        pieces = [fetch(plain) for plain in row.plain]
        if row.form == "qkv":
            full = self._join_qkv(*pieces)
        elif row.form == "stacked":
            full = torch.cat(pieces)
        elif row.form == "padded":
            full = torch.cat((pieces[0], pieces[0].new_zeros(self.padded_size - self._model_size, *pieces[0].shape[1:])))
        else:
            full = pieces[0]
        self._check(name, full)
        return full

    def to_plain(self, logical: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The plain network's whole state dict. Raises ValueError when a logical tensor is missing or unknown."""
        if logical.keys() != self.rows.keys():
            raise ValueError(f"parameters missing or unknown: {sorted(logical.keys() ^ self.rows.keys())}")
        return {plain: piece for name, full in logical.items() for plain, piece in self.split(name, full).items()}

    def to_logical(self, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every logical tensor. Raises ValueError when a plain tensor is missing or unknown."""
        known = {piece for row in self.rows.values() for piece in row.plain}
        if plain.keys() != known:
            raise ValueError(f"parameters missing or unknown: {sorted(plain.keys() ^ known)}")
        return {name: self.join(name, plain.__getitem__) for name in self.rows}

    def _split_qkv(self, full: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [G, H/G + 2, K]: each group's query heads, its key head, its value head."""
        width = self._backbone.hidden // self._backbone.heads
        grouped = full.unflatten(0, (self._backbone.kv_groups, -1, width))
        return grouped[:, :-2].flatten(0, 2), grouped[:, -2].flatten(0, 1), grouped[:, -1].flatten(0, 1)

    def _join_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = self._backbone.hidden // self._backbone.heads
        return torch.cat([x.unflatten(0, (self._backbone.kv_groups, -1, width)) for x in (q, k, v)], dim=1).flatten(0, 2)

    def _check(self, name: str, full: Tensor) -> None:
        if full.shape != self._shapes[name]:
            raise ValueError(f"{name} has shape {tuple(full.shape)}, the backbone's is {self._shapes[name]}")


def _rows(backbone: BackboneConfig) -> list[Row]:
    templates = _LAYER[backbone.kind] + (_QK_NORM if backbone.qk_norm else ())
    layers = [
        Row(f"layers.{i}.{row.logical}", tuple(f"layers.{i}.{plain}" for plain in row.plain), row.form)
        for i in range(backbone.layers)
        for row in templates
    ]
    prompt = (_PROMPT,) if backbone.inputs.prompt else ()
    return [*_INPUTS[backbone.inputs.kind], *prompt, *_OUTSIDE[backbone.kind], *layers]
