"""This rank's part of the network: megatron-core's parallel layers behind logical parameter names.

A pipeline stage holds one chunk (several under the interleaved schedule). A chunk is megatron-core's TransformerBlock over our layers, with
the embedding on the first chunk of the network and the final norm and head on the last. All chunks of a rank, and the time embedding
that they share, are one module, so that DeepSpeed sees one model whose parameters are named as if it were whole.

Shape suffixes: L positions, B sequences, D width, v this rank's share of the padded vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import pretrain.parallel.lean_megatron  # noqa: F401  # before megatron-core

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from pretrain.backbones.attention import Masks
from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.inputs import build_input
from pretrain.backbones.layers import LayerNorm, RMSNorm, SequenceLinear, TimeEmbedding, modulate
from pretrain.backbones.parameters import parameter_table
from pretrain.backbones.specs import layer_spec
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.parallel.config import ParallelConfig
from pretrain.parallel.groups import Groups
from pretrain.parallel.initialization import initial_tensor
from pretrain.parallel.sharding import ParameterSpec


def transformer_config(
    backbone: BackboneConfig, parallel: ParallelConfig, *, dtype: torch.dtype, fp32_residual: bool = True, fp8: bool = False,
    variable_lengths: bool = False,
) -> TransformerConfig:  # fmt: skip
    """megatron-core's configuration of this network in this layout."""
    interleaved = parallel.virtual_pipeline > 1
    gelu = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
    return TransformerConfig(
        num_layers=backbone.layers,
        hidden_size=backbone.hidden,
        num_attention_heads=backbone.heads,
        num_query_groups=backbone.kv_groups,
        ffn_hidden_size=backbone.ffn_width,
        add_bias_linear=False,
        gated_linear_unit=backbone.kind == "llama",
        activation_func=F.silu if backbone.kind == "llama" else gelu,
        normalization="RMSNorm" if backbone.kind == "llama" else "LayerNorm",
        layernorm_epsilon=backbone.norm_eps,
        qk_layernorm=backbone.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=torch.float32 if fp32_residual else dtype,
        bf16=dtype is torch.bfloat16,
        fp32_residual_connection=fp32_residual and dtype is not torch.float32,
        fp8="hybrid" if fp8 else None,
        # Current (tensorwise) scaling keeps no state between steps, so checkpoints need none; the first and last layers stay bf16.
        fp8_recipe="tensorwise" if fp8 else "delayed",
        first_last_layers_bf16=fp8,
        recompute_granularity="full" if backbone.recompute == "full" else None,
        recompute_method="uniform" if backbone.recompute == "full" else None,
        recompute_num_layers=1 if backbone.recompute == "full" else None,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        # With two stages the previous and the next rank are the same process, and megatron-core's batched sends of the interleaved
        # schedule mix up activations and gradients without an error; separate sends do not.
        overlap_p2p_comm=interleaved,
        # Stages tell each other the length of each micro-batch; megatron-core wants the token dispatcher named, though nothing dispatches.
        variable_seq_lengths=variable_lengths,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=not interleaved,
    )


