"""Eso-LM's likelihoods against the entropy of a toy distribution, through everything that the product decides.

The network is a table of what each position can see. What it can see is not assumed: it follows from the ids, positions and attention
pattern that the objective hands over, through as many layers as it takes. A leak would let the exact denoiser know the answer, and the
bound would fall below the entropy.

Shape suffixes: B samples, N sequences of the toy, O orders, L positions, S positions of the network, P padded vocabulary.
"""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.hf_model.attention_patterns import attention_pattern
from pretrain.hf_model.network_input import Attention
from pretrain.objectives.base import Corrupted
from pretrain.objectives.config import EsoLMConfig, ObjectiveConfig
from pretrain.objectives.esolm import EsoLM
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests import reference_esolm as reference
from tests.reference_math import Toy, all_masks, bayes_next_token, mask_probability, quadrature, random_toy

TOYS = [(2, 2, 0), (4, 2, 3), (2, 3, 1), (3, 3, 4)]
ALPHAS = [0.0, 0.3, 0.7, 1.0]


def esolm(toy: Toy, alpha_0: float, **constants: object) -> EsoLM:
    words = Vocabulary(tokenizer_size=toy.vocabulary, model_size=toy.vocabulary + 1, padded_size=toy.vocabulary + 4, mask_id=toy.mask, eos_id=0)
    return EsoLM(words, ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=alpha_0), **constants))  # type: ignore[arg-type]


def stacked(arrays: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(np.stack([one[key] for one in arrays])) for key in arrays[0]}


def knowledge(objective: EsoLM, samples: list[Corrupted]) -> list[list[reference.Seen]]:
    """For each sample and each of its L scored positions: what reaches it, itself last."""
    inputs = objective.network_input(stacked([sample.inputs for sample in samples]), VocabShard.whole(objective.vocabulary))
    pattern = attention_pattern(inputs)
    assert inputs.ids_BL is not None and (pattern.allowed_B1LS is not None or pattern.is_causal)
    size = inputs.ids_BL.shape[1]
    reaches = torch.ones(1, size, size).tril() if pattern.allowed_B1LS is None else pattern.allowed_B1LS[:, 0].float()
    for _ in range(size):
        reaches = (reaches @ reaches).clamp(max=1)
    pairs = torch.stack((inputs.positions_BL, inputs.ids_BL), -1).tolist()
    scored = size // 2 if inputs.attention is Attention.TWO_STREAM else size
    reaches = reaches.expand(len(pairs), -1, -1)
    return [
        [(*(tuple(pair[k]) for k in row[i].nonzero().flatten().tolist() if k != i), tuple(pair[i])) for i in range(scored)]
        for pair, row in zip(pairs, reaches, strict=True)
    ]


def nelbo(objective: EsoLM, samples: list[Corrupted], logits_BLP: Tensor) -> np.ndarray:
    """[B, L] of the product."""
    return objective.token_nelbo(logits_BLP, stacked([s.targets for s in samples]), VocabShard.whole(objective.vocabulary)).numpy()


def logits(objective: EsoLM, samples: list[Corrupted], denoiser: reference.CausalDenoiser, mask: int) -> Tensor:
    """[B, L, P]: the table's answers where a mask asks. Forbidden columns, and positions that are no masks, hold what must not matter."""
    table, seen = cache(denoiser), knowledge(objective, samples)
    logits_BLP = torch.full((len(samples), len(seen[0]), objective.vocabulary.padded_size), 7.0, dtype=torch.float64)
    for b, row in enumerate(seen):
        for i, what in enumerate(row):
            if what[-1][1] == mask:
                logits_BLP[b, i, :mask] = torch.from_numpy(table(what))
    return logits_BLP


