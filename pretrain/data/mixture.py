"""Which window of which source is sample n of the run: a pure function of (seed, n), with exact integer accounting.

Weights become integers over a period of 2^32 samples by the method of largest remainders. How many of the first n samples belong to
each source is read off a balanced binary tree over the sources: at every node floor(n a / b + 1/2) go left. That count never falls
as n grows, sums to n, ends exactly at the integers after a period, and strays from n times the weight by less than half a sample per
level. Within each block of 1024 samples the sources are shuffled, so that a position in the batch favours no source. The k-th sample
of a source is window perm_e(k mod windows) of its epoch e = k div windows.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pretrain.data.permutation import Permutation
from pretrain.errors import UserError

PERIOD = 1 << 32
BLOCK = 1024


@dataclass(frozen=True)
class Address:
    """Where a sample comes from: window `window` (from 0) of `source`, on that source's pass number `epoch` (from 0)."""

    source: str
    window: int
    epoch: int


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Integers in proportion to the weights that sum to `total`, each within one of its exact share (Hamilton's method).

    A positive weight gets at least 1 while total >= the number of weights. Ties go to the earlier one.
    """
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    shares = [total * weight / whole for weight in exact]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    for i, weight in enumerate(exact):
        if weight > 0 and counts[i] == 0 and (largest := max(counts)) > 1:
            counts[counts.index(largest)] -= 1
            counts[i] = 1
    return counts


class Mixture:
    """Weighted mixture of sources with known numbers of windows.

    weights  name -> relative weight; 0 leaves a source out. UserError for negative or non-finite weights, or none above 0.
    windows  name -> windows of one epoch.
    """

    def __init__(self, weights: Mapping[str, float], windows: Mapping[str, int], *, seed: int) -> None:
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise UserError(f"data source '{name}' has weight {weight}; a weight is a number >= 0")
        self._names = [name for name, weight in weights.items() if weight > 0]
        if not self._names:
            raise UserError("no data source has a weight above 0; set data.train.NAME.weight")
        self._windows = dict(windows)
        self._counts = largest_remainder([weights[name] for name in self._names], PERIOD)
        self._seed = seed
        self._permutation = functools.lru_cache(maxsize=4 * len(self._names))(self._epoch_order)
        self._block = functools.lru_cache(maxsize=8)(self._block_layout)

    def address(self, sample: int) -> Address:
        """Sample `sample` (from 0) of the run."""
        block, position = divmod(sample, BLOCK)
        order, before, ends = self._block(block)
        place = order(position)
        number = next(i for i, end in enumerate(ends) if place < end)
        index = before[number] + place - (ends[number - 1] if number else 0)
        name = self._names[number]
        epoch, step = divmod(index, self._windows[name])
        return Address(name, self._permutation(name, epoch)(step), epoch)

    def counts(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` samples come from each source; exact at multiples of 1024, elsewhere within that block's shuffle."""
        return dict(zip(self._names, _split(self._counts, samples), strict=True))

    def epochs(self, samples: int) -> dict[str, float]:
        """Passes over each source in the first `samples` samples."""
        return {name: count / self._windows[name] for name, count in self.counts(samples).items()}

    def _epoch_order(self, name: str, epoch: int) -> Permutation:
        return Permutation(self._windows[name], f"{self._seed}/window/{name}/{epoch}")

    def _block_layout(self, block: int) -> tuple[Permutation, list[int], list[int]]:
        before = _split(self._counts, block * BLOCK)
        after = _split(self._counts, (block + 1) * BLOCK)
        ends, total = [], 0
        for low, high in zip(before, after, strict=True):
            total += high - low
            ends.append(total)
        return Permutation(BLOCK, f"{self._seed}/block/{block}"), before, ends


def _split(counts: Sequence[int], samples: int) -> list[int]:
    """How many of the first `samples` samples belong to each of the sources with these counts per period."""
    if len(counts) == 1:
        return [samples]
    # the cut that halves the weight best keeps the tree shallow
    whole = sum(counts)
    sums = [sum(counts[:cut]) for cut in range(1, len(counts))]
    cut = min(range(1, len(counts)), key=lambda c: abs(2 * sums[c - 1] - whole))
    left = (2 * samples * sums[cut - 1] + whole) // (2 * whole)
    return _split(counts[:cut], left) + _split(counts[cut:], samples - left)
