"""What MDLM and Eso-LM share: the cross-entropy of masked positions, and the two weights of a sample.

targets: `ids` [L] and `masked` [L], the scored positions; the sample's `loss_weight` and `nelbo_weight`.
Shape suffixes: B sequences, L positions, v this rank's share of the vocabulary.
"""

import torch
from torch import Tensor

from pretrain.objectives.base import Tensors, TokenLoss
from pretrain.parallel.vocab import VocabShard


def masked_loss(logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> TokenLoss:
    """The training form and the NELBO from one cross-entropy."""
    nats_B = masked_cross_entropy(logits_BLv, targets, vocab).sum(-1)
    return TokenLoss(loss_B=nats_B * targets["loss_weight"].to(nats_B), nelbo_B=nats_B.detach() * targets["nelbo_weight"].to(nats_B))


def masked_nelbo(logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> Tensor:
    """nats_BL: weighted cross-entropy at masked positions, 0 elsewhere."""
    nats_BL = masked_cross_entropy(logits_BLv, targets, vocab)
    return nats_BL * targets["nelbo_weight"].to(nats_BL).unsqueeze(-1)


def masked_cross_entropy(logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> Tensor:
    """nats_BL, without weights."""
    # `where`, not a product: a padding id may be one that the model cannot predict, whose cross-entropy is infinite.
    return torch.where(targets["masked"], vocab.cross_entropy(logits_BLv, targets["ids"]), 0.0)
