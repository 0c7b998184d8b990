"""Norms, time conditioning and the transformer layer of both families, around megatron-core's parallel attention and MLP.

Shape suffixes: L positions (this rank's part of them under sequence parallelism), B sequences, D width, C conditioning width.
"""

import math
from dataclasses import dataclass
from typing import Any

import pretrain.parallel.lean_megatron  # noqa: F401  # before megatron-core

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset
from torch import Tensor, nn

from pretrain.backbones.parameters import TIME_FREQUENCIES


class _Norm(nn.Module):
    """A norm with a weight and no bias, computed in fp32 and returned in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps


class LayerNorm(_Norm):
    """Weight-only LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), None, self.eps)


class RMSNorm(_Norm):
    """Root-mean-square norm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


class HeadRMSNorm(RMSNorm):
    """RMSNorm of queries or keys; back in their type, since RoPE and attention follow.

    Each tensor-parallel rank norms its own heads with the shared weight, so gradients are partial with and without sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.weight.partial_over_tensor = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class SequenceLinear(nn.Linear):
    """A replicated linear whose input is split along the sequence under sequence parallelism (its gradient is then partial)."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TimeEmbedding(nn.Module):
    """sigma_B -> conditioning_BC: sinusoid (cos, then sin; periods up to 10000), linear, SiLU, linear, SiLU, all in fp32.

    It is shared by every pipeline stage; each holds a copy, and gradients are summed over stages.
    """

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        self.input = SequenceLinear(config, TIME_FREQUENCIES, width)
        self.output = SequenceLinear(config, width, width)

    def forward(self, sigma_B: Tensor) -> Tensor:
        half = TIME_FREQUENCIES // 2
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=sigma_B.device) / half)
        angles = sigma_B.float()[:, None] * frequencies
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        hidden = F.silu(F.linear(features, self.input.weight.float(), self.input.bias.float()))
        return F.silu(F.linear(hidden, self.output.weight.float(), self.output.bias.float()))


@dataclass
class LayerSubmodules:
    """What a layer is made of: megatron-core specs, so that local and Transformer Engine parts exchange."""

    norm: type[_Norm]
    self_attention: ModuleSpec
    mlp: ModuleSpec


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """AdaLN: x (1 + scale) + shift."""
    return torch.addcmul(x + shift, x, scale)


class Layer(MegatronModule, BaseTransformerLayer):
    """A pre-norm transformer layer. With `cond_dim`, AdaLN-Zero modulates both branches from the conditioning (DiT); without, it is Llama's.

    TransformerBlock carries the conditioning vector as `context` and documents_BL as `attention_mask`. The residual stream keeps the type
    it comes in (fp32 under bf16 if so configured); branches compute in the parameters' type.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LayerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        cond_dim: int | None = None,
        mlp_bias: bool = False,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number + get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm = submodules.norm(**norm)
        self.self_attention = build_module(submodules.self_attention, config=config, layer_number=self.layer_number, pg_collection=pg_collection)
        self.pre_mlp_layernorm = submodules.norm(**norm)
        # megatron-core has one switch for the biases of attention and MLP; the DiT has them in its MLP only.
        mlp_config = _with_bias(config) if mlp_bias else config
        self.mlp = build_module(submodules.mlp, config=mlp_config, ffn_hidden_size=config.ffn_hidden_size, tp_group=pg_collection.tp)
        self.modulation = SequenceLinear(config, cond_dim, 6 * config.hidden_size) if cond_dim else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        x_LBD, dtype = hidden_states, self.config.params_dtype
        branch = {"attention_mask": attention_mask, "rotary_pos_emb": rotary_pos_emb}
        if self.modulation is None:
            x_LBD = x_LBD + _biased(self.self_attention(self.input_layernorm(x_LBD).to(dtype), **branch))
            return x_LBD + _biased(self.mlp(self.pre_mlp_layernorm(x_LBD).to(dtype))), context
        assert context is not None
        six = self.modulation(context.to(dtype)).float().chunk(6, dim=-1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = six
        attended_LBD = self.self_attention(modulate(self.input_layernorm(x_LBD), shift_a, scale_a).to(dtype), **branch)
        x_LBD = torch.addcmul(x_LBD, gate_a, _biased(attended_LBD))
        x_LBD = torch.addcmul(x_LBD, gate_m, _biased(self.mlp(modulate(self.pre_mlp_layernorm(x_LBD), shift_m, scale_m).to(dtype))))
        return x_LBD.to(hidden_states.dtype), context


def _with_bias(config: TransformerConfig) -> TransformerConfig:
    import copy

    biased = copy.copy(config)
    biased.add_bias_linear = True
    return biased


def _biased(output: tuple[Tensor, Tensor | None]) -> Tensor:
    """megatron-core returns a branch's output and a bias still to be added."""
    value, bias = output
    return value if bias is None else value + bias
