"""MDLM, masked diffusion (Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models").

Forward process: at time t each token is independently replaced by the mask with probability 1 - alpha_t = (1 - e) t.
The denoiser x_theta(z_t) predicts tokens at masked positions; it never predicts the mask, and clean positions are carried over
(the paper's SUBS parameterisation), so that only masked positions contribute. The continuous-time bound (equation 7 of "Scaling Beyond
Masked Diffusion Language Models", Sahoo et al. 2026):

    -log p(x) <= E_t E_{z_t} sum_{masked l} -alpha'_t / (1 - alpha_t) * -log x_theta^l(z_t)[x^l],    weight = 1/t

Training minimises the low-variance form by default: weight 1 in place of 1/t (equation 8 there). It is not a likelihood; the NELBO of
the same draw is computed beside it.

What may be called a bound: with e = 0 and t uniform on (0, 1] the prior and reconstruction terms vanish and the expectation is the
NELBO. With the authors' e = 1e-3 and t in [1e-3, 1] it falls below it, by thousandths of a nat: an estimate.

The network gets conditioning 0: the mask count tells it the time.

Shape suffixes: B sequences, L positions, v this rank's share of the vocabulary.
"""

from typing import final

import numpy as np
from torch import Tensor

from pretrain.hf_model.diffusion_math import LogLinearSchedule, bound_time, masked_nelbo_weight, training_time
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.objectives.base import Corrupted, Label, Objective, TokenLoss, open_text
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.masked_terms import masked_loss, masked_nelbo
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary


@final
class MDLM(Objective):
    """Masked diffusion. targets: `ids` [L], `masked` [L], and the sample's `loss_weight` and `nelbo_weight`."""

    name = "mdlm"
    attention = Attention.FULL

    def __init__(self, vocabulary: Vocabulary, config: ObjectiveConfig) -> None:
        if vocabulary.mask_id is None:
            raise ValueError("masked diffusion needs a vocabulary with a mask id")
        super().__init__(vocabulary)
        self.config = config
        self.mask_id = vocabulary.mask_id

    def label(self, *, evaluation: bool) -> Label:
        """A bound only for evaluation draws over the whole of (0, 1] with e = 0."""
        return "bound" if self._whole_range(evaluation) else "estimate"

    def corrupt(
        self, tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, evaluation: bool, prompt: np.ndarray | None = None
    ) -> Corrupted:
        """Draw t, stratified over the global batch, and one uniform number per position. Padding and prompt are never masked and never counted."""
        u = noise.stratified_time("t")
        t = bound_time(u) if self._whole_range(evaluation) else training_time(u, self.config.time_eps)
        schedule = LogLinearSchedule(0.0 if self._whole_range(evaluation) else self.config.schedule_eps)
        masked_L = noise.stream("mask").random(len(tokens)) < schedule.one_minus_alpha(t)
        return self.noised(tokens, documents, t=t, masked_L=masked_L, prompt=prompt)

    def noised(
        self, tokens: np.ndarray, documents: np.ndarray, *, t: float, masked_L: np.ndarray, prompt: np.ndarray | None = None
    ) -> Corrupted:
        """The sample at time t with the mask at `masked_L`, except on padding and prompt."""
        text_L = open_text(documents, prompt)
        masked_L = masked_L & text_L
        nelbo_weight = masked_nelbo_weight(t)
        return Corrupted(
            inputs={
                "ids": np.where(masked_L, self.mask_id, tokens),
                "positions": np.arange(len(tokens)),
                "documents": documents,
                "conditioning": np.array(0.0, dtype=np.float32),
            },
            targets={
                "ids": tokens,
                "masked": masked_L,
                "loss_weight": np.array(1.0 if self.config.trains_low_variance else nelbo_weight),
                "nelbo_weight": np.array(nelbo_weight),
            },
            count=int(text_L.sum()),
            t=t,
        )

    def network_input(self, inputs: dict[str, Tensor], vocab: VocabShard) -> NetworkInput:
        """Partly masked ids under full attention."""
        return NetworkInput(
            ids_BL=inputs["ids"],
            positions_BL=inputs["positions"],
            conditioning_B=inputs["conditioning"],
            documents_BL=inputs.get("documents"),
            attention=self.attention,
        )

    def token_loss(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> TokenLoss:
        """The training form and the NELBO from one cross-entropy."""
        return masked_loss(logits_BLv, targets, vocab)

    def token_nelbo(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> Tensor:
        """Cross-entropy / t at masked positions, 0 elsewhere."""
        return masked_nelbo(logits_BLv, targets, vocab)

    def _whole_range(self, evaluation: bool) -> bool:
        return evaluation and self.config.evaluation == "bound"
