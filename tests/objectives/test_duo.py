"""Duo's likelihood against the entropy of a toy distribution, through the product's own `token_nelbo`; the printed values of its formula.

Shape suffixes: N sequences of the toy, M noisy states, L positions, K ids with the mask, P padded vocabulary.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pretrain.hf_model.uniform_diffusion import NoiseLevel
from pretrain.objectives.config import DuoConfig, ObjectiveConfig
from pretrain.objectives.duo import Duo
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests import reference_duo as reference
from tests.reference_math import Toy, random_toy

TOYS = [(2, 2, 0), (2, 3, 1), (3, 2, 2), (4, 2, 3)]


def duo(tokens: int, *, mask: bool = True, evaluation: str = "bound") -> Duo:
    model = tokens + mask
    words = Vocabulary(tokenizer_size=tokens, model_size=model, padded_size=model + 3, mask_id=tokens if mask else None, eos_id=0)
    return Duo(words, ObjectiveConfig(name="duo", evaluation=evaluation))  # type: ignore[arg-type]


def nelbo(method: Duo, logp_BLK: np.ndarray, texts_BL: np.ndarray, noisy_BL: np.ndarray, t: float, level: NoiseLevel) -> np.ndarray:
    """[B, L] from the product; forbidden columns get logits that would win if they were let."""
    documents_L = np.zeros(texts_BL.shape[1], dtype=np.int32)
    samples = [method.noised(text_L, documents_L, t=t, level=level, noisy_L=noisy_L) for text_L, noisy_L in zip(texts_BL, noisy_BL, strict=True)]
    targets = {key: torch.from_numpy(np.stack([sample.targets[key] for sample in samples])) for key in samples[0].targets}
    allowed = method.classes - (method.vocabulary.mask_id is not None)
    logits_BLP = np.full((*texts_BL.shape, method.vocabulary.padded_size), 7.0)
    logits_BLP[..., :allowed] = logp_BLK[..., :allowed]
    return method.token_nelbo(torch.from_numpy(logits_BLP), targets, VocabShard.whole(method.vocabulary)).numpy()


def bound(toy: Toy, method: Duo, denoiser: Callable[[np.ndarray, float], np.ndarray], *, t_min: float) -> np.ndarray:
    """[N]: the product's nelbo summed over every noisy state and integrated over t; only the chance of each state comes from the reference."""
    states_ML = reference.states(toy)
    texts_BL, noisy_BL = np.repeat(toy.sequences_NL, len(states_ML), 0), np.tile(states_ML, (len(toy.sequences_NL), 1))
    total_N = np.zeros(len(toy.sequences_NL))
    for t, share in zip(*reference.smooth_quadrature(t_min, 1.0), strict=True):
        level = method.level(float(t), evaluation=True)
        logp_BLK = np.tile(denoiser(states_ML, level.alpha), (len(total_N), 1, 1))
        nats_NM = nelbo(method, logp_BLK, texts_BL, noisy_BL, float(t), level).sum(-1).reshape(len(total_N), -1)
        total_N += share * (nats_NM * reference.state_probability(toy, states_ML, level.alpha)).sum(1)
    return total_N / (1 - t_min)


@pytest.mark.parametrize(("size", "length", "seed"), TOYS)
def test_bound_is_the_entropy_with_the_leave_one_out_posterior(size: int, length: int, seed: int) -> None:
    toy = random_toy(size, length, seed)
    bound_N = bound(toy, duo(size), lambda z, alpha: reference.leave_one_out(toy, z, alpha), t_min=0.0)
    assert (toy.q_N @ bound_N) == pytest.approx(toy.entropy, abs=1e-8)


@pytest.mark.parametrize(("size", "length", "seed"), TOYS)
def test_the_authors_constants_fall_below_the_entropy(size: int, length: int, seed: int) -> None:
    """Why e = 1e-3 with t >= 1e-3 is labelled an estimate."""
    toy = random_toy(size, length, seed)
    value = toy.q_N @ bound(toy, duo(size, evaluation="authors"), lambda z, alpha: reference.leave_one_out(toy, z, alpha), t_min=1e-3)
    assert toy.entropy - 0.03 < value < toy.entropy - 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_any_denoiser_defines_a_sub_probability(seed: int) -> None:
    toy = random_toy(3, 2, seed)
    total = np.exp(-bound(toy, duo(3), lambda z, alpha: reference.random_table(toy, z, seed), t_min=0.0)).sum()
    assert 1e-3 < total <= 1 + 1e-9


