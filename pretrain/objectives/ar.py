"""Autoregression: the exact negative log-likelihood of the next token, under causal attention.

    -log p(x) = sum_i -log p(x_i | x_<i)    (equation 1 of "Scaling Beyond Masked Diffusion Language Models", Sahoo et al. 2026)

No noise. A DiT gets conditioning 0, so that its parameter count matches the diffusion models' (section 3 there).

Which positions are scored: all L. A window is L inputs and one token of look-ahead; position i predicts token i + 1, so windows that
follow each other predict every token of a stream once, except its very first. The authors' code has no look-ahead: it predicts L - 1
tokens of each block and never the first. Here a likelihood per token and a diffusion bound per token divide by the same L.

Document boundaries: the first token of a document is predicted from the end-of-document token before it. With document masks that
query still sees the document it ends, so each factor conditions on a function of the prefix: the product remains a normalised
distribution over streams, and the likelihood exact. Only targets that are padding are left out.

Shape suffixes: B sequences, L positions, v this rank's share of the vocabulary.
"""

from typing import final

import numpy as np
import torch
from torch import Tensor

from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.objectives.base import Corrupted, Label, Objective, TokenLoss, open_text
from pretrain.objectives.config import ObjectiveConfig
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary


@final
class AR(Objective):
    """Next-token prediction. targets: `ids` [L] the next tokens, `scored` [L] whether each is text."""

    name = "ar"
    attention = Attention.CAUSAL
    lookahead = 1
    random_length = False

    def __init__(self, vocabulary: Vocabulary, config: ObjectiveConfig) -> None:
        super().__init__(vocabulary)
        self.config = config

    def label(self, *, evaluation: bool) -> Label:
        """Exact, in training and evaluation alike."""
        return "exact"

    def corrupt(
        self, tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, evaluation: bool, prompt: np.ndarray | None = None
    ) -> Corrupted:
        """Shift by one; `noise` is not used. The count is the number of next tokens that are text and no prompt."""
        scored_L = open_text(documents, prompt)[1:]
        return Corrupted(
            inputs={
                "ids": tokens[:-1],
                "positions": np.arange(len(tokens) - 1),
                "documents": documents[:-1],
                "conditioning": np.array(0.0, dtype=np.float32),
            },
            targets={"ids": tokens[1:], "scored": scored_L},
            count=int(scored_L.sum()),
        )

    def network_input(self, inputs: dict[str, Tensor], vocab: VocabShard) -> NetworkInput:
        """Token ids under causal attention."""
        return NetworkInput(
            ids_BL=inputs["ids"],
            positions_BL=inputs["positions"],
            conditioning_B=inputs["conditioning"],
            documents_BL=inputs.get("documents"),
            attention=self.attention,
        )

    def token_loss(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> TokenLoss:
        """The negative log-likelihood is both the loss and the likelihood term."""
        nats_B = self.token_nelbo(logits_BLv, targets, vocab).sum(-1)
        return TokenLoss(loss_B=nats_B, nelbo_B=nats_B.detach())

    def token_nelbo(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> Tensor:
        """-log p(next token), 0 where it is padding."""
        return torch.where(targets["scored"], vocab.cross_entropy(logits_BLv, targets["ids"]), 0.0)
