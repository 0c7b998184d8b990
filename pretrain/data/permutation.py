"""A keyed pseudo-random order of n things that needs no memory: the order of windows in an epoch.

A Feistel network is a bijection of [0, 4^k) whatever its round function; walking along its cycle until the value falls below n
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains") makes it one of [0, n). At most four steps are expected.
"""

import hashlib
import struct

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


class Permutation:
    """A bijection of range(n); another key gives another one. `permutation(i)` is the i-th thing to visit. O(1) memory, microseconds a call."""

    def __init__(self, n: int, key: str) -> None:
        if n < 1:
            raise ValueError(f"cannot permute {n} things")
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = struct.unpack(f"<{_ROUNDS}Q", hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest())

    def __call__(self, index: int) -> int:
        """Where position `index` of the order leads."""
        if not 0 <= index < self.n:
            raise ValueError(f"{index} lies outside range({self.n})")
        value = self._encrypt(index)
        while value >= self.n:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return left << self._half | right


def _mix(value: int) -> int:
    # the finaliser of SplitMix64: every input bit reaches every output bit
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31
