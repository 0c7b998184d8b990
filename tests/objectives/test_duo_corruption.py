"""What the loader hands out for Duo, with and without the curriculum: its statistics, and that nothing but the sample decides it."""

import hashlib

import numpy as np
import pytest
import torch

from pretrain.objectives.base import Corrupted
from pretrain.objectives.config import DuoConfig, ObjectiveConfig
from pretrain.objectives.duo import Duo
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary

WORDS = Vocabulary(tokenizer_size=19, model_size=20, padded_size=32, mask_id=19, eos_id=0)
PLAIN = Duo(WORDS, ObjectiveConfig(name="duo"))
SOFT = Duo(WORDS, ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk", top_k=4, curriculum_end=1000)))
GOLDEN, GOLDEN_SOFT = "8f03dac4", "4ce6fe6b"
RECORDED_WITH_NUMPY = "2.4.6"
METHODS = pytest.mark.parametrize("method", [PLAIN, SOFT], ids=["plain", "soft"])


def sample(index: int, *, method: Duo = PLAIN, evaluation: bool = False, padding: int = 0, step: int = 0) -> Corrupted:
    documents_L = np.where(np.arange(512) < 512 - padding, 0, -1).astype(np.int32)
    tokens_L = np.where(documents_L == 0, np.random.default_rng(index).integers(0, 19, 512), 999)
    noise = Noise(seed=11, index=index, position=index % 64, batch=64, step=step)
    return method.corrupt(tokens_L, documents_L, noise, evaluation=evaluation)


@pytest.mark.parametrize(("method", "evaluation"), [(PLAIN, False), (PLAIN, True), (SOFT, False)], ids=["training", "evaluation", "curriculum"])
def test_tokens_are_kept_as_often_as_alpha_says(method: Duo, evaluation: bool) -> None:
    """P(z = x) = alpha + (1 - alpha) / K with the alpha that goes to the loss: each sample within five standard errors, and all together."""
    z, by_position = [], np.zeros(512)
    for index in range(512):
        noisy = sample(index, method=method, evaluation=evaluation)
        rate = float(noisy.targets["alpha"]) + float(noisy.targets["one_minus_alpha"]) / 20
        kept_L = noisy.targets["noisy"] == noisy.targets["ids"]
        z.append((kept_L.sum() - 512 * rate) / np.sqrt(512 * rate * (1 - rate) + 1e-9))
        by_position += kept_L - rate
    assert np.abs(z).max() < 5 and abs(np.mean(z)) < 4 / np.sqrt(len(z)) and np.std(z) == pytest.approx(1, abs=0.15)
    assert np.abs(by_position).max() < 5 * np.sqrt(512 / 6)


@METHODS
def test_other_ids_are_uniform_the_mask_among_them(method: Duo) -> None:
    counts_KK = np.zeros((20, 20))
    for index in range(512):
        noisy = sample(index, method=method)
        np.add.at(counts_KK, (noisy.targets["ids"], noisy.targets["noisy"]), 1)
    counts_K = (counts_KK * (1 - np.eye(20)))[:19].sum(0)
    expected_K = counts_K.sum() / 19 * np.append(np.full(19, 18 / 19), 1)
    assert (np.abs(counts_K - expected_K) < 5 * np.sqrt(expected_K)).all() and counts_K.sum() > 50_000


def test_noise_level_is_that_of_the_schedule_and_of_the_network() -> None:
    for index in range(64):
        training, held_out = sample(index), sample(index, evaluation=True)
        assert training.t is not None and held_out.t is not None
        assert training.targets["alpha"] == pytest.approx(1 - 0.999 * training.t, rel=1e-12) and training.targets["alpha_derivative"] == -0.999
        assert held_out.targets["alpha"] == pytest.approx(1 - held_out.t, rel=1e-12) and held_out.targets["alpha_derivative"] == -1
        assert held_out.targets["one_minus_alpha"] == held_out.t and training.targets["one_minus_alpha"] == 0.999 * training.t
        for noisy in (training, held_out, sample(index, method=SOFT)):
            assert noisy.inputs["conditioning"] == pytest.approx(min(-np.log(noisy.targets["alpha"]), np.log(1e3)), rel=1e-6)


def test_levels_of_the_curriculum() -> None:
    """alpha falls from .95 to .05 as t goes from 0 to 1, and alpha' is its slope: over the batch's times it integrates to the whole fall."""
    noisy = [sample(i, method=SOFT) for i in range(64)]
    t, alpha, slope = (np.array([n.t if key is None else n.targets[key] for n in noisy]) for key in (None, "alpha", "alpha_derivative"))
    assert (np.diff(alpha[np.argsort(t)]) < 0).all() and 0.05 <= alpha.min() < 0.06 and 0.94 < alpha.max() <= 0.95
    assert slope.mean() == pytest.approx(-0.9, abs=0.01)


@pytest.mark.parametrize(("evaluation", "low"), [(False, 1e-3), (True, 0.0)])
def test_one_time_in_each_cell_of_the_global_batch(evaluation: bool, low: float) -> None:
    for step in range(8):
        t = np.array([sample(step * 64 + i, evaluation=evaluation).t for i in range(64)])
        assert sorted(np.floor((t - low) / (1 - low) * 64).astype(int)) == list(range(64)) and (t > 0).all() and (t <= 1).all()


@METHODS
def test_noise_of_a_sample_does_not_depend_on_how_the_batch_is_split(method: Duo) -> None:
    forward = [sample(i, method=method) for i in range(8)]
    backward = [sample(i, method=method) for i in reversed(range(8))][::-1]
    for a, b in zip(forward, backward, strict=True):
        for key in a.inputs:
            np.testing.assert_array_equal(a.inputs[key], b.inputs[key])
        for key in a.targets:
            np.testing.assert_array_equal(a.targets[key], b.targets[key])


def test_the_plain_process_redraws_the_same_positions_whatever_the_text() -> None:
    noise, zeros_L = Noise(11, 3, 3, 64), np.zeros(512, dtype=np.int32)
    a, b = (PLAIN.corrupt(np.full(512, token), zeros_L, noise, evaluation=False).targets["noisy"] for token in (5, 6))
    assert ((a == b) | ((a == 5) & (b == 6))).all() and (a == b).any()


@pytest.mark.parametrize(("method", "golden"), [(PLAIN, GOLDEN), (SOFT, GOLDEN_SOFT)], ids=["plain", "soft"])
def test_golden_batch(method: Duo, golden: str) -> None:
    """Weights are left out: their last bits belong to the machine's exp and log."""
    digest = hashlib.blake2b(digest_size=4)
    for index in range(4):
        noisy = sample(index, method=method)
        digest.update(noisy.targets["noisy"].tobytes() + noisy.inputs["ids"].tobytes() + np.float64(noisy.t).tobytes())
    assert digest.hexdigest() == golden, f"recorded with numpy {RECORDED_WITH_NUMPY}, this is {np.__version__}"


@METHODS
def test_padding_is_never_noised_scored_or_counted(method: Duo) -> None:
    """It goes through as it is, even an id that the model has no row for."""
    for index in range(32):
        noisy = sample(index, padding=200, method=method)
        assert noisy.count == 312 and list(noisy.targets["scored"]) == [True] * 312 + [False] * 200
        np.testing.assert_array_equal(noisy.targets["noisy"][312:], noisy.targets["ids"][312:])
        if method is SOFT:
            assert (noisy.inputs["ids"][312:] == noisy.targets["ids"][312:, None]).all()
            assert (noisy.inputs["weights"][312:] == [1, 0, 0, 0]).all()
    assert sample(0, padding=512, method=method).count == 0


def test_arrays_have_the_promised_types_and_one_shape_per_phase() -> None:
    """Softened inputs while the curriculum lasts; plain ones after it, and in evaluation at any time."""
    plain = {"ids": ("int64", (512,)), "positions": ("int64", (512,)), "documents": ("int32", (512,)), "conditioning": ("float32", ())}
    soft = plain | {"ids": ("int64", (512, 4)), "weights": ("float32", (512, 4))}
    targets = {"ids": ("int64", (512,)), "noisy": ("int64", (512,)), "scored": ("bool", (512,))}
    targets |= {key: ("float64", ()) for key in ("alpha", "one_minus_alpha", "alpha_derivative")}
    cases = [
        (sample(0), plain), (sample(0, method=SOFT, step=999), soft), (sample(0, method=SOFT, step=1000), plain),
        (sample(0, method=SOFT, evaluation=True), plain),
    ]  # fmt: skip
    for noisy, inputs in cases:
        assert {key: (value.dtype.name, value.shape) for key, value in noisy.inputs.items()} == inputs
        assert {key: (value.dtype.name, value.shape) for key, value in noisy.targets.items()} == targets
    for a, b in ((sample(0, method=SOFT, step=1000), sample(0)), (sample(0, method=SOFT, evaluation=True), sample(0, evaluation=True))):
        np.testing.assert_array_equal(a.inputs["ids"], b.inputs["ids"])


def test_the_softened_input_follows_the_step() -> None:
    """z and the kept ids belong to the sample; the temperature, and so the weights, to the step."""
    cooling = DuoConfig(curriculum="topk", top_k=4, log10_tau_start=0.0, log10_tau_end=-3.0, curriculum_end=1000)
    method = Duo(WORDS, ObjectiveConfig(name="duo", duo=cooling))
    early, late = sample(0, method=method), sample(0, method=method, step=900)
    np.testing.assert_array_equal(early.targets["noisy"], late.targets["noisy"])
    np.testing.assert_array_equal(early.inputs["ids"], late.inputs["ids"])
    assert early.inputs["weights"].max(1).mean() < 0.3 and late.inputs["weights"].max(1).mean() > 0.95


@METHODS
def test_network_input(method: Duo) -> None:
    inputs = {key: torch.from_numpy(value[None]) for key, value in sample(0, method=method).inputs.items()}
    network = method.network_input(inputs, VocabShard.whole(WORDS))
    assert network.ids_BL is inputs["ids"] and network.weights_BLK is inputs.get("weights") and network.conditioning_B is inputs["conditioning"]
    assert network.documents_BL is not None and network.attention == method.attention
    del inputs["documents"]
    assert method.network_input(inputs, VocabShard.whole(WORDS)).documents_BL is None
