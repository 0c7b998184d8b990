"""What a sampler asks of a network, and what every sampler promises.

Shape suffixes: B sequences, L positions, J digits of a token, N chosen positions of any sequences, D features, V model vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .attention_patterns import KeyValueCache
from .network_input import Attention, NetworkInput
from .sampling_draw import TokenLaw, rows_at_once

Progress = Callable[[int], object]
"""Called with the number of tokens that a step has fixed, over the whole batch."""


def ignore_progress(tokens: int) -> None:
    """No display."""


class SamplingError(ValueError):
    """Settings that turned out not to fit the model while it was sampled: the user's to change."""


BLANK = -1
"""Stands where there is no token yet, in a `Snapshot` and in the canvases of samplers whose vocabulary has no mask id."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A batch after a step.

    sequences_B  names of the sequences.
    ids_BL       what stands at each position, BLANK where nothing does: noise too where the process knows no mask (Duo), the most likely
                 tokens where it has no tokens (RePlaid).
    digits_BLJ   digits of each token where they are revealed one by one, -1 for masked ones; otherwise None.
    """

    sequences_B: Tensor
    ids_BL: Tensor
    digits_BLJ: Tensor | None = None


Watch = Callable[[Snapshot], object]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every sampler needs besides the network and the sequences to fill.

    law          how a token is drawn from logits; its `mask_id` is what masked diffusion fills.
    vocab_size   classes of the model: every id of a sample is below it.
    seed         of the noise.
    sequences_B  names of the sequences: a sequence's noise depends on (seed, its name) alone, not on the batch that it is in.
    progress     told of every step.
    watch        shown the batch after every step; None: no snapshot is made.
    end          samplers that go from left to right are done with a sequence when they have drawn this id, and fill its other blanks with it
                 unasked; None: they draw every blank. No token depends on what would have come after it, so the tokens up to `end` are the same.
    """

    law: TokenLaw
    vocab_size: int
    seed: int
    sequences_B: Tensor
    progress: Progress = ignore_progress
    watch: Watch | None = None
    end: int | None = None

    def show(self, ids_BL: Tensor, digits_BLJ: Tensor | None = None) -> None:
        """Let `watch`, if there is one, see the batch as it is; mask ids become BLANK."""
        if self.watch is not None:
            seen_BL = ids_BL.clone() if self.law.mask_id is None else ids_BL.masked_fill(ids_BL == self.law.mask_id, BLANK)
            self.watch(Snapshot(sequences_B=self.sequences_B, ids_BL=seen_BL, digits_BLJ=digits_BLJ))

    def check(self, ids_BL: Tensor) -> None:
        """Raise RuntimeError unless every id is a token of the model vocabulary and none is the mask."""
        if ((ids_BL < 0) | (ids_BL >= self.vocab_size)).any():
            raise RuntimeError(f"the sampler returned ids outside [0, {self.vocab_size})")
        if self.law.mask_id is not None and (ids_BL == self.law.mask_id).any():
            raise RuntimeError(f"the sampler left {int((ids_BL == self.law.mask_id).sum())} masks")


def after_end(ids_BL: Tensor, blank_BL: Tensor, end: int | None) -> Tensor:
    """[B, L]: the places of blank_BL, where a sampler fills in, that lie to the right of the first `end` filled in."""
    if end is None:
        return torch.zeros_like(blank_BL)
    found_BL = blank_BL & (ids_BL == end)
    return blank_BL & (found_BL.cumsum(-1) - found_BL.long() > 0)


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


def blanks(ids_BL: Tensor, law: TokenLaw) -> Tensor:
    """[B, L]: where a sampler fills in a token, which is where the mask id stands; everything else is a prompt. Raises ValueError without one."""
    if law.mask_id is None:
        raise ValueError("a diffusion sampler needs a mask id, which marks the positions to fill")
    return torch.eq(ids_BL, law.mask_id)


def read_canvas(network: Denoiser, ids_BL: Tensor, conditioning_B: Tensor | None = None) -> Tensor:
    """Features [B, L, D] of whole sequences under full attention; without conditioning the network is told 0."""
    inputs = NetworkInput(
        ids_BL=ids_BL,
        positions_BL=torch.arange(ids_BL.shape[1], device=ids_BL.device).expand_as(ids_BL),
        conditioning_B=torch.zeros(len(ids_BL), device=ids_BL.device) if conditioning_B is None else conditioning_B.float(),
        attention=Attention.FULL,
    )
    return network.features(inputs)


def draw_tokens(network: Denoiser, features_ND: Tensor, uniform_N: Tensor, request: Request) -> Tensor:
    """[N] ids, one from each position's features and uniform number; logits exist for a bounded number of positions at a time."""
    rows = rows_at_once(request.vocab_size)
    slices = zip(features_ND.split(rows), uniform_N.split(rows), strict=True)
    return torch.cat([request.law.draw(network.logits(x_ND), u_N) for x_ND, u_N in slices])
