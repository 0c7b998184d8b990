"""Masked digits: their statistics, that nothing but the sample decides them, and which digits a vocabulary may have.

Shape suffixes: L positions, J digits of a token.
"""

import hashlib

import numpy as np
import pytest
import torch

from pretrain.errors import UserError
from pretrain.objectives.base import Corrupted
from pretrain.objectives.config import MDMPrimeConfig, ObjectiveConfig
from pretrain.objectives.mdm_prime import MDMPrime
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary

L, J = 512, 7
WORDS = Vocabulary(tokenizer_size=100, model_size=100, padded_size=128, mask_id=None, eos_id=0)
GOLDEN = "af7b41e5"
RECORDED_WITH_NUMPY = "2.4.6"


def prime(evaluation: str = "bound", schedule_eps: float = 1e-3, **section: object) -> MDMPrime:
    constants = MDMPrimeConfig(**{"digits": J, **section})  # type: ignore[arg-type]
    config = ObjectiveConfig(name="mdm_prime", evaluation=evaluation, schedule_eps=schedule_eps, mdm_prime=constants)  # type: ignore[arg-type]
    return MDMPrime(WORDS, config)


PLAIN = prime()


def sample(index: int, *, batch: int = 64, evaluation: bool = False, padding: int = 0, method: MDMPrime = PLAIN, pad_id: int = 127) -> Corrupted:
    text_L = np.arange(L) < L - padding
    tokens_L = np.where(text_L, np.random.default_rng(index).integers(0, 100, L), pad_id)
    noise = Noise(seed=11, index=index, position=index % batch, batch=batch)
    return method.corrupt(tokens_L, np.where(text_L, 0, -1).astype(np.int32), noise, evaluation=evaluation)


@pytest.mark.parametrize(("constants", "evaluation", "eps"), [("bound", False, 0.1), ("bound", True, 0.0), ("authors", True, 0.1)])
def test_each_digit_is_masked_with_one_minus_alpha_on_its_own(constants: str, evaluation: bool, eps: float) -> None:
    """Rates per sample and per digit, and no correlation between two digits of a token, within five standard errors. The run's e is 0.1."""
    method = prime(constants, schedule_eps=0.1)
    z, by_digit_J, pairs_JJ, variance = [], np.zeros(J), np.zeros((J, J)), 0.0
    for index in range(384):
        noisy = sample(index, evaluation=evaluation, method=method)
        rate = (1 - eps) * noisy.t
        centred_LJ = noisy.targets["masked"] - rate
        z.append(centred_LJ.sum() / np.sqrt(L * J * rate * (1 - rate) + 1e-9))
        by_digit_J += centred_LJ.sum(0) / np.sqrt(L * rate * (1 - rate) + 1e-9)
        pairs_JJ += centred_LJ.T @ centred_LJ
        variance += L * (rate * (1 - rate)) ** 2
    assert np.abs(z).max() < 5 and abs(np.mean(z)) < 4 / np.sqrt(len(z)) and np.std(z) == pytest.approx(1, abs=0.15)
    assert np.abs(by_digit_J).max() < 5 * np.sqrt(384)
    assert np.abs(pairs_JJ[~np.eye(J, dtype=bool)]).max() < 5 * np.sqrt(variance)


def test_above_the_chosen_time_a_tokens_digits_are_masked_together() -> None:
    """Each digit's rate stays 1 - alpha_t; at and below that time digits are on their own."""
    method, z = prime(joint_mask_above=0.5), []
    for index in range(256):
        noisy = sample(index, method=method, evaluation=index % 2 == 1)
        masked_LJ = noisy.targets["masked"]
        assert (masked_LJ == masked_LJ[:, :1]).all() == (noisy.t > 0.5)
        if noisy.t > 0.5:
            rate = (1 - 1e-3 * (index % 2 == 0)) * noisy.t
            z.append((masked_LJ[:, 0].sum() - L * rate) / np.sqrt(L * rate * (1 - rate) + 1e-9))
    assert len(z) == 128 and np.abs(z).max() < 5 and abs(np.mean(z)) < 4 / np.sqrt(len(z))


@pytest.mark.parametrize(("evaluation", "constants", "low"), [(False, "bound", 1e-3), (True, "bound", 0.0), (True, "authors", 1e-3)])
def test_one_time_in_each_cell_of_the_global_batch(evaluation: bool, constants: str, low: float) -> None:
    method = prime(constants)
    for step in range(4):
        t = np.array([sample(step * 64 + i, evaluation=evaluation, method=method).t for i in range(64)])
        assert sorted(np.floor((t - low) / (1 - low) * 64).astype(int)) == list(range(64)) and (t > 0).all() and (t <= 1).all()


