"""What a sampler asks of a network, and what every sampler promises.

Shape suffixes: B sequences, L positions, D features, V model vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .attention_patterns import KeyValueCache
from .network_input import NetworkInput
from .sampling_draw import TokenLaw

Progress = Callable[[int], object]
"""Called with the number of tokens that a step has fixed, over the whole batch."""


def ignore_progress(tokens: int) -> None:
    """No display."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every sampler needs besides the network and the sequences to fill.

    law          how a token is drawn from logits; its `mask_id` is what masked diffusion fills.
    vocab_size   classes of the model: every id of a sample is below it.
    seed         of the noise.
    sequences_B  names of the sequences: a sequence's noise depends on (seed, its name) alone, not on the batch that it is in.
    progress     told of every step.
    """

    law: TokenLaw
    vocab_size: int
    seed: int
    sequences_B: Tensor
    progress: Progress = ignore_progress

    def check(self, ids_BL: Tensor) -> None:
        """Raise RuntimeError unless every id is a token of the model vocabulary and none is the mask."""
        if ((ids_BL < 0) | (ids_BL >= self.vocab_size)).any():
            raise RuntimeError(f"the sampler returned ids outside [0, {self.vocab_size})")
        if self.law.mask_id is not None and (ids_BL == self.law.mask_id).any():
            raise RuntimeError(f"the sampler left {int((ids_BL == self.law.mask_id).sum())} masks")


class Denoiser(Protocol):
    """Features of every position and logits of chosen ones: a sampler pays for the head only where it draws."""

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        """[B, L, D]."""

    def logits(self, features: Tensor) -> Tensor:
        """[..., D] to [..., V]."""


class CausalDenoiser(Denoiser, Protocol):
    """A network that can decode from a cache."""

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """Empty, for `capacity` positions."""
