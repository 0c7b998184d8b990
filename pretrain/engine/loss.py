"""The loss of the last stage, computed in slices along the sequence so that fp32 logits exist for one slice at a time.

The gradient of each slice is written over the slice's own logits, so memory is the logits once, plus one slice in fp32.

Shape suffixes: B sequences, L positions, v this rank's share of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.objectives.base import Objective
from pretrain.parallel.vocab import VocabShard


@dataclass(frozen=True)
class SampleSums:
    """Per-sequence sums of a micro-batch, detached, fp32: loss, likelihood term, and the squared norm of the loss' gradient at the logits
    (this rank's columns, per unit of summed loss)."""

    loss_B: Tensor
    nelbo_B: Tensor
    squared_gradient_B: Tensor


def slice_targets(targets: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Targets of positions [start, stop): arrays with a sequence axis are cut, per-sample scalars stay whole."""
    return {key: value[:, start:stop] if value.dim() > 1 else value for key, value in targets.items()}


def training_loss(
    objective: Objective, logits_LBv: Tensor, targets: dict[str, Tensor], vocab: VocabShard, *, scale: float, chunk: int
) -> tuple[Tensor, SampleSums]:
    """scale * (sum of the loss over the micro-batch), differentiable in the logits, the objective's parameters and its leaves among the targets,
    and the sums for telemetry. Overwrites `logits_LBv`."""
    parameters: list[Tensor] = [p for p in objective.modules().parameters() if p.requires_grad]
    parameters += [target for target in targets.values() if target.requires_grad]
    loss, loss_B, nelbo_B, squared_B = _SlicedLoss.apply(logits_LBv, objective, targets, vocab, scale, chunk, *parameters)
    return loss, SampleSums(loss_B, nelbo_B, squared_B)


@torch.no_grad()
def evaluation_nats(objective: Objective, logits_LBv: Tensor, targets: dict[str, Tensor], vocab: VocabShard, *, chunk: int) -> Tensor:
    """nats_B, float64: each sequence's sum of `token_nelbo`."""
    total_B = torch.zeros(logits_LBv.shape[1], dtype=torch.float64, device=logits_LBv.device)
    for start in range(0, logits_LBv.shape[0], chunk):
        stop = min(start + chunk, logits_LBv.shape[0])
        nats_BL = objective.token_nelbo(logits_LBv[start:stop].transpose(0, 1), slice_targets(targets, start, stop), vocab)
        total_B += nats_BL.double().sum(1)
    return total_B


class _SlicedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_LBv: Tensor,
        objective: Objective,
        targets: dict[str, Tensor],
        vocab: VocabShard,
        scale: float,
        chunk: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sums: list[Tensor] = []
        gradients = [torch.zeros_like(p) for p in parameters]
        for start in range(0, logits_LBv.shape[0], chunk):
            stop = min(start + chunk, logits_LBv.shape[0])
            with torch.enable_grad():
                piece = logits_LBv[start:stop].detach().requires_grad_()
                loss = objective.token_loss(piece.transpose(0, 1), slice_targets(targets, start, stop), vocab)
                pieces = torch.autograd.grad(loss.loss_B.sum() * scale, [piece, *parameters], allow_unused=True)
            gradient = pieces[0]
            # The norm of each position first: a copy of the gradient in fp32 would be the largest buffer of all.
            squared_B = torch.linalg.vector_norm(gradient, dim=2).float().div(scale).square().sum(0)
            logits_LBv[start:stop].copy_(gradient)
            for total, part in zip(gradients, pieces[1:], strict=True):
                if part is not None:
                    total += part
            sums.append(torch.stack([loss.loss_B.detach().float(), loss.nelbo_B.detach().float(), squared_B]))
        loss_B, nelbo_B, squared_B = torch.stack(sums).sum(0)
        ctx.save_for_backward(logits_LBv, *gradients)
        ctx.mark_non_differentiable(loss_B, nelbo_B, squared_B)
        return loss_B.sum() * scale, loss_B, nelbo_B, squared_B

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Any, ...]:
        gradient_LBv, *gradients = ctx.saved_tensors
        return (gradient_LBv.mul_(grad_loss), None, None, None, None, None, *(g * grad_loss for g in gradients))
