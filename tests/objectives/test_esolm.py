"""What the loader hands out for Eso-LM: statistics of masks and orders, which of the forms a sample takes, and that only the sample decides it.

Shape suffixes: L positions, S positions of the network (L or 2L).
"""

import hashlib
from collections import Counter
from itertools import permutations
from math import factorial

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from pretrain.hf_model.network_input import Attention
from pretrain.objectives.base import Corrupted
from pretrain.objectives.config import EsoLMConfig, ObjectiveConfig
from pretrain.objectives.esolm import EsoLM
from pretrain.objectives.mdlm import MDLM
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests import reference_esolm as reference

WORDS = Vocabulary(tokenizer_size=100, model_size=101, padded_size=128, mask_id=100, eos_id=0)
DIFFUSION, SEQUENTIAL = 0, 1
GOLDEN = "e0eb31ea"
RECORDED_WITH_NUMPY = "2.4.6"


def esolm(alpha_0: float = 1.0, *, evaluate: str = "nelbo", orders: int = 1, split: float = 0.5, **constants: object) -> EsoLM:
    section = EsoLMConfig(alpha_0=alpha_0, evaluate=evaluate, orders=orders, batch_split=split)  # type: ignore[arg-type]
    return EsoLM(WORDS, ObjectiveConfig(name="esolm", esolm=section, **constants))  # type: ignore[arg-type]


def sample(
    objective: EsoLM, index: int, *, part: int = DIFFUSION, share: float = 1.0, length: int = 512, batch: int = 64, evaluation: bool = False,
    padding: int = 0,
) -> Corrupted:  # fmt: skip
    tokens_L = np.random.default_rng(index).integers(0, 100, length)
    documents_L = np.where(np.arange(length) < length - padding, 0, -1).astype(np.int32)
    noise = Noise(seed=11, index=index, position=index % batch, batch=batch, part=part, share=share)
    return objective.corrupt(tokens_L, documents_L, noise, evaluation=evaluation)


def order(noisy: Corrupted) -> tuple[int, ...]:
    length = len(noisy.targets["ids"])
    return tuple(noisy.inputs["positions"][:length].tolist())


def masked_positions(noisy: Corrupted) -> tuple[int, ...]:
    return tuple(sorted(np.array(order(noisy))[noisy.targets["masked"]].tolist()))


def uniform(counts: Counter[tuple[int, ...]], possible: list[tuple[int, ...]]) -> tuple[float, int]:
    """Chi-square of equally likely outcomes, and its degrees of freedom; nothing else may have occurred."""
    assert set(counts) <= set(possible)
    expected = counts.total() / len(possible)
    return sum((counts[outcome] - expected) ** 2 / expected for outcome in possible), len(possible) - 1


@pytest.mark.parametrize(("part", "evaluation"), [(DIFFUSION, False), (DIFFUSION, True), (SEQUENTIAL, False)])
def test_every_order_of_four_tokens_is_equally_likely(part: int, evaluation: bool) -> None:
    """Given where the masks are: all orders of the clean tokens, then, in diffusion, all orders of the masks; the sum over the patterns."""
    method = esolm(0.8)
    by_mask: dict[tuple[int, ...], Counter[tuple[int, ...]]] = {}
    for index in range(12_000):
        noisy = sample(method, index, part=part, length=4, evaluation=evaluation)
        by_mask.setdefault(masked_positions(noisy), Counter())[order(noisy)] += 1
    total, freedom = 0.0, 0
    for masked, counts in by_mask.items():
        mask_L = np.isin(np.arange(4), masked)
        possible = reference.diffusion_orders(mask_L) if part == DIFFUSION else reference.sequential_orders(mask_L)
        assert len(possible) == factorial(4 - len(masked)) * (factorial(len(masked)) if part == DIFFUSION else 1)
        if counts.total() >= 10 * len(possible):
            statistic, degrees = uniform(counts, possible)
            total, freedom = total + statistic, freedom + degrees
    assert freedom > (60 if part == DIFFUSION else 30)
    assert 1e-4 < chi2.sf(total, freedom) < 1 - 1e-4


