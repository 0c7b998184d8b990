"""How one logical (full) tensor is cut over tensor-parallel ranks, and put together again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Initializer = Literal["zeros", "ones", "uniform", "normal"]


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One logical parameter.

    shape     full shape, as if TP=1.
    axis      axis that tensor parallelism cuts; None where every tensor-parallel rank holds the whole.
    sections  blocks along `axis` that are cut separately: 2 for SwiGLU's fused [gate; up].
    layer     global layer number; None outside the layers.
    stage     which pipeline stage holds it: its layer's, the first, the last, or all of them.
    init      how it starts: scale is the half-width of `uniform` and the standard deviation of `normal`.
    matrix    False for norms, biases, embeddings and the head (OptimizerConfig.decay).
    """

    shape: tuple[int, ...]
    axis: int | None = None
    sections: int = 1
    layer: int | None = None
    stage: Literal["layer", "first", "last", "all"] = "layer"
    init: Initializer = "uniform"
    scale: float = 0.0
    matrix: bool = False

    @property
    def size(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        if self.axis is None:
            return self.shape
        return tuple(n // ranks if a == self.axis else n for a, n in enumerate(self.shape))

    def shard(self, full: Tensor, ranks: int, rank: int) -> Tensor:
        """The piece of `full` that tensor-parallel `rank` of `ranks` holds."""
        if self.axis is None or ranks == 1:
            return full
        pieces = [section.chunk(ranks, self.axis)[rank] for section in full.chunk(self.sections, self.axis)]
        return pieces[0] if self.sections == 1 else _concatenate(pieces, self.axis)

    def unshard(self, shards: list[Tensor]) -> Tensor:
        """The full tensor from every rank's piece, in rank order; the inverse of `shard`."""
        if self.axis is None or len(shards) == 1:
            return shards[0]
        by_section = zip(*(shard.chunk(self.sections, self.axis) for shard in shards), strict=True)
        return _concatenate([piece for section in by_section for piece in section], self.axis)


def _concatenate(pieces: list[Tensor], axis: int) -> Tensor:
    import torch  # the table of shapes must load without torch: plans and configuration errors use it

    return torch.cat(pieces, axis)
