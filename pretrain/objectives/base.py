"""The seam between mathematics and machinery: what every objective answers, and nothing about ranks, loops or Megatron.

Shape suffixes: B sequences, L positions, v this rank's share of the vocabulary, V the whole of it. Losses are in nats.

The walk of a batch: the loader calls `corrupt` once per sample (NumPy, pure); the engine stacks samples, calls `prepare`, then
`network_input` on each pipeline stage and `token_loss` on the last one, in slices along L, and divides the sum once by the global count.
Methods below the abstract ones are hooks for objectives that learn their noise or look twice (RePlaid); their defaults do nothing.
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

    inputs   arrays for `network_input`; always `positions` and `documents` of one length, mostly `ids` and `conditioning` (scalar).
    targets  arrays for `token_loss`: scalars of the sample, or arrays whose first axis is the L scored positions.
    count    what the loss sum is divided by: the sample's tokens for an ELBO (its true length when it was cut short, without a prompt).
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


Tensors = dict[str, Tensor]
"""A micro-batch's stacked arrays: [B] for scalars of a sample, [B, L, ...] for the rest."""


def open_text(documents: np.ndarray, prompt: np.ndarray | None) -> np.ndarray:
    """[L] bool: what may be noised and is scored: text, and not given as a prompt."""
    text_L = documents >= 0
    return text_L if prompt is None else text_L & ~prompt


class Objective(ABC):
    """One training objective. Subclasses are final.

    attention         pattern of the micro-batches; the other one that may occur is TWO_STREAM.
    lookahead         tokens needed beyond the L inputs: 1 for AR, whose targets are shifted by one (the inputs stay exactly L long).
    random_length     whether the random-length rule (scaling-dllms' ssl_ratio) applies; AR never uses it.
    parts             shares of the global batch that are noised in different ways (Eso-LM: diffusion, then sequential). A micro-batch never
                      mixes parts, whose samples may differ in their arrays. `Noise.part` says which; terms are divided by `Noise.share`.
    evaluation_parts  the same for held-out text: every sequence is drawn in each part, and as each has share 1 / evaluation_parts, the mean
                      over all draws of a sequence is the sum of the parts.
    importance        held-out draws of a sequence are importance samples of its likelihood, to be combined in groups of this many as
                      -log mean exp(-nats); 1: plain averages.
    two_stream        whether micro-batches of twice the length occur.
    """

    name: str
    attention: Attention
    lookahead: int = 0
    random_length: bool = True
    parts: tuple[float, ...] = (1.0,)
    evaluation_parts: int = 1
    importance: int = 1
    two_stream: bool = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def label(self, *, evaluation: bool) -> Label:
        """What `nelbo_B` and `token_nelbo` may be called, for draws of `corrupt` with this `evaluation` flag."""

    @abstractmethod
    def corrupt(
        self, tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, evaluation: bool, prompt: np.ndarray | None = None
    ) -> Corrupted:
        """Noise one sample. tokens [L + lookahead] int64; documents [L + lookahead] int32, -1 where there is no text (padding).

        prompt [L + lookahead] bool, or None: text that is given. It stands clean, visible to every position, and is neither scored nor
        counted: the terms are those of -log p(rest | prompt), under the same label.
        """

    @abstractmethod
    def network_input(self, inputs: Tensors, vocab: VocabShard) -> NetworkInput:
        """The stacked `inputs` as a network input; a missing `documents` means that no mask is needed."""

    @abstractmethod
    def token_loss(self, logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> TokenLoss:
        """Loss of these positions; summing over slices along L gives the loss of the whole."""

    @abstractmethod
    def token_nelbo(self, logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> Tensor:
        """nats_BL: each position's contribution to -log p(x), labelled by `label`."""

    # ---- hooks --------------------------------------------------------------------------------------------------------------------

    def modules(self) -> nn.ModuleDict:
        """Parameters of the objective itself. They stay in fp32 outside the bf16 engine, with an optimizer of their own. Buffers of these
        modules are the running state that checkpoints keep.

        A parameter's `learning_rate` (a peak) and `weight_decay` attributes replace the run's; `clip_apart` keeps its gradient out of the
        model's norm, since it minimises something else; `partial_over_tensor` says that each tensor-parallel
        rank's gradient is only its columns' part.
        """
        return nn.ModuleDict()

    def prepare(self, inputs: Tensors, targets: Tensors, *, evaluation: bool) -> tuple[Tensors, Tensors]:
        """Add what depends on parameters or running state, the same on every rank that handles the micro-batch.

        Tensors [B] that require a gradient are leaves: the engine sums their gradients over pipeline stages before `finish`. The same leaf
        may stand in both dictionaries.
        """
        return inputs, targets

    def preliminary_rows(self, inputs: Tensors, *, evaluation: bool) -> Tensor | None:
        """rows_B, bool: sequences that need a first pass without gradient; None, for every micro-batch alike: there is no such pass."""
        return None

    def preliminary_result(self, logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> Tensor:
        """[B, L, E]: what the first pass found at these positions. It becomes `inputs["estimate"]`, with zeros in the other sequences.
        Objectives without `preliminary_rows` are never asked."""
        raise NotImplementedError(f"{self.name} marks sequences for a first pass and does not say what to keep of it")

    def preliminary_width(self) -> int:
        """E of `preliminary_result`."""
        return 0

    def statistics(self, targets: Tensors, loss_B: Tensor) -> Tensor | None:
        """Numbers about a trained micro-batch that add up over micro-batches and ranks; None: the objective keeps none."""
        return None

    def finish(self, targets: Tensors, loss_B: Tensor) -> None:
        """Called on the last stage after a step's backward passes, when the leaves' gradients are whole: carry them on to the parameters
        that the leaves were made from. `loss_B` is each sequence's summed loss."""
        return None

    def advance(self, statistics: Tensor | None) -> None:
        """End of an optimizer step, on every rank: update running state from the sums of `statistics` over the global batch."""
        return None