@pytest.mark.parametrize("alpha_0", [0.4, 1.0])
def test_any_order_has_the_order_of_the_two_phases(alpha_0: float) -> None:
    """Against the definition: n ~ Binomial(L, alpha_0) tokens in random order, then the rest from left to right."""
    method, expected = esolm(alpha_0, evaluate="any_order"), reference.any_order_probabilities(4, alpha_0)
    counts = Counter(order(sample(method, index, length=4, evaluation=True)) for index in range(8_000))
    statistic = sum((counts[outcome] - 8_000 * chance) ** 2 / (8_000 * chance) for outcome, chance in expected.items())
    assert counts.total() == 8_000 and sum(expected.values()) == pytest.approx(1) and set(expected) == set(permutations(range(4)))
    assert 1e-4 < chi2.sf(statistic, len(expected) - 1) < 1 - 1e-4


@pytest.mark.parametrize("alpha_0", [0.3, 1.0])
@pytest.mark.parametrize(("evaluation", "eps"), [(False, 1e-3), (True, 0.0)])
def test_diffusion_masks_at_the_rate_of_its_time(evaluation: bool, eps: float, alpha_0: float) -> None:
    """Within five standard errors for each sample (where the count is near normal) and over all of them; no trend from the position."""
    method, z, by_position = esolm(alpha_0), [], np.zeros(512)
    for index in range(512):
        noisy = sample(method, index, evaluation=evaluation)
        rate = 1 - alpha_0 * (1 - (1 - eps) * noisy.t)
        masked_L = np.isin(np.arange(512), masked_positions(noisy))
        if (variance := 512 * rate * (1 - rate)) > 4:
            z.append((masked_L.sum() - 512 * rate) / np.sqrt(variance))
        by_position += masked_L - rate
    assert len(z) > 480 and np.abs(z).max() < 5 and abs(np.mean(z)) < 4 / np.sqrt(len(z))
    assert np.std(z) == pytest.approx(1, abs=0.15)
    assert np.abs(by_position).max() < 5 * np.sqrt(512 / 4)


@pytest.mark.parametrize("alpha_0", [0.125, 0.5, 0.9])
def test_diffusion_leaves_the_sequential_phase_its_share(alpha_0: float) -> None:
    """E[diffusion tokens] = alpha_0 L, with the variance of independent tokens."""
    method = esolm(alpha_0)
    clean = np.array([512 - sample(method, i, part=SEQUENTIAL).targets["masked"].sum() for i in range(400)])
    deviation = np.sqrt(512 * alpha_0 * (1 - alpha_0))
    assert abs(clean.mean() - 512 * alpha_0) < 4 * deviation / np.sqrt(400)
    assert clean.std() == pytest.approx(deviation, rel=0.15)


@pytest.mark.parametrize(("evaluation", "low"), [(False, 1e-3), (True, 0.0)])
def test_one_time_in_each_cell_of_the_diffusion_part(evaluation: bool, low: float) -> None:
    t = np.array([sample(esolm(0.5), i, evaluation=evaluation).t for i in range(64)])
    assert sorted(np.floor((t - low) / (1 - low) * 64).astype(int)) == list(range(64)) and (t > 0).all() and (t <= 1).all()


FORMS = [
    pytest.param(1.0, "nelbo", DIFFUSION, False, id="diffusion alone"),
    pytest.param(0.6, "nelbo", DIFFUSION, True, id="diffusion"),
    pytest.param(0.6, "nelbo", SEQUENTIAL, False, id="sequential"),
    pytest.param(0.0, "nelbo", 0, False, id="autoregression alone"),
    pytest.param(1.0, "any_order", 0, True, id="any order"),
]


