"""From what stands at each position to the residual stream: token ids, softened ids, digits of ids, or continuous latents.

Shape suffixes: B sequences, L positions, D width, K weighted ids of a position, J digits, E latent width, F features.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_network import NetworkConfig
from .network_input import NetworkInput

GAMMA_FEATURES = 64


class TokenInput(nn.Embedding):
    """Rows of a table, or sums of rows with weights."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config.vocab_size, config.hidden)
        nn.init.uniform_(self.weight, -1 / math.sqrt(config.hidden), 1 / math.sqrt(config.hidden))

    def forward(self, inputs: NetworkInput) -> Tensor:  # type: ignore[override]
        """[B, L, D]."""
        if inputs.ids_BL is None:
            raise ValueError("this network reads token ids")
        rows = super().forward(inputs.ids_BL)
        if inputs.weights_BLK is None:
            return rows
        return torch.einsum("blkd,blk->bld", rows.float(), inputs.weights_BLK.float())


class DigitInput(nn.Module):
    """Embeddings of a token's digits, concatenated (and padded with zeros) or added; the base stands for a masked digit."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        tables = 1 if config.digit_join == "concat_shared" else config.digits
        width = config.hidden if config.digit_join == "sum" else config.hidden // config.digits
        self.weight = nn.Parameter(torch.empty(tables * (config.digit_base + 1), width))
        nn.init.uniform_(self.weight, -1 / math.sqrt(config.hidden), 1 / math.sqrt(config.hidden))

    def forward(self, inputs: NetworkInput) -> Tensor:
        """[B, L, D]."""
        if inputs.digits_BLJ is None:
            raise ValueError("this network reads digits of token ids")
        digits_BLJ = inputs.digits_BLJ
        if self.config.digit_join != "concat_shared":
            first_rows = (self.config.digit_base + 1) * torch.arange(self.config.digits, device=digits_BLJ.device)
            digits_BLJ = digits_BLJ + first_rows
        rows = F.embedding(digits_BLJ, self.weight)
        if self.config.digit_join == "sum":
            return rows.float().sum(2)
        joined = rows.flatten(2)
        return F.pad(joined, (0, self.config.hidden - joined.shape[-1]))


class LatentInput(nn.Module):
    """W_z z + W_e e + W_gamma [sin, cos](gamma f), in fp32 (Plaid; RePlaid's appendix S).

    Positions of a prompt read a row of a table instead, where the network has one.

    W_gamma is called `noise`: transformers 4 takes a tensor with "gamma" in its name for an old name of a norm's weight, and renames it.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.latent = nn.Linear(config.latent, config.hidden, bias=False)
        self.estimate = nn.Linear(config.latent, config.hidden, bias=False)
        self.noise = nn.Linear(GAMMA_FEATURES, config.hidden, bias=False)
        nn.init.zeros_(self.estimate.weight)
        nn.init.zeros_(self.noise.weight)
        self.prompt = nn.Embedding(config.vocab_size, config.hidden) if config.prompt_table else None

    def forward(self, inputs: NetworkInput) -> Tensor:
        """[B, L, D]."""
        if inputs.latents_BLE is None or inputs.estimate_BLE is None:
            raise ValueError("this network reads latents and an estimate of their clean values")
        rates_F = torch.linspace(-5.0, 5.0, GAMMA_FEATURES // 2, device=inputs.latents_BLE.device).exp()
        angles_BF = inputs.conditioning_B.float()[:, None] * rates_F
        noise_BD = F.linear(torch.cat((angles_BF.sin(), angles_BF.cos()), -1), self.noise.weight.float())
        latent_BLD = F.linear(inputs.latents_BLE.float(), self.latent.weight.float())
        read_BLD = latent_BLD + F.linear(inputs.estimate_BLE.float(), self.estimate.weight.float()) + noise_BD[:, None]
        if self.prompt is None or inputs.given_BL is None:  # None: nothing is given
            return read_BLD
        if inputs.ids_BL is None:
            raise ValueError("a prompt is read by its ids")
        return torch.where(inputs.given_BL[..., None], self.prompt(inputs.ids_BL).float(), read_BLD)


def build_input(config: NetworkConfig) -> TokenInput | DigitInput | LatentInput:
    """The input module of `config.reads`."""
    if config.reads == "tokens":
        return TokenInput(config)
    return DigitInput(config) if config.reads == "digits" else LatentInput(config)


def residual_stream(module: nn.Module, inputs: NetworkInput, *, fp32: bool, dtype: torch.dtype) -> Tensor:
    """The residual stream's start, in fp32 or in the type of the weights."""
    x_BLD = module(inputs)
    return x_BLD.float() if fp32 else x_BLD.to(dtype)
