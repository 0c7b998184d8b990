"""A model's likelihood of a text under one draw of noise: draws, network and terms put together for each objective. Torch only.

Shape suffixes: B sequences, L positions, V model vocabulary, E width of an embedding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .gaussian_diffusion import diffuse, evidence_scale, network_scale, per_sequence
from .likelihood_draws import Draw, Text, draw_digits, draw_esolm, draw_masked, draw_normals, draw_uniform
from .likelihood_terms import allowed, cross_entropy, digit_nats, gaussian_nats, uniform_nats
from .network_input import Attention, NetworkInput


@dataclass(frozen=True)
class Nats:
    """Summed over the scored tokens of each sequence. loss_B: what further training minimises. nelbo_B: the likelihood term of the same draw,
    which `label` names: exact, or bound (in expectation over seeds)."""

    loss_B: Tensor
    nelbo_B: Tensor
    label: str


def score(model: Any, text: Text) -> Nats:
    """Of a LanguageModel. The loss is the bound itself, or the low-variance form (weight 1 in place of 1/t) where training used that and the
    model is in training mode."""
    name = model.config.objective
    if name == "ar":
        return _autoregressive(model, text)
    if name in ("mdlm", "esolm"):
        return _masked(model, text)
    if name == "replaid":
        total_B = _gaussian(model, text)
        return Nats(total_B, total_B, "bound")
    if name == "duo":
        draw = draw_uniform(text, model.config.vocab_size, model.config.schedule_eps)
        nats_BL = uniform_nats(model.network(draw.inputs), draw, model.config.mask_token_id)
    else:
        draw = draw_digits(text, model.code)
        nats_BL = digit_nats(model.network(draw.inputs), draw, model.code, carry_over=model.config.carry_over)
    total_B = _weighted(nats_BL, draw)
    return Nats(total_B, total_B, "bound")


def _autoregressive(model: Any, text: Text) -> Nats:
    scored_BL = text.scored_BL[:, 1:]
    logits_BLV = model.network(text.input(Attention.CAUSAL, ids_BL=text.ids_BL))[:, :-1]
    total_B = cross_entropy(logits_BLV, text.ids_BL[:, 1:], scored_BL, None).double().sum(-1)
    return Nats(total_B, total_B, "exact")


def _masked(model: Any, text: Text) -> Nats:
    config = model.config
    alpha_0 = config.alpha_0 if config.objective == "esolm" else 1.0
    draws = [draw_masked(text, config.mask_token_id)]
    if config.objective == "esolm":
        draws = draw_esolm(text, config.mask_token_id, alpha_0, natural=config.clean_order == "natural")
    loss_B = nelbo_B = torch.zeros(len(text.ids_BL), dtype=torch.float64, device=text.ids_BL.device)
    for draw in draws:
        nats_BL = cross_entropy(model.network(draw.inputs), draw.ids_BL, draw.scored_BL, config.mask_token_id)
        nelbo_B = nelbo_B + _weighted(nats_BL, draw)
        plain = config.low_variance and model.training and alpha_0 == 1
        loss_B = loss_B + (nats_BL.double().sum(-1) if plain else _weighted(nats_BL, draw))
    return Nats(loss_B, nelbo_B, "exact" if alpha_0 == 0 else "bound")


def _weighted(nats_BL: Tensor, draw: Draw) -> Tensor:
    return nats_BL.double().sum(-1) * draw.weight_B


# ---- RePlaid ------------------------------------------------------------------------------------------------------------------------


def latent_input(
    z_BLE: Tensor, estimate_BLE: Tensor | None, gamma_B: Tensor, documents_BL: Tensor | None, prompt: tuple[Tensor, Tensor] | None = None
) -> NetworkInput:
    """What the network reads of latents at a noise level: scaled to mean square 1, and the estimate to length sqrt(E).

    prompt  ids_BL and given_BL, for a network that reads what is given from a table of its own.
    """
    ids_BL, given_BL = prompt or (None, None)
    (batch, length), width = z_BLE.shape[:2], z_BLE.shape[-1]
    estimate_BLE = torch.zeros_like(z_BLE) if estimate_BLE is None else estimate_BLE
    return NetworkInput(
        latents_BLE=(per_sequence(network_scale(gamma_B, width), z_BLE) * z_BLE).float(),
        estimate_BLE=(estimate_BLE * width**0.5).float(),
        positions_BL=torch.arange(length, device=z_BLE.device).expand(batch, -1),
        conditioning_B=gamma_B.float(),
        documents_BL=documents_BL,
        attention=Attention.FULL,
        ids_BL=ids_BL,
        given_BL=given_BL,
    )


def _gaussian(model: Any, text: Text) -> Tensor:
    """total_B: prior, reconstruction at t = 0 and diffusion at t, each with an estimate from a first pass where the network was trained so."""
    schedule, config = model.schedule(), model.config
    normals_BLE = draw_normals(text, config.latent).float()
    given_BL1 = ~text.scored_BL[..., None]
    total_B = torch.zeros(len(text.ids_BL), dtype=torch.float64, device=text.ids_BL.device)
    for reconstruct in (True, False):
        t_B = text.times()
        t_B = torch.zeros_like(t_B) if reconstruct else t_B
        gamma_B, slope_B = schedule(t_B)
        clean_BLE = model.table()[text.ids_BL]
        z_BLE = torch.where(given_BL1, clean_BLE, diffuse(clean_BLE, normals_BLE, gamma_B))
        estimate_BLE = None
        if config.self_conditioning:
            with torch.no_grad():
                estimate_BLE = torch.where(given_BL1, clean_BLE, _denoise(model, text, z_BLE, gamma_B, None)[1])
        nats_BL, mean_BLE = _denoise(model, text, z_BLE, gamma_B, estimate_BLE)
        terms_BL = gaussian_nats(nats_BL, mean_BLE, clean_BLE, gamma_B, slope_B, schedule.gamma_1, reconstruct=reconstruct)
        total_B = total_B + torch.where(text.scored_BL, terms_BL, 0.0).double().sum(-1)
    return total_B


def _denoise(model: Any, text: Text, z_BLE: Tensor, gamma_B: Tensor, estimate_BLE: Tensor | None) -> tuple[Tensor, Tensor]:
    """-log x_theta[x] and e_theta."""
    table_VE = model.table()
    prompt = (text.ids_BL, ~text.scored_BL) if model.config.prompt_table else None
    logits_BLV = model.network(latent_input(z_BLE, estimate_BLE, gamma_B, text.documents_BL, prompt)).float()
    scale_B = model.config.output_prior * evidence_scale(gamma_B)
    logits_BLV = logits_BLV + (per_sequence(scale_B, z_BLE) * z_BLE) @ table_VE.T
    nats_BL = cross_entropy(logits_BLV, text.ids_BL, text.scored_BL, model.config.mask_token_id)
    return nats_BL, allowed(logits_BLV, model.config.mask_token_id).softmax(-1) @ table_VE