@pytest.mark.parametrize(("alpha_0", "evaluate", "part", "evaluation"), FORMS)
def test_what_the_network_gets(alpha_0: float, evaluate: str, part: int, evaluation: bool) -> None:
    """Tokens carry positions and documents with them; masks stand where they are scored, after the clean tokens; padding comes last."""
    method = esolm(alpha_0, evaluate=evaluate)
    two_stream = (alpha_0, evaluate, part) not in ((1.0, "nelbo", DIFFUSION), (0.6, "nelbo", DIFFUSION))
    tokens_L = np.random.default_rng(0).integers(0, 100, 64)
    documents_L = np.array([4] * 10 + [5] * 30 + [6] * 12 + [-1] * 12, dtype=np.int32)
    tokens_L[52:] = WORDS.mask_id
    for index in range(20):
        noisy = method.corrupt(tokens_L, documents_L, Noise(3, index, index, 20, part=part), evaluation=evaluation)
        order_L, masked_L = np.array(order(noisy)), noisy.targets["masked"]
        clean = 52 - masked_L.sum()
        assert sorted(order_L) == list(range(64)) and noisy.count == 52
        assert order_L[52:].tolist() == list(range(52, 64)) and not masked_L[:clean].any() and masked_L[clean:52].all() and not masked_L[52:].any()
        if evaluate == "any_order" or alpha_0 == 0:
            assert clean == 0
        if two_stream and evaluate == "nelbo":
            assert order_L[clean:52].tolist() == sorted(order_L[clean:52])
        np.testing.assert_array_equal(noisy.targets["ids"], tokens_L[order_L])
        noisy_L = np.where(masked_L, WORDS.mask_id, tokens_L[order_L])
        doubled = (lambda x_L: np.tile(x_L, 2)) if two_stream else (lambda x_L: x_L)
        np.testing.assert_array_equal(noisy.inputs["ids"], np.concatenate((noisy_L, tokens_L[order_L])) if two_stream else noisy_L)
        np.testing.assert_array_equal(noisy.inputs["positions"], doubled(order_L))
        np.testing.assert_array_equal(noisy.inputs["documents"], doubled(documents_L[order_L]))
    size = 128 if two_stream else 64
    assert {key: (value.dtype.name, value.shape) for key, value in noisy.inputs.items()} == {
        "ids": ("int64", (size,)), "positions": ("int64", (size,)), "documents": ("int32", (size,)), "conditioning": ("float32", ()),
        "streams": ("bool", (1 + two_stream,)),
    }  # fmt: skip
    assert noisy.inputs["conditioning"] == 0
    inputs = {key: torch.from_numpy(np.stack([value])) for key, value in noisy.inputs.items()}
    network = method.network_input(inputs, VocabShard.whole(WORDS))
    assert network.attention is (Attention.TWO_STREAM if two_stream else Attention.CAUSAL) and network.documents_BL is not None
    del inputs["documents"]
    assert method.network_input(inputs, VocabShard.whole(WORDS)).documents_BL is None
    assert sample(method, 0, part=part, evaluation=evaluation, padding=512).count == 0


@pytest.mark.parametrize(("alpha_0", "evaluate", "part", "evaluation"), FORMS)
def test_noise_depends_on_the_sample_alone(alpha_0: float, evaluate: str, part: int, evaluation: bool) -> None:
    method = esolm(alpha_0, evaluate=evaluate)
    forward = [sample(method, i, part=part, evaluation=evaluation) for i in range(4)]
    backward = [sample(method, i, part=part, evaluation=evaluation) for i in reversed(range(4))][::-1]
    for a, b in zip(forward, backward, strict=True):
        assert a.t == b.t and order(a) == order(b)
        np.testing.assert_array_equal(a.inputs["ids"], b.inputs["ids"])
    noise = Noise(11, 3, 3, 64, part=part)
    other_text = method.corrupt(np.zeros(512, dtype=np.int64), np.zeros(512, dtype=np.int32), noise, evaluation=evaluation)
    assert order(other_text) == order(forward[3]) and masked_positions(other_text) == masked_positions(forward[3])
    assert len({order(noisy) for noisy in forward}) == (1 if alpha_0 == 0 else 4)


