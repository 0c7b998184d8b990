"""MDM-Prime-v2, masked diffusion over the digits of token ids (Chao et al. 2026, arXiv 2603.16077v1, which its authors have retracted).

Forward process (equation 4): a token id is written as J digits of base b in a shuffled order of ids (hf_model/digits.py), and at time t each
digit of each token is independently masked with probability 1 - alpha_t = (1 - e) t. The paper has e = 0. The network reads the digits and
predicts the token: p(v) over whole ids, where an id that contradicts a visible digit has probability 0 (`carry_over`, section 2.1). From it
the probability of the true value y_j of a masked digit j is the marginal P_j = sum of p(v) over the ids v whose digit j is y_j.

The bound. Two digits are almost never revealed at the same instant, so the reverse process reveals one digit at a time, each drawn from its
marginal, and the continuous-time NELBO is that of MDLM with digits for tokens:

    -log p(x) <= E_t E_{y_t} 1/t  sum_{tokens} sum_{masked digits j} -log P_j                                                    (marginal)

It equals the entropy for the Bayes-optimal denoiser, and for it alone; with e = 0 and t on (0, 1] it is a bound.

The paper's equation 5 has -log p(x^i) of the whole token, once, in place of the inner sum:

    E_t E_{y_t} 1/t  sum_{tokens with a masked digit} -log p(x^i)                                                                   (joint)

With the exact denoiser that is less than the sum of marginals by the total correlation of the token's masked digits, so it falls below
the entropy: by more the more digits there are, and mostly the better the ids are shuffled. It bounds nothing. It may be trained
(`loss=joint`) and reported with the authors' constants (`evaluation=authors`), as `not_a_likelihood`. The released code also scores tokens
without a masked digit; with carry-over their cross-entropy is exactly 0, and without it they are left out here.

Above t = `joint_mask_above` a token's digits are masked together (appendix A.4.2). The masks at different t are then no longer
those of one process, in which digits stay masked once they are: no number of such draws is a likelihood.

Numerics. The true id x is kept out of every sum over ids: with A = the log of the sum of exp(logit) over the other ids with digit j = y_j and
B = over those with another digit, -log P_j = -log sigmoid(logaddexp(A, logit_x) - B), right in both tails. Its gradient is
p(v) (1 - [digit_j(v) = y_j] / P_j).

The network gets conditioning 0: the mask count tells it the time.

Shape suffixes: B sequences, L positions, J digits of a token, A values of a digit, G the J * A pairs (digit, value), v this rank's share of
the vocabulary.
"""

from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.hf_model.diffusion_math import LogLinearSchedule, bound_time, masked_nelbo_weight, training_time
from pretrain.hf_model.digits import DigitCode
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.objectives.base import Corrupted, Label, Objective, TokenLoss, open_text
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.rules import check_digits
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary


@final
class MDMPrime(Objective):
    """Masked diffusion over digits. targets: `ids` [L], `masked` [L, J], and the sample's `weight` and `joint` (which form is its nelbo).

    Raises UserError where the digits do not fit the vocabulary.
    """

    name = "mdm_prime"
    attention = Attention.FULL

    def __init__(self, vocabulary: Vocabulary, config: ObjectiveConfig) -> None:
        if vocabulary.mask_id is not None or vocabulary.model_size != vocabulary.tokenizer_size:
            raise ValueError("the mask of MDM-Prime is a digit: its vocabulary is the tokenizer's, without a mask id")
        super().__init__(vocabulary)
        check_digits(config.mdm_prime, vocabulary.model_size)
        self.config, self.prime = config, config.mdm_prime
        self.code = DigitCode(vocabulary.model_size, base=self.prime.base, digits=self.prime.digits, shuffle_seed=self.prime.shuffle_seed)

    def label(self, *, evaluation: bool) -> Label:
        """A bound only for evaluation draws over the whole of (0, 1] with e = 0 and every digit masked on its own."""
        if self.prime.joint_mask_above is not None or self._scores_jointly(evaluation):
            return "not_a_likelihood"
        return "bound" if evaluation else "estimate"

    def corrupt(
        self, tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, evaluation: bool, prompt: np.ndarray | None = None
    ) -> Corrupted:
        """Draw t, stratified over the global batch, and a uniform number per digit (per token above `joint_mask_above`)."""
        u = noise.stratified_time("t")
        whole_range = evaluation and self.config.evaluation == "bound"
        t = bound_time(u) if whole_range else training_time(u, self.config.time_eps)
        rate = LogLinearSchedule(0.0 if whole_range else self.config.schedule_eps).one_minus_alpha(t)
        together = self.prime.joint_mask_above is not None and t > self.prime.joint_mask_above
        drawn = noise.stream("mask").random((len(tokens), 1 if together else self.code.digits)) < rate
        masked_LJ = np.broadcast_to(drawn, (len(tokens), self.code.digits))
        return self.noised(tokens, documents, t=t, masked_LJ=masked_LJ, joint=self._scores_jointly(evaluation), prompt=prompt)

    def noised(
        self, tokens: np.ndarray, documents: np.ndarray, *, t: float, masked_LJ: np.ndarray, joint: bool = False, prompt: np.ndarray | None = None
    ) -> Corrupted:
        """The sample at time t with masked digits at `masked_LJ`, except on padding, which reads as id 0, and prompt. `joint`: the nelbo is
        the paper's."""
        text_L = open_text(documents, prompt)
        masked_LJ = masked_LJ & text_L[:, None]
        ids = np.where(documents >= 0, tokens, 0)
        return Corrupted(
            inputs={
                "digits": np.where(masked_LJ, self.code.base, self.code.table_VJ[ids]),
                "positions": np.arange(len(tokens)),
                "documents": documents,
                "conditioning": np.array(0.0, dtype=np.float32),
            },
            targets={"ids": ids, "masked": masked_LJ, "weight": np.array(masked_nelbo_weight(t)), "joint": np.array(joint)},
            count=int(text_L.sum()),
            t=t,
        )

    def network_input(self, inputs: dict[str, Tensor], vocab: VocabShard) -> NetworkInput:
        """Partly masked digits under full attention."""
        return NetworkInput(
            digits_BLJ=inputs["digits"],
            positions_BL=inputs["positions"],
            conditioning_B=inputs["conditioning"],
            documents_BL=inputs.get("documents"),
            attention=self.attention,
        )

    def token_loss(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> TokenLoss:
        """1/t times the marginal form, or the joint one where that is trained; the NELBO of the same draw beside it."""
        marginal_BL, joint_BL = self._nats(logits_BLv, targets, vocab)
        trained_BL = joint_BL if self.prime.loss == "joint" else marginal_BL
        weight_B = targets["weight"].to(trained_BL)
        return TokenLoss(loss_B=trained_BL.sum(-1) * weight_B, nelbo_B=_nelbo(marginal_BL, joint_BL, targets).detach().sum(-1))

    def token_nelbo(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> Tensor:
        """The marginal form / t; the joint form / t for draws of the authors' evaluation."""
        return _nelbo(*self._nats(logits_BLv, targets, vocab), targets)

    def _nats(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> tuple[Tensor, Tensor]:
        """([B, L], [B, L]): the sum over masked digits of -log P_j, and -log p(x) where a digit is masked; before the weight."""
        masked_BLJ, ids_BL = targets["masked"], targets["ids"]
        scored_BL = masked_BLJ.any(-1)
        if self.code.digits == 1:  # the digit is the token, and as many groups as ids would be a square table
            nats_BL = torch.where(scored_BL, vocab.cross_entropy(logits_BLv, ids_BL), 0.0)
            return nats_BL, nats_BL
        digits_BLJ1 = self.code.encode(ids_BL).unsqueeze(-1)
        own_BLJA = digits_BLJ1 == torch.arange(self.code.base, device=ids_BL.device)
        contradicts_BLG = (~own_BLJA & ~masked_BLJ.unsqueeze(-1)).flatten(-2) if self.prime.carry_over else None
        members_vG = self.code.members(vocab.start, vocab.end, ids_BL.device)
        logs_BLG, true_BL = vocab.log_group_sums(logits_BLv, members_vG, ids_BL, contradicts_BLG)
        logs_BLJA = logs_BLG.unflatten(-1, (self.code.digits, self.code.base))
        agree_BLJ = torch.logaddexp(logs_BLJA.gather(-1, digits_BLJ1).squeeze(-1), true_BL.unsqueeze(-1))
        differ_BLJ = logs_BLJA.masked_fill(own_BLJA, -torch.inf).logsumexp(-1)
        marginal_BL = torch.where(masked_BLJ, -F.logsigmoid(agree_BLJ - differ_BLJ), 0.0).sum(-1)
        others_BL = logs_BLJA[:, :, 0].logsumexp(-1)  # all ids but the true one, by their first digit
        return marginal_BL, torch.where(scored_BL, -F.logsigmoid(true_BL - others_BL), 0.0)

    def _scores_jointly(self, evaluation: bool) -> bool:
        return evaluation and self.config.evaluation == "authors"


def _nelbo(marginal_BL: Tensor, joint_BL: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return torch.where(targets["joint"].unsqueeze(-1), joint_BL, marginal_BL) * targets["weight"].to(marginal_BL).unsqueeze(-1)