@pytest.mark.parametrize(("tokens", "mask"), [(4, False), (4, True), (50, False), (50, True)])
def test_a_uniform_denoiser_integrates_to_the_log_of_the_ids_it_may_say(tokens: int, mask: bool) -> None:
    """log K, or log(K - 1) where the mask is one of the K ids and is never said."""
    method = duo(tokens, mask=mask)
    classes = method.classes
    total, texts, noisy = 0.0, np.array([[1, 1, 1]]), np.array([[1, 0, classes - 1]])
    for alpha, share in zip(*reference.smooth_quadrature(0.0, 1.0), strict=True):
        same, other, last = nelbo(method, np.zeros((1, 3, classes)), texts, noisy, 0.5, NoiseLevel(alpha, 1 - alpha, -1.0))[0]
        chance = (1 - alpha) / classes
        total += share * ((alpha + chance) * same + (classes - 2) * chance * other + chance * last)
    assert total == pytest.approx(np.log(tokens), abs=1e-6)


def test_values_of_one_token() -> None:
    """K = 4, p = (.5, .2, .2, .1), x = 0, alpha = .6, alpha' = -1; computed apart from this code, and once more as a limit of KL divergences."""
    p_K = np.array([0.5, 0.2, 0.2, 0.1])
    got = nelbo(duo(4, mask=False), np.log(p_K)[None, None].repeat(2, 1), np.array([[0, 0]]), np.array([[0, 2]]), 0.4, NoiseLevel(0.6, 0.4, -1.0))
    np.testing.assert_allclose(got[0], [0.22465680, 1.79184180], atol=6e-9)
    for i, value in ((0, got[0, 0]), (2, got[0, 1])):
        assert reference.nats(p_K, i, 0, 0.6, -1.0) == pytest.approx(value, rel=1e-12)
        assert reference.nats_from_reverse_steps(p_K, i, 0, 0.6, -1.0) == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.77, 0.99])
def test_rearranged_formula_is_the_papers(alpha: float) -> None:
    method, rng = duo(7, mask=False), np.random.default_rng(0)
    p_LK = rng.dirichlet(np.full(7, 0.3), size=64)
    texts_L, noisy_L = rng.integers(0, 7, 64), rng.integers(0, 7, 64)
    noisy_L[::3] = texts_L[::3]
    got_L = nelbo(method, np.log(p_LK)[None], texts_L[None], noisy_L[None], 0.5, NoiseLevel(alpha, 1 - alpha, -0.9))[0]
    expected_L = [reference.nats(p_K, i, m, alpha, -0.9) for p_K, i, m in zip(p_LK, noisy_L, texts_L, strict=True)]
    np.testing.assert_allclose(got_L, expected_L, rtol=1e-10, atol=1e-11)


def test_the_last_instant_costs_nothing() -> None:
    """t = 1 with e = 0: z is pure noise and the integrand vanishes, whatever the denoiser; the network is told a finite time."""
    method = duo(4)
    level = method.level(1.0, evaluation=True)
    logp_LK = np.log([[0.97, 0.01, 0.01, 0.01, 1e-9], [1 - 2e-9, 1e-9, 1e-9, 1e-30, 1e-30]])
    got = nelbo(method, logp_LK[None].repeat(2, 0), np.array([[0, 1], [0, 1]]), np.array([[0, 0], [4, 1]]), 1.0, level)
    np.testing.assert_allclose(got, 0, atol=1e-8)
    sample = method.noised(np.zeros(2, int), np.zeros(2, np.int32), t=1.0, level=level, noisy_L=np.ones(2, int))
    assert sample.inputs["conditioning"] == np.float32(-np.log(1e-3))


def test_labels_follow_the_constants() -> None:
    """And no draw of a run with a curriculum may be called a likelihood: what the network reads tells more than z_t."""
    plain, authors = duo(4), duo(4, evaluation="authors")
    assert (plain.label(evaluation=True), plain.label(evaluation=False), authors.label(evaluation=True)) == ("bound", "estimate", "estimate")
    soft = Duo(plain.vocabulary, ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk", top_k=2)))
    assert (soft.label(evaluation=True), soft.label(evaluation=False)) == ("bound", "not_a_likelihood")


def test_draws_of_the_loader_average_to_the_bound() -> None:
    """Times, noisy ids and weights together: the mean over held-out draws with a uniform denoiser is log(K - 1)."""
    method = duo(4)
    tokens_L, documents_L = np.random.default_rng(0).integers(0, 4, 4096), np.zeros(4096, dtype=np.int32)
    samples = [method.corrupt(tokens_L, documents_L, Noise(3, i, i, 64), evaluation=True) for i in range(64)]
    targets = {key: torch.from_numpy(np.stack([sample.targets[key] for sample in samples])) for key in samples[0].targets}
    nats_B = method.token_nelbo(torch.zeros(64, 4096, 8), targets, VocabShard.whole(method.vocabulary)).double().sum(1) / 4096
    assert nats_B.mean().item() == pytest.approx(np.log(4), abs=0.03)
