"""Cross-entropy and mean table row of one softmax, whose logits meet the same table: what a diffusion over token embeddings needs.

With a = logits + evidence . table^T and p = softmax(a) over the allowed columns: nats = logsumexp(a) - a[index] and mean = p . table.
One fp32 buffer of the size of the logits going forward and two going backward; autograd keeps the logits it was given (bf16 stays bf16)
and nothing else of that size. The products are in full fp32: a mean in TF32 would be off by 1e-3.
Backward, with c the gradient of nats and g that of mean:

    d a_v = p_v (c + table_v . g - mean . g) - c [v = index],    d evidence = d a . table,    d table = p^T g + d a^T evidence

Shape suffixes: B sequences, L positions, N = B L, v columns of this rank, E width of the table, r ranks.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from pretrain.parallel.vocab_groups import full_precision

if TYPE_CHECKING:
    from pretrain.parallel.vocab import VocabShard


class CrossEntropyAndMean(Function):
    """See `VocabShard.cross_entropy_and_mean`. d evidence is this rank's columns' part: the caller spreads the evidence."""

    @staticmethod
    def forward(
        ctx: Any, logits_BLv: Tensor, evidence_BLE: Tensor | None, table_vE: Tensor, index_BL: Tensor, learns_B: Tensor, vocab: "VocabShard"
    ) -> tuple[Tensor, Tensor]:
        with full_precision(logits_BLv.device):
            values_Nv, table = _logits(vocab, logits_BLv, evidence_BLE, table_vE)
        column_N, here_N = (x.flatten() for x in vocab._locate(index_BL))
        found_N = torch.where(here_N, values_Nv.gather(-1, column_N.unsqueeze(-1)).squeeze(-1), 0.0)
        peak_N = values_Nv.amax(-1)
        reached_N = torch.where(peak_N.isneginf(), 0.0, peak_N)  # a rank may hold nothing but forbidden columns: its mass is 0, not nan
        mass_N = values_Nv.sub_(reached_N.unsqueeze(-1)).exp_().sum(-1)
        with full_precision(logits_BLv.device):
            own_NE = values_Nv @ table
        # Every rank's log-mass, value at the index, and unnormalised sum, in one collective.
        parts_rNC = vocab._gather(torch.cat((torch.stack((peak_N, mass_N, found_N), -1), own_NE), -1))
        peaks_rN, masses_rN = parts_rNC[..., 0], parts_rNC[..., 1]
        top_N = peaks_rN.amax(0)
        share_rN = (peaks_rN - top_N).exp()
        total_mass_N = (share_rN * masses_rN).sum(0)
        total_N = top_N + total_mass_N.log()
        mean_NE = (share_rN.unsqueeze(-1) * parts_rNC[..., 3:]).sum(0) / total_mass_N.unsqueeze(-1)
        ctx.vocab = vocab
        ctx.save_for_backward(logits_BLv, evidence_BLE, table_vE, index_BL, learns_B, total_N, mean_NE)
        return (total_N - parts_rNC[..., 2].sum(0)).view_as(index_BL), mean_NE.view(*index_BL.shape, -1)

    @staticmethod
    def backward(ctx: Any, c_BL: Tensor, g_BLE: Tensor) -> tuple[Tensor | None, ...]:
        with full_precision(c_BL.device):
            return *_gradients(ctx.vocab, c_BL.flatten(), g_BLE.flatten(0, 1), *ctx.saved_tensors), None, None, None


def _gradients(
    vocab: "VocabShard", c_N: Tensor, g_NE: Tensor, logits_BLv: Tensor, evidence_BLE: Tensor | None, table_vE: Tensor, index_BL: Tensor,
    learns_B: Tensor, total_N: Tensor, mean_NE: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Of the logits, the evidence and the table."""
    learns_N1 = learns_B.repeat_interleave(index_BL.shape[1]).unsqueeze(-1)
    p_Nv, table = _logits(vocab, logits_BLv, evidence_BLE, table_vE)
    p_Nv.sub_(total_N.unsqueeze(-1)).exp_()
    table_gradient_vE = p_Nv.T @ (g_NE * learns_N1)
    da_Nv = p_Nv.mul_(torch.addmm((c_N - (mean_NE * g_NE).sum(-1)).unsqueeze(-1), g_NE, table.T))
    column_N, here_N = (x.flatten() for x in vocab._locate(index_BL))
    da_Nv.scatter_add_(-1, column_N.unsqueeze(-1), torch.where(here_N, -c_N, 0.0).unsqueeze(-1))
    vocab._fill_forbidden(da_Nv, 0.0)
    evidence_gradient_BLE = None
    if evidence_BLE is not None:
        table_gradient_vE.addmm_(da_Nv.T, evidence_BLE.to(da_Nv).flatten(0, 1) * learns_N1)
        evidence_gradient_BLE = (da_Nv @ table).view_as(evidence_BLE).to(evidence_BLE.dtype)
    return da_Nv.view_as(logits_BLv).to(logits_BLv.dtype), evidence_gradient_BLE, table_gradient_vE.to(table_vE.dtype)


def _logits(vocab: "VocabShard", logits_BLv: Tensor, evidence_BLE: Tensor | None, table_vE: Tensor) -> tuple[Tensor, Tensor]:
    """logits + evidence . table^T in a fresh fp32 (fp64 stays) buffer [N, v], -inf in forbidden columns; and the table in that type."""
    dtype = torch.promote_types(logits_BLv.dtype, torch.float32)
    table = table_vE.to(dtype)
    values_Nv = logits_BLv.to(dtype, copy=True, memory_format=torch.contiguous_format).flatten(0, 1)
    if evidence_BLE is not None:
        values_Nv.addmm_(evidence_BLE.to(dtype).flatten(0, 1), table.T)
    return vocab._fill_forbidden(values_Nv, -torch.inf), table
