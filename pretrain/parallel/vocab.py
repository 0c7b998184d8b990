"""This rank's view of the vocabulary: the only place where an objective touches other ranks.

Under tensor parallelism the last stage holds columns [start, end) of the logits. Each reduction here costs one collective over the
tensor-parallel group and none at TP=1. The contract with autograd: every rank of the group computes the *same* loss from the same
replicated numbers, so

- a sum over the vocabulary adds the ranks' parts going forward, and its gradient is the same on every rank: backward is the identity;
- a replicated number that meets this rank's columns (log p = logits - logsumexp, z E^T) gets from them only this rank's part of its
  gradient. Pass it through `spread` first, whose backward adds the ranks' parts. Numbers without a gradient (alpha_t, weights) need no spread.

Shape suffixes: B sequences, L positions, v columns of this rank, E width of a table, G groups of ids; a leading 2 stacks two [B, L] tensors.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from pretrain.parallel.vocab_groups import LogGroupSums
from pretrain.parallel.vocab_mean import CrossEntropyAndMean
from pretrain.parallel.vocab_terms import Log1pTerms
from pretrain.parallel.vocabulary import Vocabulary

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13, where the old name warns."""


class VocabShard:
    """Columns [start, end) of the padded vocabulary; `group` is the tensor-parallel group, None at TP=1."""

    def __init__(self, vocabulary: Vocabulary, *, start: int, end: int, group: dist.ProcessGroup | None) -> None:
        if not 0 <= start < end <= vocabulary.padded_size:
            raise ValueError(f"columns [{start}, {end}) are not within the padded vocabulary of {vocabulary.padded_size}")
        self.vocabulary = vocabulary
        self.start = start
        self.end = end
        self.group = group
        self._first_padding = min(max(vocabulary.model_size - start, 0), end - start)
        mask_id = vocabulary.mask_id
        self._mask_column = mask_id - start if mask_id is not None and start <= mask_id < end else None

    @classmethod
    def whole(cls, vocabulary: Vocabulary) -> "VocabShard":
        """The view of a single rank that holds every column."""
        return cls(vocabulary, start=0, end=vocabulary.padded_size, group=None)

    def allowed(self, logits_BLv: Tensor) -> Tensor:
        """Logits in fp32 (fp64 stays) with -inf in the columns that can never win: padding (>= model size) and the mask id.

        Those columns have probability 0 and their logits get gradient 0, exactly and whatever is stored in them or comes back for them.
        """
        return _Allow.apply(logits_BLv, self)

    def logsumexp(self, values_BLv: Tensor) -> Tensor:
        """[B, L] over the whole vocabulary, from one all-gather of each rank's own log-sum-exp. A rank may hold nothing but -inf."""
        return _LogSumExp.apply(values_BLv, self)

    def at(self, values_BLv: Tensor, index_BL: Tensor) -> Tensor:
        """[B, L]: the value in column `index_BL` (a global id), whichever rank holds it; 0 for an id that no rank holds."""
        column_BL, here_BL = self._locate(index_BL)
        found_BL = values_BLv.gather(-1, column_BL.unsqueeze(-1)).squeeze(-1)
        return self._reduce(torch.where(here_BL, found_BL, 0.0))

    def sum(self, values_BLv: Tensor) -> Tensor:
        """[B, L]: sum over every column, forbidden ones included: their values must be ones that add nothing (0 for probabilities)."""
        return self._reduce(values_BLv.sum(-1))

    def expectation(self, weights_BLv: Tensor, table_vE: Tensor) -> Tensor:
        """[B, L, E]: sum over the vocabulary of weight times this rank's table rows; the rows' gradients are theirs in full."""
        return self._reduce(weights_BLv @ table_vE)

    def lookup(self, table_vE: Tensor, index_BL: Tensor) -> Tensor:
        """[B, L, E]: rows of a table of which this rank holds its own columns' rows; their gradients are theirs in full."""
        column_BL, here_BL = self._locate(index_BL)
        return self._reduce(torch.where(here_BL.unsqueeze(-1), table_vE[column_BL], 0.0))

    def spread(self, values: Tensor) -> Tensor:
        """A replicated tensor of any shape, about to meet this rank's columns: itself forward, the sum over ranks of its gradient backward."""
        if self.group is None:
            return values
        return _Spread.apply(values, self.group)

    def log_softmax(self, values_BLv: Tensor) -> Tensor:
        """[B, L, v]: this rank's columns of log p."""
        return values_BLv - self.spread(self.logsumexp(values_BLv)).unsqueeze(-1)

    def cross_entropy(self, logits_BLv: Tensor, index_BL: Tensor) -> Tensor:
        """[B, L]: -log p(index) in nats over the allowed columns; +inf where `index_BL` is a forbidden column.

        Equals `logsumexp(allowed(logits)) - at(allowed(logits), index)`, but saves only the logits it was given (bf16 stays bf16)
        and costs one collective: fp32 copies of the slice live within this call and within its backward.
        """
        return _CrossEntropy.apply(logits_BLv, index_BL, self)

    def cross_entropy_and_mean(
        self, logits_BLv: Tensor, evidence_BLE: Tensor | None, table_vE: Tensor, index_BL: Tensor, learns_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """nats_BL and mean_BLE: -log p(index), and the table's mean row under p, for p = softmax(logits + evidence . table^T).

        evidence_BLE is replicated (None: nothing is added); table_vE holds this rank's rows. Where `learns_B` is False no gradient reaches
        the table from that sequence; everything else is differentiated as usual. One collective, and one more backward for the evidence.
        """
        evidence_BLE = None if evidence_BLE is None else self.spread(evidence_BLE)
        return CrossEntropyAndMean.apply(logits_BLv, evidence_BLE, table_vE, index_BL, learns_B, self)

    def log1p_terms(self, logits_BLv: Tensor, log_scale_B: Tensor, first_BL: Tensor, second_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L] each: log p(first), log p(second), and sum over the vocabulary of log(1 + scale * p), with p the softmax of the allowed logits.

        A forbidden id has log p = -inf and adds nothing to the sum. Only the given logits are saved, as in `cross_entropy`; `log_scale_B`
        is a number without gradient, up to about 80 in fp32.
        """
        first_BL, second_BL, sum_BL = Log1pTerms.apply(logits_BLv, log_scale_B, torch.stack((first_BL, second_BL)), self)
        return first_BL, second_BL, sum_BL

    def log_group_sums(
        self, logits_BLv: Tensor, members_vG: Tensor, index_BL: Tensor, barred_BLG: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """([B, L, G], [B, L]): for each group of ids the log of the sum of exp(logit) over its members without `index_BL`, and the logit of
        `index_BL` itself, so that a digit's probability never rests on one minus a rounded number.

        members_vG holds 1 where this rank's id belongs to the group, else 0. An id that belongs to a group marked in barred_BLG counts for
        nothing at that position; `index_BL` must not be such an id. A group without members has a finite log of less than -1e29.
        Saves only the given logits, and costs one collective: two fp32 copies of the slice live within its backward.
        """
        return LogGroupSums.apply(logits_BLv, members_vG, index_BL, barred_BLG, self)

    def _reduce(self, partial: Tensor) -> Tensor:
        if self.group is None:
            return partial
        return _Reduce.apply(partial, self.group)

    def _locate(self, index_BL: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's column for each id (0 where another rank holds it), and whether this rank holds it."""
        here_BL = (index_BL >= self.start) & (index_BL < self.end)
        return torch.where(here_BL, index_BL - self.start, 0), here_BL

    def _copy(self, logits_BLv: Tensor) -> Tensor:
        """The allowed logits in a fresh buffer, outside autograd."""
        dtype = torch.promote_types(logits_BLv.dtype, torch.float32)
        return self._fill_forbidden(logits_BLv.to(dtype, copy=True), -torch.inf)

    def _fill_forbidden(self, values_BLv: Tensor, value: float) -> Tensor:
        """In place. Forbidden columns are a tail and one more, so no mask over the vocabulary is read."""
        values_BLv[..., self._first_padding :] = value
        if self._mask_column is not None:
            values_BLv[..., self._mask_column] = value
        return values_BLv

    def _gather(self, part: Tensor) -> Tensor:
        """[ranks, ...]: every rank's `part`."""
        if self.group is None:
            return part.unsqueeze(0)
        ranks = dist.get_world_size(self.group)
        parts = part.new_empty(ranks * part.shape[0], *part.shape[1:])  # gloo wants the parts one after another along the first axis
        _all_gather(parts, part.contiguous(), group=self.group)
        return parts.unflatten(0, (ranks, -1))


class _Allow(Function):
    """Fill forbidden columns with -inf forward and their gradient with 0 backward."""

    @staticmethod
    def forward(ctx: Any, logits_BLv: Tensor, vocab: VocabShard) -> Tensor:
        ctx.vocab, ctx.dtype = vocab, logits_BLv.dtype
        return vocab._copy(logits_BLv)

    @staticmethod
    def backward(ctx: Any, gradient_BLv: Tensor) -> tuple[Tensor, None]:
        return ctx.vocab._fill_forbidden(gradient_BLv.to(ctx.dtype, copy=True), 0.0), None


class _LogSumExp(Function):
    """d logsumexp / d value = exp(value - logsumexp): of finite numbers even on a rank whose own log-sum-exp is -inf."""

    @staticmethod
    def forward(ctx: Any, values_BLv: Tensor, vocab: VocabShard) -> Tensor:
        total_BL = vocab._gather(values_BLv.logsumexp(-1)).logsumexp(0)
        ctx.save_for_backward(values_BLv, total_BL)
        return total_BL

    @staticmethod
    def backward(ctx: Any, gradient_BL: Tensor) -> tuple[Tensor, None]:
        values_BLv, total_BL = ctx.saved_tensors
        return (values_BLv - total_BL.unsqueeze(-1)).exp_().mul_(gradient_BL.unsqueeze(-1)), None


class _CrossEntropy(Function):
    """logsumexp - value at the index, recomputing the fp32 softmax backward instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, logits_BLv: Tensor, index_BL: Tensor, vocab: VocabShard) -> Tensor:
        values_BLv = vocab._copy(logits_BLv)
        column_BL, here_BL = vocab._locate(index_BL)
        found_BL = torch.where(here_BL, values_BLv.gather(-1, column_BL.unsqueeze(-1)).squeeze(-1), 0.0)
        parts_r2BL = vocab._gather(torch.stack((_logsumexp_in_place(values_BLv), found_BL)))
        total_BL = parts_r2BL[:, 0].logsumexp(0)
        ctx.vocab = vocab
        ctx.save_for_backward(logits_BLv, index_BL, total_BL)
        return total_BL - parts_r2BL[:, 1].sum(0)

    @staticmethod
    def backward(ctx: Any, gradient_BL: Tensor) -> tuple[Tensor, None, None]:
        logits_BLv, index_BL, total_BL = ctx.saved_tensors
        column_BL, here_BL = ctx.vocab._locate(index_BL)
        # One fp32 buffer, written in place. Forbidden columns hold anything, infinity included, until they are filled below.
        gradient_BLv = logits_BLv.to(total_BL.dtype, copy=True).sub_(total_BL.unsqueeze(-1)).exp_().mul_(gradient_BL.unsqueeze(-1))
        gradient_BLv.scatter_add_(-1, column_BL.unsqueeze(-1), torch.where(here_BL, -gradient_BL, 0.0).unsqueeze(-1))
        return ctx.vocab._fill_forbidden(gradient_BLv, 0.0).to(logits_BLv.dtype), None, None


def _logsumexp_in_place(values_BLv: Tensor) -> Tensor:
    """logsumexp over the last axis, which overwrites its argument: torch's own takes a second buffer of that size."""
    highest_BL1 = values_BLv.amax(-1, keepdim=True)
    highest_BL1.masked_fill_(highest_BL1 == -torch.inf, 0.0)  # a rank may hold nothing but forbidden columns
    return values_BLv.sub_(highest_BL1).exp_().sum(-1).log_().add_(highest_BL1.squeeze(-1))


class _Reduce(Function):
    """Sum over the group forward; the ranks' identical gradients pass through backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Spread(Function):
    """Identity forward; sum over the group backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
