"""Which window of which source is sample n of the run: a pure function of (seed, n, phases), with exact integer accounting.

In each phase weights become integers over its samples (2^32 where it has no end) by the method of largest remainders. How many of the
first n samples belong to each source is read off a balanced binary tree over the sources: at every node floor(n a / b + 1/2) go left. That
count never falls as n grows, sums to n, ends exactly at the integers after a period, and strays from n times the weight by less than half
a sample per level. Within each block of 1024 samples the sources are shuffled, so that a position in the batch favours no source. The k-th
sample of a source, counted through all phases, is window perm_e(k mod windows) of its epoch e = k div windows: no window comes twice
before an epoch is complete, however often the shares change.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from pretrain.data.permutation import Permutation
from pretrain.data.phases import Phase
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
    """The samples of a run, phase after phase, from sources with known numbers of windows.

    phases   from sample 0 on, without gaps; the last one without end.
    windows  name -> windows of one epoch, for every source that is still there.
    """

    def __init__(self, phases: Sequence[Phase], windows: Mapping[str, int], *, seed: int) -> None:
        self.phases = tuple(phases)
        self._windows = dict(windows)
        self._seed = seed
        self._starts = [phase.start for phase in phases]
        self._layouts: list[_Layout] = []
        read: dict[str, _Position] = {}
        for phase in phases:
            self._layouts.append(_Layout(phase, seed, read))
            if phase.end is not None:
                read = self._layouts[-1].read(phase.end)
        self._permutation = functools.lru_cache(maxsize=4 * max(len(self._windows), 1))(self._epoch_order)

    def address(self, sample: int) -> Address:
        """Sample `sample` (from 0) of the run. UserError if its source is no longer there."""
        name, index = self._layouts[bisect_right(self._starts, sample) - 1].place(sample)
        if name not in self._windows:
            raise UserError(f"sample {sample:,} was read from source '{name}', which data.train no longer names; add +data.train.{name}.path=…")
        epoch, step = divmod(index, self._windows[name])
        return Address(name, self._permutation(name, epoch)(step), epoch)

    def counts(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` samples come from each source, by name."""
        read = self._layouts[max(bisect_right(self._starts, samples - 1) - 1, 0)].read(samples)
        return {name: read[name].count if name in read else 0 for phase in self.phases for name in phase.mix}

    def epochs(self, samples: int) -> dict[str, float]:
        """Passes over each source in the first `samples` samples."""
        return {name: count / self._windows[name] for name, count in self.counts(samples).items()}

    def _epoch_order(self, name: str, epoch: int) -> Permutation:
        return Permutation(self._windows[name], f"{self._seed}/window/{name}/{epoch}")


@dataclass(frozen=True)
class _Position:
    """How far a source was read: its samples from 0 to `next`, but for those of `skipped`, which come next. A phase that ends within a block
    skips some, since blocks are shuffled."""

    next: int = 0
    skipped: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return self.next - len(self.skipped)

    def ahead(self, number: int) -> int:
        """Which sample of the source is read after `number` others."""
        return self.skipped[number] if number < len(self.skipped) else self.next + number - len(self.skipped)

    def after(self, number: int, unread: Sequence[int]) -> "_Position":
        """Once the next `number` samples were read, but for `unread` of these."""
        skipped = (*(self.ahead(one) for one in unread), *self.skipped[number:])
        return _Position(self.next + max(number - len(self.skipped), 0), skipped)


class _Layout:
    """The order of sources within one phase. `before`: how far each source was read in the phases before it."""

    def __init__(self, phase: Phase, seed: int, before: Mapping[str, _Position]) -> None:
        self._names, self._start, self._seed = list(phase.mix), phase.start, seed
        self._length = None if phase.laid_out is None else phase.laid_out - phase.start
        self._before = {name: before.get(name, _Position()) for name in {**before, **phase.mix}}
        self._counts = largest_remainder([phase.mix[name] for name in self._names], self._length or PERIOD)
        self._block = functools.lru_cache(maxsize=8)(self._block_layout)

    def place(self, sample: int) -> tuple[str, int]:
        """The source of a sample, and which of the source's samples it is."""
        block, position = divmod(sample - self._start, BLOCK)
        order, read, ends = self._block(block)
        place = order(position)
        number = bisect_right(ends, place)
        name = self._names[number]
        return name, self._before[name].ahead(read[number] + place - (ends[number - 1] if number else 0))

    def read(self, end: int) -> dict[str, _Position]:
        """How far each source was read before sample `end` of the run, which lies in this phase or at its end."""
        block, rest = divmod(end - self._start, BLOCK)
        order, read, ends = self._block(block)
        seen = {order(position) for position in range(rest)}
        found = dict(self._before)
        for name, before, low, high in zip(self._names, read, [0, *ends], ends, strict=False):
            unread = [before + place - low for place in range(low, high) if place not in seen] if rest else []
            found[name] = found[name].after(before + (high - low if rest else 0), unread)
        return found

    def _block_layout(self, block: int) -> tuple[Permutation, list[int], list[int]]:
        """The block's order, the samples of each source before it, and where each source's places end in it. The last block of a phase is as
        long as the phase needs, so that the phase as a whole is exact."""
        first, last = block * BLOCK, (block + 1) * BLOCK
        if self._length is not None and first < self._length:
            last = min(last, self._length)
        before, after = balanced(self._counts, first), balanced(self._counts, last)
        ends = list(accumulate(high - low for low, high in zip(before, after, strict=True)))
        key = f"{self._seed}/block/{self._start}+{block}" if self._start else f"{self._seed}/block/{block}"
        return Permutation(last - first, key), before, ends


def balanced(counts: Sequence[int], samples: int) -> list[int]:
    """How many of the first `samples` samples belong to each of the sources with these counts per period, whatever the order within blocks."""
    if len(counts) == 1:
        return [samples]
    whole = sum(counts)
    if whole == 0:  # sources too small for the period, which then get none of it
        return [0] * len(counts)
    # the cut that halves the weight best keeps the tree shallow
    sums = [sum(counts[:cut]) for cut in range(1, len(counts))]
    cut = min(range(1, len(counts)), key=lambda c: abs(2 * sums[c - 1] - whole))
    left = (2 * samples * sums[cut - 1] + whole) // (2 * whole)
    return balanced(counts[:cut], left) + balanced(counts[cut:], samples - left)
