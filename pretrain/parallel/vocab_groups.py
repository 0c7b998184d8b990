"""Sums over groups of ids, many groups at once: `VocabShard.log_group_sums`.

Two skinny matrix products with the table of members make the sums forward and their gradient backward. Between the two only the logits are
kept, as they were given.

Range in fp32: ids are weighed against the largest of their position as exp(value - largest + 64), so that values down to 150 nats below it
still count. A group that lies lower as a whole has the sum 0, whose logarithm is given as a large negative number: everything stays finite.

Shape suffixes: B sequences, L positions, v columns of this rank, G groups; a trailing 1 is kept for broadcasting.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

if TYPE_CHECKING:
    from pretrain.parallel.vocab import VocabShard

_SHIFT = 64.0
_FLOOR = -86.0
_BARRED = -1e30
"""Added to the logits of an id for each of its barred groups: far below every logit, and finite, because 0 times infinity is no number."""
_LOWEST = -1e32


class LogGroupSums(Function):
    """Forward: (logs_BLG, found_BL). Backward: each id collects the gradients of its groups, weighted by its share of their sums."""

    @staticmethod
    def forward(
        ctx: Any, logits_BLv: Tensor, members_vG: Tensor, index_BL: Tensor, barred_BLG: Tensor | None, vocab: "VocabShard"
    ) -> tuple[Tensor, Tensor]:
        column_BL, here_BL = vocab._locate(index_BL)
        with full_precision(logits_BLv.device):
            values_BLv = _values(logits_BLv, members_vG, barred_BLG, vocab)
            found_BL = torch.where(here_BL, values_BLv.gather(-1, column_BL.unsqueeze(-1)).squeeze(-1), 0.0)
            largest_BL1 = _weigh(values_BLv, column_BL, here_BL, None)
            sums_BLG = values_BLv @ members_vG.to(values_BLv.dtype)
        logs_BLG = sums_BLG.log_().add_(largest_BL1 - _SHIFT)
        parts_rBLG = vocab._gather(torch.cat((logs_BLG, found_BL.unsqueeze(-1)), -1))
        logs_BLG = parts_rBLG[..., :-1].logsumexp(0).clamp_min_(_LOWEST)
        ctx.vocab = vocab
        ctx.save_for_backward(logits_BLv, members_vG, index_BL, barred_BLG, largest_BL1, logs_BLG)
        return logs_BLG, parts_rBLG[..., -1].sum(0)

    @staticmethod
    def backward(ctx: Any, gradient_BLG: Tensor, gradient_BL: Tensor) -> tuple[Tensor | None, ...]:
        logits_BLv, members_vG, index_BL, barred_BLG, largest_BL1, logs_BLG = ctx.saved_tensors
        column_BL, here_BL = ctx.vocab._locate(index_BL)
        # The bound acts only on groups that lie 128 nats and more below the largest: without it their factor could overflow.
        factor_BLG = gradient_BLG * (largest_BL1 - _SHIFT - logs_BLG).clamp_max_(_SHIFT).exp_()
        with full_precision(logits_BLv.device):
            values_BLv = _values(logits_BLv, members_vG, barred_BLG, ctx.vocab)
            _weigh(values_BLv, column_BL, here_BL, largest_BL1)
            gradient_BLv = (factor_BLG @ members_vG.to(values_BLv.dtype).T).mul_(values_BLv)
        gradient_BLv.scatter_add_(-1, column_BL.unsqueeze(-1), torch.where(here_BL, gradient_BL, 0.0).unsqueeze(-1))
        return gradient_BLv.to(logits_BLv.dtype), None, None, None, None


def _values(logits_BLv: Tensor, members_vG: Tensor, barred_BLG: Tensor | None, vocab: "VocabShard") -> Tensor:
    """The allowed logits in a fresh buffer, barred ids far below the others."""
    values_BLv = vocab._copy(logits_BLv.contiguous())
    if barred_BLG is not None:
        barred_nG = barred_BLG.to(values_BLv.dtype).flatten(0, -2)
        values_BLv.view(-1, values_BLv.shape[-1]).addmm_(barred_nG, members_vG.to(values_BLv.dtype).T, alpha=_BARRED)
    return values_BLv


def _weigh(values_BLv: Tensor, column_BL: Tensor, here_BL: Tensor, largest_BL1: Tensor | None) -> Tensor:
    """In place: values to exp(value - largest + shift), 0 for the column that is left out. Returns the largest of the others."""
    column_BL1 = column_BL.unsqueeze(-1)
    left_out_BL1 = torch.where(here_BL.unsqueeze(-1), -torch.inf, values_BLv.gather(-1, column_BL1))
    values_BLv.scatter_(-1, column_BL1, left_out_BL1)
    if largest_BL1 is None:
        largest_BL1 = values_BLv.amax(-1, keepdim=True).clamp_min_(_LOWEST)
    # On CPUs exp is ten times slower where it underflows, and most ids are barred where most digits are visible: keep it within its range.
    values_BLv.sub_(largest_BL1 - _SHIFT).clamp_min_(_FLOOR).exp_()
    torch.threshold_(values_BLv, 1.0001 * math.exp(_FLOOR), 0.0)
    return largest_BL1


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """fp32 products in fp32, whatever the process allows elsewhere: TF32 would cost 1e-3 nats per digit, autocast more."""
    with torch.autocast(device.type, enabled=False):
        if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch < 2.9 has one switch for all backends
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)
            return
        # The one switch for all raises an error where somebody has set these two apart.
        switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        allowed = [switch.fp32_precision for switch in switches]
        try:
            for switch in switches:
                switch.fp32_precision = "ieee"
            yield
        finally:
            for switch, precision in zip(switches, allowed, strict=True):
                switch.fp32_precision = precision
