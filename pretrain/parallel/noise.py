"""Noise as a pure function of (seed, global sample index, stream name).

NumPy's Philox is a counter-based generator: the key is a hash of the seed and the stream's name, the counter's top word is the
sample's index. So any rank, pipeline stage, restart or layout that asks for a sample's noise gets the same bits.
"""

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Noise:
    """The noise of one sample.

    index     counts samples from the start of the run (of the held-out set when evaluating).
    position  the sample's place among the `batch` samples of the global batch that are noised in the same way: all of them, unless the
              objective has several `parts`.
    part      which of the objective's parts this sample belongs to.
    share     the part's share of the global batch: a sum over it is divided by this to stand for the whole batch.
    step      optimizer step, counted from 0; 0 when evaluating.
    """

    seed: int
    index: int
    position: int
    batch: int
    part: int = 0
    share: float = 1.0
    step: int = 0

    def stream(self, name: str) -> np.random.Generator:
        """A fresh generator for one named use; asking twice gives the same numbers."""
        return self._generator(name, self.index)

    def shared_stream(self, name: str) -> np.random.Generator:
        """A fresh generator whose numbers every sample of the global batch gets: a function of the step, not of the sample."""
        return self._generator(f"step/{name}", self.step)

    def stratified_time(self, name: str = "t") -> float:
        """A draw from [0, 1) that is uniform alone and stratified over the global batch: one sample in each of `batch` cells.

        As in scaling-dllms, but from each sample's own u: e_i = (u_i / n + i / n) mod 1.
        """
        return float((self.stream(name).random() + self.position) / self.batch % 1.0)

    def _generator(self, name: str, counter: int) -> np.random.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=16).digest()
        key = int.from_bytes(digest, "little")
        return np.random.Generator(np.random.Philox(key=key, counter=counter << 192))