def test_golden_batch() -> None:
    digest = hashlib.blake2b(digest_size=4)
    for index in range(4):
        for part in (DIFFUSION, SEQUENTIAL):
            noisy = sample(esolm(0.5), index, part=part)
            digest.update(noisy.inputs["positions"].tobytes() + noisy.targets["masked"].tobytes() + np.float64(noisy.t or 0).tobytes())
    assert digest.hexdigest() == GOLDEN, f"recorded with numpy {RECORDED_WITH_NUMPY}, this is {np.__version__}"


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("constants", ["bound", "authors"])
def test_weights(evaluation: bool, constants: str) -> None:
    """-alpha' / (1 - alpha), divided by the share of the part; 1 in the low-variance form, which belongs to diffusion alone."""
    eps = 0.0 if evaluation and constants == "bound" else 1e-3
    for alpha_0, low_variance in ((1.0, None), (1.0, False), (0.6, None), (0.6, True)):
        method, share = esolm(alpha_0, low_variance=low_variance, evaluation=constants), 0.25 if alpha_0 < 1 else 1.0
        noisy = sample(method, 5, share=share, evaluation=evaluation)
        weight = alpha_0 * (1 - eps) / (1 - alpha_0 * (1 - (1 - eps) * noisy.t)) / share
        assert noisy.targets["nelbo_weight"] == pytest.approx(weight, rel=1e-12)
        assert noisy.targets["loss_weight"] == pytest.approx(1.0 if alpha_0 == 1 and low_variance is None else weight, rel=1e-12)
    noisy = sample(esolm(0.6), 5, part=SEQUENTIAL, share=0.75, evaluation=evaluation)
    assert noisy.targets["nelbo_weight"] == noisy.targets["loss_weight"] == 1 / 0.75 and noisy.t is None


def test_diffusion_alone_is_mdlm_in_another_order() -> None:
    mdlm = MDLM(WORDS, ObjectiveConfig(name="mdlm"))
    for index in range(8):
        ours = sample(esolm(1.0), index)
        tokens_L = np.random.default_rng(index).integers(0, 100, 512)
        theirs = mdlm.corrupt(tokens_L, np.zeros(512, dtype=np.int32), Noise(seed=11, index=index, position=index, batch=64), evaluation=False)
        assert ours.t == theirs.t and ours.targets["loss_weight"] == theirs.targets["loss_weight"]
        assert ours.targets["nelbo_weight"] == pytest.approx(theirs.targets["nelbo_weight"], rel=1e-14)
        np.testing.assert_array_equal(ours.inputs["ids"], theirs.inputs["ids"][ours.inputs["positions"]])


def test_autoregression_alone_scores_an_all_mask_sequence_from_left_to_right() -> None:
    """L_AO at alpha_0 = 0 has the identity order and is the sequential loss: the same arrays."""
    one, other = (sample(esolm(0.0, evaluate=evaluate), 3, evaluation=True, padding=9) for evaluate in ("any_order", "nelbo"))
    assert order(one) == tuple(range(512)) and one.targets["masked"].sum() == 503 and (one.inputs["ids"][:503] == WORDS.mask_id).all()
    for a, b in ((one.inputs, other.inputs), (one.targets, other.targets)):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


def test_parts_labels_and_streams() -> None:
    def found(method: EsoLM) -> tuple[object, ...]:
        return method.parts, method.evaluation_parts, method.importance, method.two_stream, *(method.label(evaluation=e) for e in (False, True))

    assert found(esolm(1.0)) == ((1.0,), 1, 1, False, "estimate", "bound")
    assert found(esolm(1.0, evaluation="authors")) == ((1.0,), 1, 1, False, "estimate", "estimate")
    assert found(esolm(1.0, evaluate="any_order", orders=8)) == ((1.0,), 1, 8, True, "estimate", "bound")
    assert found(esolm(0.5, split=0.25)) == ((0.25, 0.75), 2, 1, True, "estimate", "bound")
    assert found(esolm(0.5, evaluation="authors")) == ((0.5, 0.5), 2, 1, True, "estimate", "estimate")
    assert found(esolm(0.5, evaluate="any_order", orders=3)) == ((0.5, 0.5), 1, 3, True, "estimate", "bound")
    assert found(esolm(0.0)) == ((1.0,), 1, 1, True, "exact", "exact")
    with pytest.raises(ValueError, match="mask id"):
        EsoLM(Vocabulary(tokenizer_size=4, model_size=4, padded_size=4, mask_id=None, eos_id=0), ObjectiveConfig(name="esolm"))
