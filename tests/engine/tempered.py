"""An objective with a parameter of its own: MDLM whose logits are scaled by exp(a), with `a` in fp32 outside DeepSpeed."""

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.objectives.base import Corrupted, Label, Objective, TokenLoss
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.mdlm import MDLM
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary


class Tempered(Objective):
    """See the module's docstring."""

    name = "tempered"
    attention = Attention.FULL

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.inner = MDLM(vocabulary, ObjectiveConfig(name="mdlm"))
        self.owned = nn.ModuleDict({"scale": nn.ParameterList([nn.Parameter(torch.tensor(0.3))])})
        for parameter in self.owned.parameters():
            parameter.partial_over_tensor = True  # each rank scales its own columns

    def label(self, *, evaluation: bool) -> Label:
        return self.inner.label(evaluation=evaluation)

    def corrupt(self, tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, evaluation: bool) -> Corrupted:
        return self.inner.corrupt(tokens, documents, noise, evaluation=evaluation)

    def network_input(self, inputs: dict[str, Tensor], vocab: VocabShard) -> NetworkInput:
        return self.inner.network_input(inputs, vocab)

    def token_loss(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> TokenLoss:
        return self.inner.token_loss(logits_BLv.float() * self._scale(), targets, vocab)

    def token_nelbo(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> Tensor:
        return self.inner.token_nelbo(logits_BLv.float() * self._scale(), targets, vocab)

    def modules(self) -> nn.ModuleDict:
        return self.owned

    def _scale(self) -> Tensor:
        return next(self.owned.parameters()).exp()
