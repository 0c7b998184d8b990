"""Reductions over the vocabulary that a mixture with the uniform distribution needs, without keeping anything of the slice's size.

With log p = logits - logsumexp and any scale c >= 0, the smoothed probabilities 1 + c p_v have

    S = sum_v log(1 + c p_v),     dS/dlogit_k = h_k - p_k sum_v h_v,     h_v = c p_v / (1 + c p_v).

Forward turns one fp32 copy of the slice into c p in place: c p_v = exp(logit_v - top) * exp(top - logsumexp + log c), so there is one
exponential, no second buffer and, as c p <= c, no overflow. Backward recomputes from y = log(c p): p = exp(y) / c and h = sigmoid(y).

Shape suffixes: B sequences, L positions, v columns of this rank; 2, 3 and 4 stack tensors [B, L]; a leading r stacks the ranks'.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

if TYPE_CHECKING:
    from pretrain.parallel.vocab import VocabShard


class Log1pTerms(Function):
    """[3, B, L]: log p at two ids, and sum_v log(1 + c p_v). Two collectives forward, one backward."""

    @staticmethod
    def forward(ctx: Any, logits_BLv: Tensor, log_scale_B: Tensor, index_2BL: Tensor, vocab: "VocabShard") -> Tensor:
        values_BLv = vocab._copy(logits_BLv)
        column_2BL, here_2BL = vocab._locate(index_2BL)
        found_2BL = torch.stack([values_BLv.gather(-1, column_BL.unsqueeze(-1)).squeeze(-1) for column_BL in column_2BL])
        # A rank may hold nothing but -inf: a finite top keeps its parts at exp(-inf) = 0.
        top_BL = values_BLv.amax(-1).clamp_(min=torch.finfo(values_BLv.dtype).min)
        total_BL = values_BLv.sub_(top_BL.unsqueeze(-1)).exp_().sum(-1)
        parts_r4BL = vocab._gather(torch.cat((torch.where(here_2BL, found_2BL, 0.0), torch.stack((top_BL, total_BL)))))
        # Relative to the largest logit of all ranks: its log p, and so 1 - p of a confident prediction, keeps full precision.
        highest_BL = parts_r4BL[:, 2].amax(0)
        log_total_BL = (parts_r4BL[:, 3] * (parts_r4BL[:, 2] - highest_BL).exp()).sum(0).log()
        log_scale_BL = log_scale_B.to(log_total_BL.dtype).unsqueeze(-1).expand_as(log_total_BL)
        factor_BL = (top_BL - highest_BL - log_total_BL + log_scale_BL).exp()
        sum_BL = vocab._gather(values_BLv.mul_(factor_BL.unsqueeze(-1)).log1p_().sum(-1)).sum(0)
        ctx.vocab = vocab
        ctx.save_for_backward(logits_BLv, index_2BL, highest_BL, log_total_BL, log_scale_BL)
        return torch.cat((parts_r4BL[:, :2].sum(0) - highest_BL - log_total_BL, sum_BL.unsqueeze(0)))

    @staticmethod
    def backward(ctx: Any, gradient_3BL: Tensor) -> tuple[Tensor, None, None, None]:
        vocab: VocabShard = ctx.vocab
        logits_BLv, index_2BL, highest_BL, log_total_BL, log_scale_BL = ctx.saved_tensors
        y_BLv = logits_BLv.to(highest_BL.dtype, copy=True).sub_(highest_BL.unsqueeze(-1))
        gradient_BLv = y_BLv.sub_((log_total_BL - log_scale_BL).unsqueeze(-1))
        vocab._fill_forbidden(gradient_BLv, -torch.inf)
        smooth_BLv = gradient_BLv.sigmoid()  # h
        softmax_part_BL = gradient_3BL[2] * vocab._gather(smooth_BLv.sum(-1)).sum(0) + gradient_3BL[0] + gradient_3BL[1]
        gradient_BLv.exp_().mul_((-softmax_part_BL * (-log_scale_BL).exp()).unsqueeze(-1))
        gradient_BLv.addcmul_(smooth_BLv, gradient_3BL[2].unsqueeze(-1))
        for column_BL, here_BL, part_BL in zip(*vocab._locate(index_2BL), gradient_3BL[:2], strict=True):
            gradient_BLv.scatter_add_(-1, column_BL.unsqueeze(-1), torch.where(here_BL, part_BL, 0.0).unsqueeze(-1))
        return vocab._fill_forbidden(gradient_BLv, 0.0).to(logits_BLv.dtype), None, None, None
