"""Which parallel linears a layer is made of: megatron-core's own on CPU, Transformer Engine's on CUDA (where FP8 lives)."""

from typing import Any

import pretrain.parallel.lean_megatron  # noqa: F401  # before megatron-core

# isort: split
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from pretrain.backbones.attention import CoreAttention, Masks
from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.layers import HeadRMSNorm, Layer, LayerNorm, LayerSubmodules, RMSNorm
from pretrain.optional import require


def linear_provider(*, transformer_engine: bool) -> Any:
    """megatron-core's table of parallel linears. Raises UserError when Transformer Engine is asked for and not installed."""
    if not transformer_engine:
        return LocalSpecProvider()
    require("transformer_engine", purpose="FP8 and Transformer Engine layers", install="pip install -e '.[gpu]'")
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def layer_spec(backbone: BackboneConfig, masks: Masks, *, transformer_engine: bool) -> ModuleSpec:
    """The layer of this network. Norms are ours in both cases: AdaLN stands between norm and projection, so they cannot be fused."""
    provider = linear_provider(transformer_engine=transformer_engine)
    column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=ModuleSpec(module=CoreAttention, params={"masks": masks}),
        linear_proj=row,
        q_layernorm=HeadRMSNorm if backbone.qk_norm else None,
        k_layernorm=HeadRMSNorm if backbone.qk_norm else None,
    )
    submodules = LayerSubmodules(
        norm=RMSNorm if backbone.kind == "llama" else LayerNorm,
        self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.no_mask}, submodules=attention),
        mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
    )
    dit = backbone.kind == "dit"
    return ModuleSpec(module=Layer, submodules=submodules, params={"cond_dim": backbone.cond_dim if dit else None, "mlp_bias": dit})