class Chunk(MegatronModule):
    """Consecutive layers, with the embedding before them or the head after them where the network begins or ends."""

    def __init__(
        self, config: TransformerConfig, backbone: BackboneConfig, rows: int, attention: Attention, time: TimeEmbedding | None, *,
        first: bool, last: bool, vp_stage: int | None, transformer_engine: bool,
    ) -> None:  # fmt: skip
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.head_dim, self.rope_base = backbone.hidden // backbone.heads, backbone.rope_base
        object.__setattr__(self, "time", time)  # owned by the stage: registering it in every chunk would name it twice
        spec = layer_spec(backbone, Masks(attention), transformer_engine=transformer_engine)
        layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.decoder = TransformerBlock(
            config, TransformerBlockSubmodules(layer_specs=[spec] * layers), post_layer_norm=False, pre_process=first, post_process=last,
            pg_collection=groups, vp_stage=vp_stage,
        )  # fmt: skip
        no_init = {"init_method": nn.init.zeros_, "config": config}
        self.embedding = None
        if first:
            self.embedding = build_input(config, backbone, rows)
        self.final_layernorm = self.final_modulation = self.head = None
        if last:
            norm = RMSNorm if backbone.kind == "llama" else LayerNorm
            self.final_layernorm = norm(config, backbone.hidden, backbone.norm_eps)
            if time is not None:
                self.final_modulation = SequenceLinear(config, backbone.cond_dim, 2 * backbone.hidden)
            self.head = ColumnParallelLinear(backbone.hidden, rows, bias=backbone.kind == "dit", gather_output=False, **no_init)

    def set_input_tensor(self, tensor: Any) -> None:
        """megatron-core's schedules put the previous stage's activations here."""
        self.decoder.set_input_tensor(tensor[0] if isinstance(tensor, list) else tensor)

    def forward(self, inputs: NetworkInput) -> Tensor:
        """logits_LBv on the last chunk, activations otherwise."""
        hidden_LBD = self.embedding(inputs).to(self.config.pipeline_dtype) if self.embedding is not None else None
        conditioning_BC = self._condition(inputs.conditioning_B)
        rope = self._rope(inputs.positions_BL)
        hidden_LBD = self.decoder(hidden_LBD, self._pattern(inputs), context=conditioning_BC, rotary_pos_emb=rope)
        if self.head is None:
            return hidden_LBD
        assert self.final_layernorm is not None
        if inputs.attention is Attention.TWO_STREAM:
            hidden_LBD = self._noisy_stream(hidden_LBD, inputs.noisy_length)
        normed_LBD = self.final_layernorm(hidden_LBD)
        if self.final_modulation is not None:
            assert conditioning_BC is not None
            normed_LBD = modulate(normed_LBD, *self.final_modulation(conditioning_BC.to(self.config.params_dtype)).float().chunk(2, dim=-1))
        return self.head(normed_LBD.to(self.config.params_dtype))[0]

    def _condition(self, conditioning_B: Tensor) -> Tensor | None:
        """[B, C]. Under sequence parallelism each rank sees its part of the sequence, and so has its part of a learned level's gradient."""
        if self.time is None:
            return None
        if conditioning_B.requires_grad and self.config.sequence_parallel:
            conditioning_B = copy_to_tensor_model_parallel_region(conditioning_B)
        return self.time(conditioning_B)

    def _pattern(self, inputs: NetworkInput) -> Tensor | None:
        """What attention is told: documents_BL, [B, L, noisy] for two streams, or None where the whole sequence is one document."""
        if inputs.attention is not Attention.TWO_STREAM:
            return inputs.documents_BL
        documents = torch.zeros_like(inputs.positions_BL) if inputs.documents_BL is None else inputs.documents_BL
        return documents.unsqueeze(-1).expand(-1, -1, inputs.noisy_length)

    def _noisy_stream(self, hidden_LBD: Tensor, noisy: int) -> Tensor:
        """The noisy stream of two, which alone is predicted."""
        if not self.config.sequence_parallel:
            return hidden_LBD[:noisy]
        whole_LBD = gather_from_sequence_parallel_region(hidden_LBD, tensor_parallel_output_grad=False)
        return scatter_to_sequence_parallel_region(whole_LBD[:noisy])

    def _rope(self, positions_BL: Tensor) -> Tensor:
        """Angles [L, B, 1, K] in the half-split layout: the K/2 frequencies twice."""
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions_BL.device)
        angles = positions_BL.t().float()[..., None] * self.rope_base ** (-half / self.head_dim)
        return torch.cat([angles, angles], dim=-1)[:, :, None]


