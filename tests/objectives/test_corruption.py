"""What the loader hands out: its statistics, and that nothing but the sample decides it."""

import hashlib

import numpy as np
import pytest

from pretrain.objectives.ar import AR
from pretrain.objectives.base import Corrupted
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.mdlm import MDLM
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocabulary import Vocabulary

WORDS = Vocabulary(tokenizer_size=100, model_size=101, padded_size=128, mask_id=100, eos_id=0)
GOLDEN = "2ac9fbba"
RECORDED_WITH_NUMPY = "2.4.6"


def mdlm(**constants: object) -> MDLM:
    return MDLM(WORDS, ObjectiveConfig(name="mdlm", **constants))  # type: ignore[arg-type]


def sample(index: int, *, length: int = 512, batch: int = 64, evaluation: bool = False, padding: int = 0, objective: MDLM | None = None) -> Corrupted:
    tokens_L = np.random.default_rng(index).integers(0, 100, length)
    documents_L = np.where(np.arange(length) < length - padding, 0, -1).astype(np.int32)
    noise = Noise(seed=11, index=index, position=index % batch, batch=batch)
    return (objective or mdlm()).corrupt(tokens_L, documents_L, noise, evaluation=evaluation)


@pytest.mark.parametrize(("evaluation", "eps"), [(False, 1e-3), (True, 0.0)])
def test_mask_rate_is_one_minus_alpha(evaluation: bool, eps: float) -> None:
    """Within five standard errors for each sample and for the sum of standardised errors; no trend from the position."""
    z, by_position = [], np.zeros(512)
    for index in range(512):
        noisy = sample(index, evaluation=evaluation)
        masked_L, rate = noisy.targets["masked"], (1 - eps) * noisy.t
        z.append((masked_L.sum() - 512 * rate) / np.sqrt(512 * rate * (1 - rate) + 1e-9))
        by_position += masked_L - rate
    assert np.abs(z).max() < 5 and abs(np.mean(z)) < 4 / np.sqrt(len(z))
    assert np.std(z) == pytest.approx(1, abs=0.15)
    assert np.abs(by_position).max() < 5 * np.sqrt(512 / 6)


@pytest.mark.parametrize(("evaluation", "low", "high"), [(False, 1e-3, 1.0), (True, 0.0, 1.0)])
def test_one_time_in_each_cell_of_the_global_batch(evaluation: bool, low: float, high: float) -> None:
    for step in range(8):
        t = np.array([sample(step * 64 + i, evaluation=evaluation).t for i in range(64)])
        cells = np.floor((t - low) / (high - low) * 64).astype(int)
        assert sorted(cells) == list(range(64)) and (t > 0).all() and (t <= 1).all()


def test_noise_of_a_sample_does_not_depend_on_how_the_batch_is_split_or_on_its_text() -> None:
    """Position in the global batch and global index are all that a rank passes on: asking in any order gives the same bits."""
    forward = [sample(i) for i in range(8)]
    backward = [sample(i) for i in reversed(range(8))][::-1]
    for a, b in zip(forward, backward, strict=True):
        assert a.t == b.t
        np.testing.assert_array_equal(a.inputs["ids"], b.inputs["ids"])
    other_text = mdlm().corrupt(np.zeros(512, dtype=np.int64), np.zeros(512, dtype=np.int32), Noise(11, 3, 3, 64), evaluation=False)
    np.testing.assert_array_equal(other_text.targets["masked"], forward[3].targets["masked"])


def test_golden_batch() -> None:
    digest = hashlib.blake2b(digest_size=4)
    for index in range(4):
        noisy = sample(index)
        digest.update(noisy.targets["masked"].tobytes() + np.float64(noisy.t).tobytes())
    assert digest.hexdigest() == GOLDEN, f"recorded with numpy {RECORDED_WITH_NUMPY}, this is {np.__version__}"


def test_padding_is_never_masked_nor_counted() -> None:
    for index in range(64):
        noisy = sample(index, padding=200)
        assert not noisy.targets["masked"][-200:].any() and noisy.count == 312
        assert (noisy.inputs["ids"][:312][noisy.targets["masked"][:312]] == WORDS.mask_id).all()
        assert (noisy.inputs["ids"] == np.where(noisy.targets["masked"], WORDS.mask_id, noisy.targets["ids"])).all()
    assert sample(0, padding=512).count == 0


def test_weights() -> None:
    for low_variance in (True, False):
        noisy = sample(5, objective=mdlm(low_variance=low_variance))
        assert noisy.targets["nelbo_weight"] == 1 / noisy.t
        assert noisy.targets["loss_weight"] == (1.0 if low_variance else 1 / noisy.t)


def test_network_inputs_have_the_promised_types() -> None:
    """Both objectives: ids, positions and documents of one length, conditioning 0."""
    ar = AR(WORDS, ObjectiveConfig(name="ar")).corrupt(np.arange(9), np.zeros(9, dtype=np.int32), Noise(1, 0, 0, 1), evaluation=False)
    for noisy, length in ((ar, 8), (sample(0), 512)):
        assert {key: (value.dtype.name, value.shape) for key, value in noisy.inputs.items()} == {
            "ids": ("int64", (length,)), "positions": ("int64", (length,)), "documents": ("int32", (length,)), "conditioning": ("float32", ())
        }
        assert noisy.inputs["conditioning"] == 0 and (noisy.inputs["positions"] == np.arange(length)).all()


def test_ar_shifts_by_one_and_scores_targets_that_are_text() -> None:
    """The first token of the next document is scored: from the end-of-document token before it."""
    tokens, documents = np.array([5, 6, 0, 7, 8, 0, 3, 3, 3]), np.array([0, 0, 0, 1, 1, 1, -1, -1, -1], dtype=np.int32)
    shifted = AR(WORDS, ObjectiveConfig(name="ar")).corrupt(tokens, documents, Noise(1, 0, 0, 1), evaluation=False)
    assert list(shifted.inputs["ids"]) == [5, 6, 0, 7, 8, 0, 3, 3] and list(shifted.targets["ids"]) == [6, 0, 7, 8, 0, 3, 3, 3]
    assert list(shifted.targets["scored"]) == [True] * 5 + [False] * 3 and shifted.count == 5
    assert list(shifted.inputs["documents"]) == [0, 0, 0, 1, 1, 1, -1, -1]
