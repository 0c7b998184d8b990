"""The digit NELBO against the entropy of toys, through the product's own `token_nelbo`; the paper's joint form, which falls below it.

Shape suffixes: N sequences of the toy, M masks of all digits, L positions, J digits, V ids, P padded vocabulary.
"""

import numpy as np
import pytest
import torch

from pretrain.objectives.config import MDMPrimeConfig, ObjectiveConfig
from pretrain.objectives.mdm_prime import MDMPrime
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests import reference_mdm_prime as reference
from tests.reference_math import Toy, mask_probability, quadrature, random_toy

# ids, length, base, digits: one to three digits in base 2 and 3.
SHAPES = [(2, 3, 2, 1), (4, 2, 2, 2), (3, 3, 2, 2), (7, 2, 2, 3), (3, 2, 3, 1), (5, 2, 3, 2), (10, 2, 3, 3)]
CORRELATED = reference.sparse_toy(4, 1, {(0,): 0.5, (3,): 0.5})


def prime(size: int, base: int, digits: int, **constants: object) -> MDMPrime:
    words = Vocabulary(tokenizer_size=size, model_size=size, padded_size=size + 3, mask_id=None, eos_id=0)
    section = MDMPrimeConfig(base=base, digits=digits, **constants)  # type: ignore[arg-type]
    return MDMPrime(words, ObjectiveConfig(name="mdm_prime", mdm_prime=section))


def padded(logits_XLV: np.ndarray, width: int) -> torch.Tensor:
    """Padding columns get logits that would win if they were let."""
    wide = np.full((*logits_XLV.shape[:-1], width), 7.0)
    wide[..., : logits_XLV.shape[-1]] = logits_XLV
    return torch.from_numpy(wide)


def product_nelbo(
    method: MDMPrime, states: reference.States, logits_MNLV: np.ndarray, *, joint: bool = False, eps: float = 0.0, t_min: float = 0.0
) -> np.ndarray:
    """[N]: the product's nelbo summed over masks and integrated over t; only the chance of each state comes from the reference."""
    toy, vocab = states.toy, VocabShard.whole(method.vocabulary)
    documents_L = np.zeros(toy.length, dtype=np.int32)
    shape = logits_MNLV.shape
    logits_XLP = padded(logits_MNLV.reshape(-1, *shape[2:]), vocab.end)
    flat_MK = states.masks_MLJ.reshape(shape[0], -1)
    total_N = np.zeros(shape[1])
    samples = [method.noised(x_L, documents_L, t=1.0, masked_LJ=mask_LJ, joint=joint) for mask_LJ in states.masks_MLJ for x_L in toy.sequences_NL]
    targets = {key: torch.from_numpy(np.stack([sample.targets[key] for sample in samples])) for key in samples[0].targets}
    own_NLJ = states.own_NLJ
    assert (np.stack([s.inputs["digits"] for s in samples]).reshape(*shape[:2], *own_NLJ.shape[1:])
            == np.where(states.masks_MLJ[:, None], method.code.base, own_NLJ)).all()  # fmt: skip
    for t, share in zip(*quadrature(t_min, 1.0), strict=True):
        weight = method.noised(toy.sequences_NL[0], documents_L, t=float(t), masked_LJ=states.masks_MLJ[0]).targets["weight"]
        targets["weight"] = torch.full((len(samples),), float(weight), dtype=torch.float64)
        nats_MN = method.token_nelbo(logits_XLP, targets, vocab).sum(-1).reshape(shape[:2]).numpy()
        total_N += share * (mask_probability(flat_MK, (1 - eps) * t) @ nats_MN)
    return total_N


