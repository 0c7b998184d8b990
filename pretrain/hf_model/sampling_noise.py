"""Uniform and normal numbers as pure functions of (seed, sequence, step, position): Philox4x32-10 (Salmon et al. 2011).

A sequence draws the same numbers whichever batch, device or order it is sampled in.

Shape suffixes: B sequences, L positions, E components of a vector.
"""

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds over four 32-bit words; every word is held in an int64 tensor, all of one shape."""
    a, b, c, d = counter
    for turn in range(10):
        key_0, key_1 = ((key[i] + turn * _WEYL[i]) & _WORD for i in (0, 1))
        high_0, low_0 = _multiply(a, _MULTIPLIERS[0])
        high_1, low_1 = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_1 ^ b ^ key_0, low_1, high_0 ^ d ^ key_1, low_0
    return a, b, c, d


def uniforms(seed: int, sequences_B: Tensor, step: int, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent draws from [0, 1) per sequence and position, each [B, L] in float64 with 53 random bits."""
    sequence_B1, position_1L = sequences_B.long()[:, None], positions_L.long()[None, :]
    zero_BL = torch.zeros_like(sequence_B1 + position_1L)
    counter = (zero_BL + position_1L, zero_BL + step, zero_BL + (sequence_B1 & _WORD), zero_BL + (sequence_B1 >> 32 & _WORD))
    a, b, c, d = philox(counter, (seed & _WORD, seed >> 32 & _WORD))
    return _double(a, b), _double(c, d)


def normals(seed: int, sequences_B: Tensor, step: int, positions_L: Tensor, width: int) -> Tensor:
    """[B, L, width] independent standard normal numbers in float64, by the method of Box and Muller from two uniform ones for every two components.

    Components are counted through the positions (position * ceil(width / 2) + pair), so `uniforms` of the same step are not independent of them.
    """
    pairs = -(-width // 2)
    places = (positions_L.long()[:, None] * pairs + torch.arange(pairs, device=positions_L.device)).flatten()
    radius_BP, turn_BP = uniforms(seed, sequences_B, step, places)
    # 1 - u lies in (0, 1]: the logarithm is finite, and no number is beyond sqrt(2 log 2^53) = 8.6.
    radius_BP, turn_BP = (-2 * torch.log1p(-radius_BP)).sqrt(), 2 * math.pi * turn_BP
    both = torch.stack((radius_BP * turn_BP.cos(), radius_BP * turn_BP.sin()), dim=-1)
    return both.reshape(len(sequences_B), len(positions_L), 2 * pairs)[..., :width]


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low words of the 64-bit product: by halves, because int64 would overflow."""
    low = (constant & 0xFFFF) * x
    middle = (constant >> 16) * x + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def _double(a: Tensor, b: Tensor) -> Tensor:
    return ((a >> 5).double() * 2**26 + (b >> 6).double()) / 2**53
