"""Token ids as digits: the subtokenizer of MDM-Prime-v2 (Chao et al. 2026, appendix A.2.2), f = f_base-b o f_shuffle.

An id is first replaced by its place in a fixed random order of the vocabulary (index shuffling), then written in base b with a fixed number
of digits, the most significant first. A masked digit is written as b. Not every string of digits is an id: b ** digits may exceed the vocabulary.

The order is the sorting of Philox's raw words, which NumPy promises to keep from version to version, unlike `Generator.permutation`:
weights that were trained with a code must be read with the same one for ever.

Shape suffixes: V ids, J digits of an id, G the J * base pairs (digit, value), v a range of ids; leading axes are free.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def shuffled_codes(size: int, shuffle_seed: int | None) -> np.ndarray:
    """[V]: each id's place in the shuffled vocabulary; its own number without a seed."""
    if shuffle_seed is None:
        return np.arange(size)
    return np.argsort(np.random.Philox(key=shuffle_seed).random_raw(size), kind="stable")


class DigitCode:
    """A bijection between ids 0 … size - 1 and some of the strings of `digits` digits.

    table_VJ  each id's digits, for NumPy code; int64.
    codes_V   each id's place in the shuffled vocabulary, the number that the digits write; int64.
    """

    def __init__(self, size: int, *, base: int, digits: int, shuffle_seed: int | None) -> None:
        if size < 1:
            raise ValueError(f"{digits} digits of base {base} cannot write {size} ids")
        self._fill(shuffled_codes(size, shuffle_seed), base, digits)

    @classmethod
    def of_codes(cls, codes_V: Tensor, *, base: int, digits: int) -> "DigitCode":
        """The code that an export keeps: each id's number, a permutation of 0 … V - 1. Raises ValueError for anything else."""
        codes = codes_V.detach().cpu().numpy().astype(np.int64)
        if not np.array_equal(np.sort(codes), np.arange(len(codes))):
            raise ValueError(f"the digit code is no permutation of its {len(codes)} ids: the file is damaged")
        code = cls.__new__(cls)
        code._fill(codes, base, digits)
        return code

    def _fill(self, code_V: np.ndarray, base: int, digits: int) -> None:
        size = len(code_V)
        if base < 2 or digits < 1 or base**digits < size:
            raise ValueError(f"{digits} digits of base {base} cannot write {size} ids")
        self.size, self.base, self.digits = size, base, digits
        self.codes_V = code_V
        self._powers_J = base ** np.arange(digits - 1, -1, -1, dtype=np.int64)
        self.table_VJ = code_V[:, None] // self._powers_J % base
        self._id_of_code_V = np.argsort(code_V)
        self._tensors: dict[tuple[object, ...], Tensor] = {}

    def encode(self, ids: Tensor) -> Tensor:
        """[…, J]: the digits of ids […]."""
        return self._tensor("digits", ids.device, lambda: self.table_VJ)[ids]

    def decode(self, digits_J: Tensor) -> Tensor:
        """[…]: the ids of digits […, J]; -1 where a digit is masked or no id has these digits."""
        powers_J = self._tensor("powers", digits_J.device, lambda: self._powers_J)
        ids_V = self._tensor("ids", digits_J.device, lambda: self._id_of_code_V)
        code = (digits_J * powers_J).sum(-1)
        known = (digits_J != self.base).all(-1) & (code < self.size)
        return torch.where(known, ids_V[torch.where(known, code, 0)], -1)

    def members(self, start: int, end: int, device: torch.device) -> Tensor:
        """[v, G], fp32: 1 where the id's digit has the value, for ids start … end - 1; rows of 0 for ids past the last. Kept for the next call."""

        def build() -> np.ndarray:
            rows_vJ = self.table_VJ[start:end]
            one_vJA = np.zeros((end - start, self.digits, self.base), dtype=np.float32)
            one_vJA[np.arange(len(rows_vJ))[:, None], np.arange(self.digits), rows_vJ] = 1
            return one_vJA.reshape(end - start, -1)

        return self._tensor(("members", start, end), device, build)

    def contradicted(self, digits_J: Tensor) -> Tensor:
        """[…, G], bool: pairs that a visible digit of […, J] excludes. An id is possible unless it is a member of such a pair."""
        values_A = torch.arange(self.base, device=digits_J.device)
        visible_J1 = (digits_J != self.base).unsqueeze(-1)
        return (visible_J1 & (digits_J.unsqueeze(-1) != values_A)).flatten(-2)

    def possible(self, digits_J: Tensor) -> Tensor:
        """[…, V], bool: ids that agree with every visible digit of […, J]: the carry-over condition (Chao et al. 2025)."""
        conflicts = self.contradicted(digits_J).float() @ self.members(0, self.size, digits_J.device).T
        return conflicts < 0.5

    def _tensor(self, key: object, device: torch.device, build: Callable[[], np.ndarray]) -> Tensor:
        """A table on a device, built once."""
        if (key, device) not in self._tensors:
            self._tensors[key, device] = torch.from_numpy(build()).to(device)
        return self._tensors[key, device]
