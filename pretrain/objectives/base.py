"""The seam between mathematics and machinery: what every objective answers, and nothing about ranks, loops or Megatron.

Shape suffixes: B sequences, L positions, v this rank's share of the vocabulary, V the whole of it. Losses are in nats.

The walk of a batch: the loader calls `corrupt` once per sample (NumPy, pure); the engine stacks samples, calls `network_input`
on each pipeline stage and `token_loss` on the last one, in slices along L, and divides the sum once by the global count.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor, nn

from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary

Label = Literal["exact", "bound", "estimate", "not_a_likelihood"]


@dataclass(frozen=True)
class Corrupted:
    """One sample after noising.

    inputs   arrays for `network_input`; always `ids`, `positions` and `documents` of one length, often `conditioning` (scalar).
    targets  arrays for `token_loss`: scalars of the sample, or arrays whose first axis is the L scored positions.
    count    what the loss sum is divided by: the sample's tokens for an ELBO (its true length when it was cut short).
    t        diffusion time for telemetry, or None.
    """

    inputs: dict[str, np.ndarray]
    targets: dict[str, np.ndarray]
    count: int
    t: float | None = None


@dataclass(frozen=True)
class TokenLoss:
    """loss_B is what training minimises, summed over the given positions; nelbo_B (detached) is the likelihood term of the same draw."""

    loss_B: Tensor
    nelbo_B: Tensor


class Objective(ABC):
    """One training objective. Subclasses are final: abstract methods are implemented once, concrete ones never overridden."""

    name: str
    attention: Attention
    lookahead: int = 0
    """Tokens needed beyond the L inputs: 1 for AR, whose targets are shifted by one (the inputs stay exactly L long)."""
    random_length: bool = True
    """Whether the random-length rule (scaling-dllms' ssl_ratio) applies; AR never uses it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def label(self, *, evaluation: bool) -> Label:
        """What `nelbo_B` and `token_nelbo` may be called, for draws of `corrupt` with this `evaluation` flag."""

    @abstractmethod
    def corrupt(self, tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, evaluation: bool) -> Corrupted:
        """Noise one sample. tokens [L + lookahead] int64; documents [L + lookahead] int32, -1 where there is no text (padding)."""

    @abstractmethod
    def network_input(self, inputs: dict[str, Tensor]) -> NetworkInput:
        """The stacked `inputs` as a network input; a missing `documents` means that no mask is needed."""

    @abstractmethod
    def token_loss(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> TokenLoss:
        """Loss of these positions; summing over slices along L gives the loss of the whole."""

    @abstractmethod
    def token_nelbo(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> Tensor:
        """nats_BL: each position's contribution to -log p(x), labelled by `label`."""

    def modules(self) -> nn.ModuleDict:
        """Parameters of the objective itself. They stay in fp32 outside the bf16 engine, with an optimizer of their own."""
        return nn.ModuleDict()
