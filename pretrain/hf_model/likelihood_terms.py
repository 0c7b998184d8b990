"""What each objective's logits say about a text, in nats: the terms of the bounds, for one process. Torch only.

The training backbone computes the same numbers over vocabulary shards and in slices (its `token_nelbo`); here whole logits are in memory.

Shape suffixes: B sequences, L positions, V model vocabulary, J digits of a token, E width of an embedding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .digits import DigitCode
from .gaussian_diffusion import prior_divergence, snr
from .likelihood_draws import Draw


def allowed(logits_BLV: Tensor, mask_id: int | None) -> Tensor:
    """Logits in fp32 or wider, with -inf for the mask, which no model predicts."""
    values_BLV = logits_BLV.float() if logits_BLV.dtype in (torch.bfloat16, torch.float16) else logits_BLV
    if mask_id is None:
        return values_BLV
    return values_BLV.index_fill(-1, torch.tensor([mask_id], device=values_BLV.device), -torch.inf)


def cross_entropy(logits_BLV: Tensor, ids_BL: Tensor, scored_BL: Tensor, mask_id: int | None) -> Tensor:
    """nats_BL: -log p(id) where it is scored, 0 elsewhere."""
    safe_BL = torch.where(scored_BL, ids_BL, 0 if mask_id != 0 else 1)
    nats_BL = F.cross_entropy(allowed(logits_BLV, mask_id).flatten(0, 1), safe_BL.flatten(), reduction="none").view_as(ids_BL)
    return torch.where(scored_BL, nats_BL, 0.0)


def uniform_nats(logits_BLV: Tensor, draw: Draw, mask_id: int | None) -> Tensor:
    """nats_BL of Duo's integrand at e = 0 ("The Diffusion Duality", Sahoo et al. 2025), rearranged so that it is accurate at both ends of t.

    c = K alpha / (1 - alpha) are the odds against noise of a p that is certain; z is the noisy id, x the true one.
    """
    assert draw.t_B is not None
    values_BLV = allowed(logits_BLV, mask_id)
    classes = values_BLV.shape[-1]
    noise = draw.t_B.double()[:, None]
    alpha = (1 - noise).clamp(min=2.0**-53)
    c = classes * alpha / noise
    log_p_BLV = values_BLV.log_softmax(-1).double()
    sum_BL = torch.log1p(c[..., None] * log_p_BLV.exp()).sum(-1)
    log_p_x, log_p_z = (log_p_BLV.gather(-1, ids[..., None])[..., 0].clamp(max=0) for ids in (draw.ids_BL, draw.hidden))
    p_z, excess = c * log_p_z.exp(), sum_BL - torch.log1p(c)
    rest = -c * torch.expm1(log_p_x) / (1 + c * log_p_x.exp())
    moved = (torch.log1p(p_z) - p_z / (1 + p_z)) / (alpha * noise) + torch.log1p(rest) / noise - excess / (classes * alpha)
    stayed = ((rest - torch.log1p(rest)) / alpha + rest / noise - excess / (classes * alpha)) / (1 + c)
    return torch.where(draw.scored_BL, torch.where(draw.hidden == draw.ids_BL, stayed, moved), 0.0)


def digit_nats(logits_BLV: Tensor, draw: Draw, code: DigitCode, *, carry_over: bool) -> Tensor:
    """nats_BL: the sum over masked digits of -log P_j, P_j the probability of all ids whose digit j is the true one."""
    values_BLV = allowed(logits_BLV, None)
    digits_BLJ, table_VJ = code.encode(draw.ids_BL), code.encode(torch.arange(code.size, device=logits_BLV.device))
    if carry_over:
        seen_BLJ = torch.where(draw.hidden, code.base, digits_BLJ)
        values_BLV = values_BLV.masked_fill(~code.possible(seen_BLJ), -torch.inf)
    total_BL = values_BLV.logsumexp(-1)
    nats_BL = torch.zeros_like(total_BL)
    for j in range(code.digits):
        agree_BLV = table_VJ[:, j] == digits_BLJ[..., j : j + 1]
        nats_BL = nats_BL + torch.where(draw.hidden[..., j], total_BL - values_BLV.masked_fill(~agree_BLV, -torch.inf).logsumexp(-1), 0.0)
    return nats_BL


def gaussian_nats(
    nats_BL: Tensor, mean_BLE: Tensor, clean_BLE: Tensor, gamma_B: Tensor, slope_B: Tensor, gamma_1: Tensor, *, reconstruct: bool
) -> Tensor:
    """nats_BL: RePlaid's reconstruction term, or its diffusion term and the prior. gamma and its slope are float64."""
    if reconstruct:
        return nats_BL
    density_B1 = (0.5 * snr(gamma_B) * slope_B).to(mean_BLE)[:, None]
    return density_B1 * (mean_BLE - clean_BLE).square().sum(-1) + prior_divergence(gamma_1, clean_BLE.shape[-1]).to(mean_BLE)