def test_noise_of_a_sample_does_not_depend_on_the_order_of_asking_or_on_its_text() -> None:
    forward, backward = [sample(i) for i in range(8)], [sample(i) for i in reversed(range(8))][::-1]
    for a, b in zip(forward, backward, strict=True):
        assert a.t == b.t
        np.testing.assert_array_equal(a.inputs["digits"], b.inputs["digits"])
    other_text = PLAIN.corrupt(np.zeros(L, dtype=np.int64), np.zeros(L, dtype=np.int32), Noise(11, 3, 3, 64), evaluation=False)
    np.testing.assert_array_equal(other_text.targets["masked"], forward[3].targets["masked"])


def test_golden_batch() -> None:
    digest = hashlib.blake2b(digest_size=4)
    for index in range(4):
        noisy = sample(index)
        digest.update(noisy.targets["masked"].tobytes() + np.float64(noisy.t).tobytes())
    assert digest.hexdigest() == GOLDEN, f"recorded with numpy {RECORDED_WITH_NUMPY}, this is {np.__version__}"


@pytest.mark.parametrize("pad_id", [0, 99, 100, 127, -1])
def test_padding_is_never_masked_nor_counted_whatever_its_id(pad_id: int) -> None:
    for index in range(16):
        noisy = sample(index, padding=200, pad_id=pad_id)
        assert not noisy.targets["masked"][-200:].any() and noisy.count == 312
        digits_LJ, ids_L = noisy.inputs["digits"], noisy.targets["ids"]
        assert ((digits_LJ == 2) == noisy.targets["masked"]).all() and ((ids_L >= 0) & (ids_L < 100)).all()
        filled_LJ = np.where(noisy.targets["masked"], PLAIN.code.table_VJ[ids_L], digits_LJ)
        assert (PLAIN.code.decode(torch.from_numpy(filled_LJ)).numpy() == ids_L).all()
        assert (ids_L[:312] == np.random.default_rng(index).integers(0, 100, L)[:312]).all()
    assert sample(0, padding=L).count == 0


def test_weights_and_types() -> None:
    """digits, positions and documents of one length, conditioning 0; the weight is 1/t; only the authors' evaluation scores jointly."""
    noisy = sample(5)
    assert {key: (value.dtype.name, value.shape) for key, value in noisy.inputs.items()} == {
        "digits": ("int64", (L, J)), "positions": ("int64", (L,)), "documents": ("int32", (L,)), "conditioning": ("float32", ())
    }  # fmt: skip
    assert {key: (value.dtype.name, value.shape) for key, value in noisy.targets.items()} == {
        "ids": ("int64", (L,)), "masked": ("bool", (L, J)), "weight": ("float64", ()), "joint": ("bool", ())
    }  # fmt: skip
    assert noisy.targets["weight"] == 1 / noisy.t and noisy.inputs["conditioning"] == 0
    authors = prime("authors")
    assert [bool(sample(5, method=m, evaluation=e).targets["joint"]) for m in (PLAIN, authors) for e in (False, True)] == [False, False, False, True]
    inputs = {key: torch.from_numpy(np.stack([value])) for key, value in noisy.inputs.items()}
    network = PLAIN.network_input(inputs, VocabShard.whole(WORDS))
    assert network.digits_BLJ is inputs["digits"] and network.ids_BL is None and network.documents_BL is inputs["documents"]


@pytest.mark.parametrize(
    ("base", "digits", "message"),
    [
        (2, 6, r"digits=6 .*base=2 writes 64 ids, fewer than the vocabulary's 100; use objective\.mdm_prime\.digits=7"),
        (2, 8, r"digits=8 .* first digit would always be 0; use objective\.mdm_prime\.digits=7"),
        (2, 10**9, r"use objective\.mdm_prime\.digits=7"),
        (10, 3, r"use objective\.mdm_prime\.digits=2"),
        (101, 1, r"base=101 must not exceed the vocabulary's 100 ids; use objective\.mdm_prime\.base=2 objective\.mdm_prime\.digits=7"),
    ],
)
def test_digits_must_be_as_many_as_the_vocabulary_needs(base: int, digits: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prime(base=base, digits=digits)


def test_a_base_that_makes_too_many_sums_is_refused_and_the_named_ones_work() -> None:
    words = Vocabulary(tokenizer_size=32000, model_size=32000, padded_size=32000, mask_id=None, eos_id=0)

    def build(base: int, digits: int) -> MDMPrime:
        return MDMPrime(words, ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(base=base, digits=digits)))

    with pytest.raises(UserError, match=r"needs 4098 sums per position, more than 4096; use objective\.mdm_prime\.base=179"):
        build(2049, 2)
    assert [build(base, digits).code.digits for base, digits in ((179, 2), (32000, 1), (2, 15), (32, 3))] == [2, 1, 15, 3]
    for base in (2, 3, 10, 100):
        prime(base=base, digits=next(n for n in range(1, 8) if base**n >= 100))


def test_a_mask_id_is_a_programming_error() -> None:
    words = Vocabulary(tokenizer_size=100, model_size=101, padded_size=128, mask_id=100, eos_id=0)
    with pytest.raises(ValueError, match="mask of MDM-Prime is a digit"):
        MDMPrime(words, ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=7)))