class Stage(nn.Module):
    """Everything that this rank holds of the network. Parameters carry logical names (backbones.parameters)."""

    def __init__(
        self, config: TransformerConfig, backbone: BackboneConfig, *, rows: int, attention: Attention, groups: Groups,
        transformer_engine: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.groups = config, groups
        self.table = parameter_table(backbone, rows)
        self.time = TimeEmbedding(config, backbone.cond_dim) if backbone.kind == "dit" else None
        virtual = config.virtual_pipeline_model_parallel_size or 1
        self.chunks = nn.ModuleList()
        for v in range(virtual):
            first = groups.pipeline.rank == 0 and v == 0
            last = groups.pipeline.last and v == virtual - 1
            vp_stage = v if virtual > 1 else None
            self.chunks.append(
                Chunk(config, backbone, rows, attention, self.time, first=first, last=last, vp_stage=vp_stage, transformer_engine=transformer_engine)
            )
        self._mark_shards()
        if self.time is not None and groups.pipeline.rank > 0:
            for parameter in self.time.parameters():  # one copy counts in DeepSpeed's gradient norm
                parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]

    def forward(self, inputs: NetworkInput) -> Tensor:
        """The single chunk of a run without pipeline stages."""
        return self.chunks[0](inputs)

    def initialize(self, seed: int) -> None:
        """Fill every parameter from (seed, logical name): the same network in every layout."""
        for name, parameter in self.named_parameters():
            spec = self.table[name]
            full = initial_tensor(name, spec, seed)
            with torch.no_grad():
                parameter.copy_(spec.shard(full, self.groups.tensor.size, self.groups.tensor.rank))

    def spec(self, name: str) -> ParameterSpec:
        """The logical specification of a parameter."""
        return self.table[name]

    def _mark_shards(self) -> None:
        """Check shapes, and say which parameters are shards: megatron-core does so only when it initialises them itself, and DeepSpeed's
        gradient norm counts an unmarked one on the first tensor-parallel rank only."""
        for name, parameter in self.named_parameters():
            spec = self.table[name]
            expected = spec.local_shape(self.groups.tensor.size)
            assert tuple(parameter.shape) == expected, f"{name}: built {tuple(parameter.shape)}, table says {expected}"
            parameter.tensor_model_parallel = spec.axis is not None  # type: ignore[attr-defined]
            parameter.partition_dim = -1 if spec.axis is None else spec.axis  # type: ignore[attr-defined]

    def _logical(self, name: str) -> str:
        """chunks.1.decoder.layers.0.mlp… -> layers.5.mlp…, with the global layer number."""
        if not name.startswith("chunks."):
            return name
        _, chunk, rest = name.split(".", 2)
        if not rest.startswith("decoder.layers."):
            return rest
        _, _, local, tail = rest.split(".", 3)
        layers = self.chunks[int(chunk)].decoder.layers  # type: ignore[union-attr]
        return f"layers.{layers[int(local)].layer_number - 1}.{tail}"  # type: ignore[index,union-attr]

    # DeepSpeed names, saves and converts parameters through these three, so they speak logical names.
    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield self._logical(name), parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        state = super().state_dict(*args, **kwargs)
        return {self._logical(name): value for name, value in state.items() if value is not None and not name.endswith("_extra_state")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        physical = {self._logical(name): name for name, _ in super().named_parameters()}
        missing = physical.keys() - state_dict.keys()
        assert not (strict and missing), f"checkpoint lacks {sorted(missing)[:3]}"
        return super().load_state_dict({physical[name]: value for name, value in state_dict.items() if name in physical}, strict=False, assign=assign)


def build_stage(
    backbone: BackboneConfig, parallel: ParallelConfig, groups: Groups, *, rows: int, attention: Attention, dtype: torch.dtype, device: torch.device,
    fp32_residual: bool = True, fp8: bool = False, transformer_engine: bool = False, variable_lengths: bool = False,
) -> Stage:  # fmt: skip
    """This rank's stage, uninitialised, on `device` (which may be meta, to count without allocating)."""
    config = transformer_config(backbone, parallel, dtype=dtype, fp32_residual=fp32_residual, fp8=fp8, variable_lengths=variable_lengths)
    with torch.device(device):
        stage = Stage(config, backbone, rows=rows, attention=attention, groups=groups, transformer_engine=transformer_engine)
    return stage.to(device) if device.type != "meta" else stage