def product_diffusion(toy: Toy, objective: EsoLM, denoiser: reference.CausalDenoiser, share: float) -> np.ndarray:
    """[N]: E over t, masks and orders of the diffusion samples' nelbo, as evaluation draws them."""
    bound = objective.config.evaluation == "bound"
    eps, t_min = (0.0, 0.0) if bound else (objective.config.schedule_eps, objective.config.time_eps)
    documents_L, masks_ML = np.zeros(toy.length, dtype=np.int32), all_masks(toy.length)
    cases = [(n, m, order) for n in range(len(toy.q_N)) for m, mask_L in enumerate(masks_ML) for order in reference.diffusion_orders(mask_L)]
    orders_M = np.array([len(reference.diffusion_orders(mask_L)) for mask_L in masks_ML])
    logits_BLP, total_N = None, np.zeros(len(toy.q_N))
    for t, node in zip(*quadrature(t_min, 1.0), strict=True):
        samples = [
            objective.diffused(
                toy.sequences_NL[n], documents_L, order_L=np.array(order), masked_L=masks_ML[m], t=float(t), share=share, evaluation=True
            )
            for n, m, order in cases
        ]
        logits_BLP = logits(objective, samples, denoiser, toy.mask) if logits_BLP is None else logits_BLP
        chance_M = mask_probability(masks_ML, 1 - objective.alpha_0 * (1 - (1 - eps) * t)) / orders_M
        for (n, m, _), nats in zip(cases, nelbo(objective, samples, logits_BLP).sum(1), strict=True):
            total_N[n] += node * chance_M[m] * nats
    return total_N


def product_sequential(toy: Toy, objective: EsoLM, denoiser: reference.CausalDenoiser, share: float) -> np.ndarray:
    """[N]: E over z_0 and orders of the sequential samples' nelbo."""
    documents_L, masks_ML = np.zeros(toy.length, dtype=np.int32), all_masks(toy.length)
    total_N = np.zeros(len(toy.q_N))
    for mask_L, chance in zip(masks_ML, mask_probability(masks_ML, 1 - objective.alpha_0), strict=True):
        orders = reference.sequential_orders(mask_L)
        for order in orders:
            samples = [objective.sequential(x_L, documents_L, order_L=np.array(order), scored_L=mask_L, share=share) for x_L in toy.sequences_NL]
            total_N += chance / len(orders) * nelbo(objective, samples, logits(objective, samples, denoiser, toy.mask)).sum(1)
    return total_N


def product_bound(toy: Toy, objective: EsoLM, denoiser: reference.CausalDenoiser) -> np.ndarray:
    """[N]: the mean over the parts, each of which the objective was told has an equal share."""
    share = 1 / objective.evaluation_parts
    terms = []
    if objective.alpha_0 > 0:
        terms.append(product_diffusion(toy, objective, denoiser, share))
    if objective.alpha_0 < 1:
        terms.append(product_sequential(toy, objective, denoiser, share))
    assert len(terms) == objective.evaluation_parts
    return np.mean(terms, axis=0)


def product_order(toy: Toy, objective: EsoLM, denoiser: reference.CausalDenoiser, order: reference.Order) -> np.ndarray:
    """[N]: L_AO of one order."""
    documents_L = np.zeros(toy.length, dtype=np.int32)
    scored_L = np.ones(toy.length, dtype=bool)
    samples = [objective.sequential(x_L, documents_L, order_L=np.array(order), scored_L=scored_L, share=1.0) for x_L in toy.sequences_NL]
    return nelbo(objective, samples, logits(objective, samples, denoiser, toy.mask)).sum(1)


@pytest.mark.parametrize(("size", "length", "seed"), TOYS)
@pytest.mark.parametrize("alpha_0", ALPHAS)
def test_the_bound_is_the_entropy_with_the_exact_denoiser(alpha_0: float, size: int, length: int, seed: int) -> None:
    toy = random_toy(size, length, seed)
    bound_N = product_bound(toy, esolm(toy, alpha_0), reference.bayes_causal(toy))
    assert toy.q_N @ bound_N == pytest.approx(toy.entropy, abs=1e-10)