def logs(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(p)


@pytest.mark.parametrize("carry_over", [True, False])
@pytest.mark.parametrize(("size", "length", "base", "digits"), SHAPES)
def test_bound_is_the_entropy_with_the_exact_denoiser(size: int, length: int, base: int, digits: int, carry_over: bool) -> None:
    """With carry-over the ids that contradict a visible digit may have any logit. Each sequence's bound is tight: the exps sum to 1."""
    toy = random_toy(size, length, seed=size + length)
    method = prime(size, base, digits, carry_over=carry_over)
    states = reference.states(toy, method.code.table_VJ)
    exact_MNLV = reference.bayes(states)
    logits_MNLV = np.where(states.possible_MNLV, logs(exact_MNLV), 9.0 if carry_over and digits > 1 else -np.inf)
    bound_N = product_nelbo(method, states, logits_MNLV)
    assert toy.q_N @ bound_N == pytest.approx(toy.entropy, abs=1e-10)
    np.testing.assert_allclose(bound_N, -np.log(toy.q_N), atol=1e-9)
    assert np.exp(-bound_N).sum() == pytest.approx(1, abs=1e-10)
    np.testing.assert_allclose(bound_N, reference.integrate(states, reference.marginal_nats(states, exact_MNLV)), atol=1e-10)


@pytest.mark.parametrize(("size", "length", "base", "digits"), [shape for shape in SHAPES if shape[3] > 1])
def test_the_papers_joint_form_falls_below_the_entropy(size: int, length: int, base: int, digits: int) -> None:
    """So it is no bound on anything, and the exps of its negative sum to more than 1."""
    toy = random_toy(size, length, seed=size + length)
    method = prime(size, base, digits)
    states = reference.states(toy, method.code.table_VJ)
    exact_MNLV = reference.bayes(states)
    joint_N = product_nelbo(method, states, logs(exact_MNLV), joint=True)
    assert toy.q_N @ joint_N < toy.entropy - 0.01 and np.exp(-joint_N).sum() > 1.005
    np.testing.assert_allclose(joint_N, reference.integrate(states, reference.joint_nats(states, exact_MNLV)), atol=1e-10)


def test_two_correlated_bits() -> None:
    """H = log 2. Half of the time one bit is seen and tells the other, which the joint form counts as free."""
    method = prime(4, 2, 2, shuffle_seed=None)
    states = reference.states(CORRELATED, method.code.table_VJ)
    logits = logs(reference.bayes(states))
    assert CORRELATED.q_N @ product_nelbo(method, states, logits) == pytest.approx(0.693147, abs=1e-6)
    assert CORRELATED.q_N @ product_nelbo(method, states, logits, joint=True) == pytest.approx(0.346574, abs=1e-6)


@pytest.mark.parametrize(("shuffle_seed", "joint"), [(None, (4.2197, 4.2199)), (0, (3.59, 3.64)), (1, (3.59, 3.64))])
def test_zipf_256_in_eight_bits(shuffle_seed: int | None, joint: tuple[float, float]) -> None:
    """One Zipf token, whose exact denoiser is carry-over itself. The bound is H under any shuffle; the joint form "improves" with it."""
    q_V = 1 / np.arange(1, 257)
    toy = Toy(256, 1, np.arange(256)[:, None], q_V / q_V.sum())
    assert toy.entropy == pytest.approx(4.3125, abs=1e-4)
    method = prime(256, 2, 8, shuffle_seed=shuffle_seed)
    vocab = VocabShard.whole(method.vocabulary)
    logits_NLP = padded(np.broadcast_to(np.log(toy.q_N), (256, 1, 256)), vocab.end)
    values = np.zeros(2)
    for mask_J in np.array(np.unravel_index(np.arange(256), (2,) * 8)).T.astype(bool):
        targets = {
            "ids": torch.arange(256)[:, None],
            "masked": torch.from_numpy(np.broadcast_to(mask_J, (256, 1, 8)).copy()),
            "weight": torch.ones(256),
        }
        # The mean over t of t^(k - 1) (1 - t)^(8 - k): the chance of this mask of k digits, weighted by 1/t.
        k = mask_J.sum()
        weight = sum(share * t ** (k - 1) * (1 - t) ** (8 - k) for t, share in zip(*quadrature(0, 1), strict=True)) if k else 0.0
        for form in range(2):
            targets["joint"] = torch.full((256,), bool(form))
            values[form] += weight * (toy.q_N @ method.token_nelbo(logits_NLP, targets, vocab)[:, 0].numpy())
    assert values[0] == pytest.approx(toy.entropy, abs=1e-9)
    assert joint[0] < values[1] < joint[1]


@pytest.mark.parametrize("carry_over", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_bound_defines_a_distribution_whatever_the_denoiser(seed: int, carry_over: bool) -> None:
    toy = random_toy(5, 2, seed)
    method = prime(5, 2, 3, carry_over=carry_over, shuffle_seed=seed)
    states = reference.states(toy, method.code.table_VJ)
    p_MNLV = reference.random_denoiser(states, seed, carry_over=carry_over)
    bound_N = product_nelbo(method, states, np.maximum(logs(p_MNLV), -50.0))
    assert 0.1 < np.exp(-bound_N).sum() <= 1 + 1e-9
    np.testing.assert_allclose(bound_N, reference.integrate(states, reference.marginal_nats(states, p_MNLV)), rtol=1e-10)


def test_the_authors_constants_fall_below_the_entropy() -> None:
    """e = 1e-3 with t >= 1e-3: the training draws' nelbo is an estimate, thousandths below; the joint form is far below."""
    toy = random_toy(4, 2, seed=6)
    method = prime(4, 2, 2)
    states = reference.states(toy, method.code.table_VJ)
    logits = logs(reference.bayes(states))
    estimate, joint = (toy.q_N @ product_nelbo(method, states, logits, eps=1e-3, t_min=1e-3, joint=j) for j in (False, True))
    assert toy.entropy - 0.02 < estimate < toy.entropy - 1e-4 and joint < estimate - 0.01


@pytest.mark.parametrize(
    ("constants", "section", "labels"),
    [
        ({}, {}, ("bound", "estimate")),
        ({}, {"loss": "joint"}, ("bound", "estimate")),
        ({"evaluation": "authors"}, {}, ("not_a_likelihood", "estimate")),
        ({}, {"joint_mask_above": 0.5}, ("not_a_likelihood", "not_a_likelihood")),
    ],
)
def test_the_labels_follow_the_constants(constants: dict[str, object], section: dict[str, object], labels: tuple[str, str]) -> None:
    words = Vocabulary(tokenizer_size=4, model_size=4, padded_size=4, mask_id=None, eos_id=0)
    config = ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=2, **section), **constants)  # type: ignore[arg-type]
    assert (MDMPrime(words, config).label(evaluation=True), MDMPrime(words, config).label(evaluation=False)) == labels
