"""What an objective hands to a network, whichever of the two backbones it is.

Shape suffixes: B sequences, L positions, D model width.
"""

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Attention(StrEnum):
    """Which keys a query may see, before document masks."""

    CAUSAL = "causal"
    FULL = "full"


@dataclass(frozen=True, kw_only=True)
class NetworkInput:
    """ids_BL or embeddings_BLD, explicit positions, the conditioning scalar of each sequence, and the attention pattern.

    documents_BL  None where every position belongs to one document; otherwise a query sees only keys with the same number
                  (padding carries -1, and so sees only padding and is seen by nothing else).
    """

    positions_BL: Tensor
    conditioning_B: Tensor
    attention: Attention
    ids_BL: Tensor | None = None
    embeddings_BLD: Tensor | None = None
    documents_BL: Tensor | None = None
