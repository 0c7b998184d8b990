"""A draw of noise in the words of the training objectives: their network inputs, and their own nats of it.

The exported model scores texts with code of its own (hf_model/likelihood_*.py). Here the same draw goes through the objective that trained
the weights and through the training backbone.

Shape suffixes: B sequences, L positions, P padded vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pretrain.data.arrays import stack, to_micro_batch
from pretrain.data.batch import MicroBatch
from pretrain.data.samples import NumberedSample
from pretrain.engine.loss import evaluation_nats
from pretrain.hf_model.likelihood_draws import Draw, Text, draw_digits, draw_esolm, draw_masked, draw_normals, draw_uniform
from pretrain.hf_model.network_input import NetworkInput
from pretrain.hf_model.uniform_diffusion import SMALLEST_ALPHA, NoiseLevel
from pretrain.objectives.ar import AR
from pretrain.objectives.base import Corrupted, Objective
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.duo import Duo
from pretrain.objectives.esolm import EsoLM
from pretrain.objectives.mdlm import MDLM
from pretrain.objectives.mdm_prime import MDMPrime
from pretrain.objectives.replaid import RePlaid
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard

Logits = Callable[[NetworkInput], Tensor]
"""Network input -> logits_BLP."""
_CHUNK = 128


def bound_of(config: ObjectiveConfig) -> ObjectiveConfig:
    """The same objective, evaluated by its plain bound, which is what exported models say."""
    return replace(
        config, evaluation="bound", esolm=replace(config.esolm, evaluate="nelbo"), mdm_prime=replace(config.mdm_prime, joint_mask_above=None)
    )


def network_inputs(objective: Objective, text: Text, vocab: VocabShard) -> list[NetworkInput]:
    """What the network reads under the draws of `text`, one for each term of the bound."""
    if isinstance(objective, RePlaid):
        return [objective.network_input(inputs, vocab) for inputs, _ in _gaussian(objective, text)]
    return [objective.network_input(batch.inputs, vocab) for batch in _batches(objective, text)]


@torch.no_grad()
def nats_of(objective: Objective, text: Text, vocab: VocabShard, logits: Logits) -> Tensor:
    """nats_B, float64: -log p or its bound under the draws of `text`, by the objective's own code."""
    total_B = torch.zeros(len(text.ids_BL), dtype=torch.float64, device=text.ids_BL.device)
    if isinstance(objective, RePlaid):
        for inputs, targets in _gaussian(objective, text):
            if objective.config.self_conditioning:
                first_BLP = logits(objective.network_input(inputs, vocab))
                inputs = inputs | {"estimate": objective.preliminary_result(first_BLP, targets, vocab)}
            logits_LBP = logits(objective.network_input(inputs, vocab)).transpose(0, 1)
            # Each part carries its term with weight 2 and the prior, and the bound is the parts' mean.
            total_B += evaluation_nats(objective, logits_LBP, targets, vocab, chunk=_CHUNK) / 2
        return total_B
    for batch in _batches(objective, text):
        inputs, targets = objective.prepare(batch.inputs, batch.targets, evaluation=True)
        logits_LBP = logits(objective.network_input(inputs, vocab)).transpose(0, 1)
        total_B += evaluation_nats(objective, logits_LBP, targets, vocab, chunk=_CHUNK)
    return total_B


def _batches(objective: Objective, text: Text) -> list[MicroBatch]:
    """The draws as micro-batches of the objective."""
    tokens_BL, given_BL = text.ids_BL.cpu().numpy(), ~text.scored_BL.cpu().numpy()
    documents_L = np.zeros(tokens_BL.shape[1], np.int32)
    if isinstance(objective, AR):
        noise, rows = Noise(0, 0, 0, 1), zip(tokens_BL, given_BL, strict=True)
        return [_stacked([objective.corrupt(x_L, documents_L, noise, evaluation=True, prompt=given_L) for x_L, given_L in rows], text)]
    if isinstance(objective, MDMPrime):
        draws = [draw_digits(text, objective.code)]
    elif isinstance(objective, Duo):
        draws = [draw_uniform(text, objective.classes, objective.config.schedule_eps)]
    elif isinstance(objective, EsoLM):
        draws = draw_esolm(text, objective.mask_id, objective.alpha_0, natural=objective.config.esolm.clean_order == "natural")
    else:
        assert isinstance(objective, MDLM)
        draws = [draw_masked(text, objective.mask_id)]
    return [_stacked([_noised(objective, draw, b, tokens_BL[b], documents_L, given_BL[b]) for b in range(len(tokens_BL))], text) for draw in draws]


def _noised(objective: Objective, draw: Draw, b: int, tokens_L: np.ndarray, documents_L: np.ndarray, given_L: np.ndarray) -> Corrupted:
    """Sequence b of a draw, as the objective would have noised it; given_L: its prompt."""
    t = 1.0 if draw.t_B is None else float(draw.t_B[b])
    hidden = draw.hidden[b].cpu().numpy()
    if isinstance(objective, MDMPrime):
        return objective.noised(tokens_L, documents_L, t=t, masked_LJ=hidden, prompt=given_L)
    if isinstance(objective, Duo):
        level = NoiseLevel(max(1 - t, SMALLEST_ALPHA), t, -1.0)
        return objective.noised(tokens_L, documents_L, t=t, level=level, noisy_L=hidden, prompt=given_L)
    if isinstance(objective, EsoLM):
        assert draw.order_BL is not None
        order_L = draw.order_BL[b].cpu().numpy()
        if draw.t_B is None:
            return objective.sequential(tokens_L, documents_L, order_L=order_L, scored_L=hidden, share=1.0)
        return objective.diffused(tokens_L, documents_L, order_L=order_L, masked_L=hidden, t=t, share=1.0, evaluation=True)
    assert isinstance(objective, MDLM)
    return objective.noised(tokens_L, documents_L, t=t, masked_L=hidden, prompt=given_L)


def _stacked(samples: list[Corrupted], text: Text) -> MicroBatch:
    rows = [NumberedSample(number, sample) for number, sample in enumerate(samples)]
    return to_micro_batch(stack(rows), pin=False).to(text.ids_BL.device)


def _gaussian(objective: RePlaid, text: Text) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """RePlaid's inputs and targets: reconstruction at t = 0, diffusion at t."""
    batch, device = len(text.ids_BL), text.ids_BL.device
    parts = []
    for reconstruct in (True, False):
        t_B = torch.zeros(batch, dtype=torch.float64, device=device) if reconstruct else text.times()
        g_B, dg_B = objective.schedule.interior(t_B)
        shared = {
            "ids": text.ids_BL,
            "normals": draw_normals(text, objective.config.latent).float(),
            "g": g_B,
            "dg": dg_B,
            "self_conditioned": torch.full((batch,), objective.config.self_conditioning > 0, device=device),
        }
        targets = {
            "t": t_B,
            "reconstruct": torch.full((batch,), reconstruct, device=device),
            "weight": torch.full((batch,), 2.0, dtype=torch.float64, device=device),
            "text": text.scored_BL,
        }
        parts.append((shared | {"positions": text.positions_BL, "prompt": ~text.scored_BL}, shared | targets))
    return parts
