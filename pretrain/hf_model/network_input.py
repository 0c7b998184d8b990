"""What an objective hands to a network, whichever of the two backbones it is.

Shape suffixes: B sequences, L positions, K weighted ids of a position, J digits of a token, E width of a latent vector.
"""

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Attention(StrEnum):
    """Which keys a query may see, before document masks.

    TWO_STREAM is Eso-LM's sequential pattern (block diffusion's with blocks of one token). The sequence is two streams, one after the other:
    first the noisy one, then the clean one, in the same order. Noisy position i sees itself and the clean positions before i; clean position
    i sees the clean positions up to i. Only the noisy stream's logits are computed. The noisy stream may be shorter: it then holds the last
    positions of the order.
    """

    CAUSAL = "causal"
    FULL = "full"
    TWO_STREAM = "two_stream"


@dataclass(frozen=True, kw_only=True)
class NetworkInput:
    """What each position holds (in exactly one of the forms below), where it stands, the conditioning scalar of each sequence, and the
    attention pattern.

    ids_BL        one token id per position; or, with `weights_BLK`, ids [B, L, K] whose embeddings are summed with those weights.
    digits_BLJ    sub-tokens: the digits of each token, most significant first; the base stands for a masked digit.
    latents_BLE   continuous inputs, with `estimate_BLE`, an earlier estimate of their clean values (zeros where there is none).
    given_BL      with latents: positions of a prompt, which read the row of their id in a table of their own instead (ids_BL holds the ids).
    noisy         positions of the noisy stream; 0: half of all, as long as the clean one.
    documents_BL  None where every position belongs to one document; otherwise a query sees only keys with the same number
                  (padding carries -1, and so sees only padding and is seen by nothing else).
    """

    positions_BL: Tensor
    conditioning_B: Tensor
    attention: Attention
    ids_BL: Tensor | None = None
    weights_BLK: Tensor | None = None
    digits_BLJ: Tensor | None = None
    latents_BLE: Tensor | None = None
    estimate_BLE: Tensor | None = None
    given_BL: Tensor | None = None
    documents_BL: Tensor | None = None
    noisy: int = 0

    @property
    def noisy_length(self) -> int:
        """Positions of the noisy stream of two. Raises ValueError where the streams are said to be equal and cannot be."""
        length = self.positions_BL.shape[1]
        if not self.noisy and length % 2:
            raise ValueError(f"two streams of equal length need an even number of positions, got {length}")
        return self.noisy or length // 2
