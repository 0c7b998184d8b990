"""Digit codes: bijective, most significant digit first, shuffled in an order that no library version may change.

Shape suffixes: V ids, J digits, G pairs (digit, value).
"""

import hashlib
from itertools import product

import numpy as np
import pytest
import torch

from pretrain.hf_model.digits import DigitCode

CODES = [(32000, 2, 15), (50257, 2, 16), (131072, 2, 17), (50257, 15, 4), (50257, 225, 2), (100, 100, 1), (10, 3, 3), (2, 2, 1)]
GOLDEN_ORDER = {(0, 32000): "33259854", (7, 50257): "d5d8e854"}


@pytest.mark.parametrize("shuffle_seed", [None, 0, 5])
@pytest.mark.parametrize(("size", "base", "digits"), CODES)
def test_encoding_is_a_bijection(size: int, base: int, digits: int, shuffle_seed: int | None) -> None:
    code = DigitCode(size, base=base, digits=digits, shuffle_seed=shuffle_seed)
    ids_V = torch.arange(size)
    digits_VJ = code.encode(ids_V)
    assert digits_VJ.shape == (size, digits) and digits_VJ.dtype == torch.int64 and digits_VJ.min() >= 0 and digits_VJ.max() < base
    assert len(torch.unique(digits_VJ, dim=0)) == size
    assert (code.decode(digits_VJ) == ids_V).all() and (digits_VJ.numpy() == code.table_VJ).all()
    if digits > 1:  # the first digit is used: one digit fewer would not do
        assert digits_VJ[:, 0].max() > 0


def test_the_most_significant_digit_comes_first() -> None:
    plain = DigitCode(200, base=10, digits=3, shuffle_seed=None)
    assert plain.table_VJ[[0, 7, 42, 105, 199]].tolist() == [[0, 0, 0], [0, 0, 7], [0, 4, 2], [1, 0, 5], [1, 9, 9]]
    assert DigitCode(32000, base=2, digits=15, shuffle_seed=None).table_VJ[[1, 16384, 31999]].tolist() == [
        [int(bit) for bit in np.binary_repr(i, 15)] for i in (1, 16384, 31999)
    ]


def test_strings_that_are_no_id_decode_to_minus_one() -> None:
    """Codes past the vocabulary, and strings with a masked digit (the base)."""
    code = DigitCode(10, base=3, digits=3, shuffle_seed=1)
    every = torch.tensor(list(product(range(4), repeat=3)))
    ids = code.decode(every)
    assert sorted(ids[ids >= 0].tolist()) == list(range(10)) and (ids[(every == 3).any(-1)] == -1).all()
    assert (code.encode(ids[ids >= 0]) == every[ids >= 0]).all()


def test_shuffling_permutes_all_ids_and_is_a_function_of_the_seed() -> None:
    """The codes used are 0 … V - 1 in any case, as in the authors' lit_gpt code: no id gets a code past them."""
    tables = {seed: DigitCode(1000, base=2, digits=10, shuffle_seed=seed).table_VJ for seed in (None, 0, 1, 2**63 - 1)}
    powers = 2 ** np.arange(9, -1, -1)
    for seed, table_VJ in tables.items():
        codes = table_VJ @ powers
        assert sorted(codes) == list(range(1000))
        assert (codes == np.arange(1000)).sum() == 1000 if seed is None else (codes == np.arange(1000)).sum() < 10
        assert (DigitCode(1000, base=2, digits=10, shuffle_seed=seed).table_VJ == table_VJ).all()
    assert (tables[0] != tables[1]).mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("seed", "size"), GOLDEN_ORDER)
def test_golden_order(seed: int, size: int) -> None:
    """Weights are trained with an order: it may never change."""
    table_VJ = DigitCode(size, base=2, digits=int(np.ceil(np.log2(size))), shuffle_seed=seed).table_VJ
    assert hashlib.blake2b(table_VJ.tobytes(), digest_size=4).hexdigest() == GOLDEN_ORDER[seed, size]


def test_shuffling_balances_the_digits_of_frequent_ids() -> None:
    """Why it is done: over a Zipf law each bit is nearly a fair coin after it, and the first bits are not before."""
    q_V = 1 / np.arange(1, 4097)
    ones = {seed: (q_V / q_V.sum()) @ DigitCode(4096, base=2, digits=12, shuffle_seed=seed).table_VJ for seed in (None, 3)}
    assert ones[None][0] < 0.1 and np.abs(ones[3] - 0.5).mean() < np.abs(ones[None] - 0.5).mean() / 2


@pytest.mark.parametrize(("size", "base", "digits"), [(10, 3, 3), (13, 2, 4), (5, 5, 1)])
def test_possible_ids_are_those_that_agree_with_every_visible_digit(size: int, base: int, digits: int) -> None:
    """Every partly visible string; by comparing digit with digit."""
    code = DigitCode(size, base=base, digits=digits, shuffle_seed=2)
    seen = torch.tensor(list(product(range(base + 1), repeat=digits)))
    possible = code.possible(seen)
    for row, string in zip(possible, seen.tolist(), strict=True):
        assert row.tolist() == [all(a in (b, base) for a, b in zip(string, own, strict=True)) for own in code.table_VJ.tolist()]
    assert possible[(seen == base).all(-1)].all()


def test_members_of_a_shard_are_rows_of_the_whole_and_padding_belongs_to_nothing() -> None:
    code = DigitCode(10, base=3, digits=3, shuffle_seed=0)
    device = torch.device("cpu")
    whole_VG = code.members(0, 16, device)
    assert (whole_VG[:10].unflatten(-1, (3, 3)).argmax(-1).numpy() == code.table_VJ).all()
    assert (whole_VG[:10].unflatten(-1, (3, 3)).sum(-1) == 1).all() and (whole_VG[10:] == 0).all()
    for start, end in ((0, 8), (8, 16), (12, 16)):
        assert (code.members(start, end, device) == whole_VG[start:end]).all()
    assert code.members(0, 8, device) is code.members(0, 8, device)


def test_too_few_digits_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match="4 digits of base 2 cannot write 17 ids"):
        DigitCode(17, base=2, digits=4, shuffle_seed=None)