@pytest.mark.parametrize("alpha_0", ALPHAS)
def test_with_a_prompt_the_bound_is_the_conditional_entropy(alpha_0: float) -> None:
    """The first token is given: it comes first in every order that the product makes, and the sums run over the orders of the rest."""
    toy = random_toy(3, 3, 4)
    objective, denoiser = esolm(toy, alpha_0), reference.bayes_causal(toy)
    documents_L, rest_ML, total = np.zeros(3, dtype=np.int32), all_masks(2), 0.0
    share = 1 / objective.evaluation_parts

    def value(mask_L: np.ndarray, orders: list[reference.Order], t: float | None) -> float:
        """E over texts and these orders."""
        masked_L, found = np.concatenate(([False], mask_L)), 0.0
        for rest in orders:
            shared = {"order_L": np.array([0, *(1 + place for place in rest)]), "share": share, "count": 2}
            samples = [
                objective.sequential(x_L, documents_L, scored_L=masked_L, **shared) if t is None  # type: ignore[arg-type]
                else objective.diffused(x_L, documents_L, masked_L=masked_L, t=t, evaluation=True, **shared)  # type: ignore[arg-type]
                for x_L in toy.sequences_NL
            ]  # fmt: skip
            found += toy.q_N @ nelbo(objective, samples, logits(objective, samples, denoiser, toy.mask)).sum(1) / len(orders)
        return found

    for mask_L in rest_ML:
        if alpha_0 > 0:
            for t, node in zip(*quadrature(0.0, 1.0), strict=True):
                chance = mask_probability(mask_L[None], 1 - alpha_0 * (1 - t))[0]
                total += share * node * chance * value(mask_L, reference.diffusion_orders(mask_L), float(t))
        if alpha_0 < 1:
            chance = mask_probability(mask_L[None], 1 - alpha_0)[0]
            total += share * chance * value(mask_L, reference.sequential_orders(mask_L), None)
    first_V = np.array([toy.q_N[toy.sequences_NL[:, 0] == v].sum() for v in range(3)])
    assert total == pytest.approx(toy.entropy + first_V @ np.log(first_V), abs=1e-10)


@pytest.mark.parametrize("alpha_0", ALPHAS)
def test_a_bound_defines_a_distribution(alpha_0: float) -> None:
    """Values of every sequence as the reference has them; autoregression alone is exact."""
    for seed in range(3):
        toy = random_toy(3, 2 if seed else 3, seed)
        denoiser = cache(reference.random_causal(toy, seed))
        bound_N = product_bound(toy, esolm(toy, alpha_0), denoiser)
        want_N = reference.diffusion_term(toy, denoiser, alpha_0, eps=0.0, t_min=0.0) + reference.sequential_term(toy, denoiser, alpha_0)
        np.testing.assert_allclose(bound_N, want_N, atol=1e-10)
        assert np.exp(-bound_N).sum() == pytest.approx(1, abs=1e-10) if alpha_0 == 0 else np.exp(-bound_N).sum() < 1 - 1e-3


def test_the_low_variance_form_is_no_bound() -> None:
    toy = random_toy(3, 2, 0)
    values_N = reference.diffusion_term(toy, reference.random_causal(toy, 0), 1.0, eps=0.0, t_min=0.0, weighted=False)
    assert np.exp(-values_N).sum() > 1


@pytest.mark.parametrize("alpha_0", [0.3, 0.7, 1.0])
@pytest.mark.parametrize(("size", "length", "seed"), TOYS)
def test_the_authors_constants_fall_below_the_entropy(size: int, length: int, seed: int, alpha_0: float) -> None:
    toy = random_toy(size, length, seed)
    denoiser = cache(reference.bayes_causal(toy))
    bound_N = product_bound(toy, esolm(toy, alpha_0, evaluation="authors"), denoiser)
    want_N = reference.diffusion_term(toy, denoiser, alpha_0, eps=1e-3, t_min=1e-3) + reference.sequential_term(toy, denoiser, alpha_0)
    np.testing.assert_allclose(bound_N, want_N, atol=1e-10)
    assert toy.entropy - 0.01 < toy.q_N @ bound_N < toy.entropy - 1e-5


@pytest.mark.parametrize(("size", "length", "seed"), TOYS)
def test_every_single_order_has_the_entropy_with_exact_conditionals(size: int, length: int, seed: int) -> None:
    toy = random_toy(size, length, seed)
    for order in reference.any_order_probabilities(length, 1.0):
        nats_N = product_order(toy, esolm(toy, 1.0), reference.bayes_causal(toy), order)
        np.testing.assert_allclose(nats_N, -np.log(toy.q_N), atol=1e-10)
        assert toy.q_N @ nats_N == pytest.approx(toy.entropy, abs=1e-12)


