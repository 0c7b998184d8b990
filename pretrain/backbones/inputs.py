"""From what an objective puts at each position to the residual stream: token ids, softened ids, digits of ids, or continuous latents.

Shape suffixes: L positions, B sequences, D width, K weighted ids of a position, J digits, E latent width, F features.
"""

import pretrain.parallel.lean_megatron  # noqa: F401  # before megatron-core

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from pretrain.backbones.config import GAMMA_FEATURES, BackboneConfig, InputConfig
from pretrain.hf_model.network_input import NetworkInput


class TokenInput(VocabParallelEmbedding):
    """Rows of a table that is cut over tensor-parallel ranks; softened ids are weighted sums of rows."""

    def __init__(self, config: TransformerConfig, backbone: BackboneConfig, rows: int) -> None:
        super().__init__(
            rows, backbone.hidden, reduce_scatter_embeddings=config.sequence_parallel, init_method=nn.init.zeros_, config=config
        )  # fmt: skip
        self._sequence_parallel = config.sequence_parallel

    def forward(self, inputs: NetworkInput) -> Tensor:
        """[L, B, D]; this rank's part of L under sequence parallelism."""
        if inputs.weights_BLK is not None:
            return self._weighted(inputs.ids_BL, inputs.weights_BLK)
        hidden = super().forward(inputs.ids_BL)
        return hidden if self._sequence_parallel else hidden.transpose(0, 1).contiguous()  # megatron-core transposes as it scatters

    def _weighted(self, ids_BLK: Tensor | None, weights_BLK: Tensor) -> Tensor:
        """Each rank adds up the rows that it holds, then one reduction adds the ranks."""
        assert ids_BLK is not None
        here_BLK = (ids_BLK >= self.vocab_start_index) & (ids_BLK < self.vocab_end_index)
        column_BLK = torch.where(here_BLK, ids_BLK - self.vocab_start_index, 0)
        weights_BLK = torch.where(here_BLK, weights_BLK, 0.0)
        width = self.weight.shape[1]
        flat = (column_BLK.flatten(0, 1), self.weight.float())
        sums_BLD = F.embedding_bag(*flat, per_sample_weights=weights_BLK.flatten(0, 1).float(), mode="sum").view(*ids_BLK.shape[:2], width)
        hidden_LBD = sums_BLD.transpose(0, 1).contiguous()
        if self._sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden_LBD)
        return reduce_from_tensor_model_parallel_region(hidden_LBD)


class _Replicated(nn.Module):
    """Parameters that every tensor-parallel rank holds whole and applies to whole sequences; the result is cut under sequence parallelism."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._sequence_parallel = config.sequence_parallel

    def _laid(self, hidden_BLD: Tensor) -> Tensor:
        hidden_LBD = hidden_BLD.transpose(0, 1).contiguous()
        return scatter_to_sequence_parallel_region(hidden_LBD) if self._sequence_parallel else hidden_LBD


class DigitInput(_Replicated):
    """Embeddings of a token's digits, concatenated or added (MDM-Prime-v2)."""

    def __init__(self, config: TransformerConfig, backbone: BackboneConfig) -> None:
        super().__init__(config)
        self.inputs, self.hidden = backbone.inputs, backbone.hidden
        self.weight = nn.Parameter(torch.empty(*backbone.inputs.digit_table(backbone.hidden), dtype=config.params_dtype))

    def forward(self, inputs: NetworkInput) -> Tensor:
        """[L, B, D]; this rank's part of L under sequence parallelism."""
        assert inputs.digits_BLJ is not None
        return self._laid(digit_embedding(self.weight, inputs.digits_BLJ, self.inputs, self.hidden))


class LatentInput(_Replicated):
    """W_z z + W_e e + W_gamma [sin, cos](gamma f) (Plaid; RePlaid's appendix S), in fp32: the last two start at zero.

    Positions of a prompt read a row of a table instead, where the backbone has one (the same appendix, "Separate prompt embedding table").
    """

    def __init__(self, config: TransformerConfig, backbone: BackboneConfig, rows: int) -> None:
        super().__init__(config)
        dtype, width = config.params_dtype, backbone.inputs.latent
        self.latent = nn.Linear(width, backbone.hidden, bias=False, dtype=dtype)
        self.estimate = nn.Linear(width, backbone.hidden, bias=False, dtype=dtype)
        self.gamma = nn.Linear(GAMMA_FEATURES, backbone.hidden, bias=False, dtype=dtype)
        self.prompt = None
        if backbone.inputs.prompt:  # whole sequences on every rank, as the latents are
            self.prompt = VocabParallelEmbedding(rows, backbone.hidden, reduce_scatter_embeddings=False, init_method=nn.init.zeros_, config=config)

    def forward(self, inputs: NetworkInput) -> Tensor:
        """[L, B, D]; this rank's part of L under sequence parallelism."""
        assert inputs.latents_BLE is not None and inputs.estimate_BLE is not None
        hidden_BLD = F.linear(inputs.latents_BLE.float(), self.latent.weight.float())
        hidden_BLD = hidden_BLD + F.linear(inputs.estimate_BLE.float(), self.estimate.weight.float())
        features_BF = gamma_features(inputs.conditioning_B)
        hidden_BLD = hidden_BLD + F.linear(features_BF, self.gamma.weight.float())[:, None]
        if self.prompt is not None:
            assert inputs.given_BL is not None and inputs.ids_BL is not None
            rows_BLD = self.prompt(inputs.ids_BL)
            hidden_BLD = torch.where(inputs.given_BL.unsqueeze(-1), rows_BLD.to(hidden_BLD.dtype), hidden_BLD)
        return self._laid(hidden_BLD)


def build_input(config: TransformerConfig, backbone: BackboneConfig, rows: int) -> nn.Module:
    """The input module that the objective's inputs need."""
    if backbone.inputs.kind == "tokens":
        return TokenInput(config, backbone, rows)
    return DigitInput(config, backbone) if backbone.inputs.kind == "digits" else LatentInput(config, backbone, rows)


def digit_embedding(table: Tensor, digits_BLJ: Tensor, inputs: InputConfig, hidden: int) -> Tensor:
    """[B, L, D] from digits, where `base` is the masked digit."""
    if inputs.join != "concat_shared":
        digits_BLJ = digits_BLJ + (inputs.base + 1) * torch.arange(inputs.digits, device=digits_BLJ.device)
    if inputs.join == "sum":
        return F.embedding_bag(digits_BLJ.flatten(0, 1), table.float(), mode="sum").view(*digits_BLJ.shape[:2], hidden)
    joined_BLD = F.embedding(digits_BLJ, table).flatten(2)
    return F.pad(joined_BLD, (0, hidden - joined_BLD.shape[-1]))


def gamma_features(gamma_B: Tensor) -> Tensor:
    """[B, 64]: sin and cos of gamma at 32 rates from e^-5 to e^5."""
    rates = torch.exp(torch.linspace(-5.0, 5.0, GAMMA_FEATURES // 2, dtype=torch.float32, device=gamma_B.device))
    angles = gamma_B.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