@pytest.mark.parametrize("alpha_0", [0.4, 1.0])
def test_more_orders_tighten_the_bound_towards_the_exact_likelihood(alpha_0: float) -> None:
    """Any network's order is a normalised model, and so is the mixture of all orders; importance bounds fall towards it."""
    toy = random_toy(3, 3, 5)
    denoiser = cache(reference.random_causal(toy, 6, scale=1.0))
    chances = reference.any_order_probabilities(3, alpha_0)
    nats_ON = np.stack([product_order(toy, esolm(toy, alpha_0), denoiser, order) for order in chances])
    np.testing.assert_allclose(nats_ON, [reference.order_nats(toy, denoiser, order).sum(1) for order in chances], atol=1e-10)
    np.testing.assert_allclose(np.exp(-nats_ON).sum(1), 1, atol=1e-10)
    chance_O = np.array(list(chances.values()))
    bounds = [reference.importance_bound(nats_ON, chance_O, draws) for draws in (1, 2, 3, 4)]
    exact_N = -np.log(chance_O @ np.exp(-nats_ON))
    assert np.exp(-exact_N).sum() == pytest.approx(1, abs=1e-10)
    for looser, tighter in zip(bounds, [*bounds[1:], exact_N], strict=True):
        assert (tighter < looser - 1e-4).all()
        assert np.exp(-looser).sum() < 1


@pytest.mark.parametrize(("alpha_0", "evaluate", "part"), [(1.0, "nelbo", 0), (0.5, "nelbo", 0), (0.5, "nelbo", 1), (0.5, "any_order", 0)])
def test_a_mask_sees_its_own_document_only(alpha_0: float, evaluate: str, part: int) -> None:
    """Two documents and padding in one window: what reaches a mask comes before it in its own document, the answer and padding never do."""
    toy = random_toy(2, 2, 0)
    section = EsoLMConfig(alpha_0=alpha_0, evaluate=evaluate)  # type: ignore[arg-type]
    objective = EsoLM(esolm(toy, alpha_0).vocabulary, ObjectiveConfig(name="esolm", esolm=section))
    documents_L, reached, scored = np.array([0, 0, 0, 0, 1, 1, 1, -1, -1], dtype=np.int32), 0, 0
    for index in range(50):
        sample = objective.corrupt(np.arange(9) % 2, documents_L, Noise(2, index, index, 50, part=part, share=0.5), evaluation=True)
        order = sample.inputs["positions"][:9].tolist()
        for i, seen in enumerate(knowledge(objective, [sample])[0]):
            if sample.targets["masked"][i]:
                (*others, own), before = [position for position, _ in seen], order[:i]
                assert own == order[i] and others == [j for j in before if documents_L[j] == documents_L[own]]
                assert seen[-1][1] == toy.mask and own < 7
                reached, scored = reached + len(others), scored + 1
    assert reached > 50 and scored > 50


@pytest.mark.parametrize("evaluate", ["nelbo", "any_order"])
def test_autoregression_alone_is_exact(evaluate: str) -> None:
    """Through `corrupt`: left to right, every token scored once, and exp(-nats) is the distribution of the chain rule."""
    toy = random_toy(3, 3, 7)
    config = ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.0, evaluate=evaluate))  # type: ignore[arg-type]
    objective = EsoLM(esolm(toy, 0.0).vocabulary, config)
    samples = [objective.corrupt(x_L, np.zeros(3, dtype=np.int32), Noise(1, n, 0, 1), evaluation=True) for n, x_L in enumerate(toy.sequences_NL)]
    table: reference.CausalDenoiser = lambda seen: bayes_next_token(toy, tuple(token for _, token in seen[:-1]))  # noqa: E731
    nats_NL = nelbo(objective, samples, logits(objective, samples, table, toy.mask))
    np.testing.assert_allclose(nats_NL.sum(1), -np.log(toy.q_N), atol=1e-12)
    np.testing.assert_allclose(nats_NL, reference.order_nats(toy, reference.bayes_causal(toy), (0, 1, 2)), atol=1e-12)
