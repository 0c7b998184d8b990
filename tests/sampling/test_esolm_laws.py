"""The laws of Eso-LM's samplers on sequences of three tokens of three kinds, against enumeration.

Shape suffixes: B sequences, L positions, R sequences and Q positions of a window, S keys, N positions drawn together, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from functools import cache as memoised
from typing import Any, Literal

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_esolm import sample_esolm, sample_esolm_block, sample_esolm_block_autoregressive, sample_esolm_left_to_right
from pretrain.hf_model.sampling_network import CausalDenoiser
from tests.sampling.esolm_examples import CausalTable, causal, real, request

V, L, MASK, DRAWS = 3, 3, 3, 20_000
WORLD = list(itertools.product(range(V), repeat=L))
JOINT = np.random.default_rng(7).dirichlet(np.full(V**L, 0.4)).reshape((V,) * L)
Known = tuple[tuple[int, int], ...]
"""(position, token), in the order of generation."""
Conditional = Callable[[Known, tuple[int, ...]], np.ndarray]
"""Known tokens and the masks asked about, in order: a distribution over tokens for each mask."""
Plans = Iterable[tuple[float, tuple[tuple[int, ...], ...]]]
"""Probabilities of plans: the positions of each turn, in order."""


def bayes(known: Known, asked: tuple[int, ...]) -> np.ndarray:
    p = np.zeros((len(asked), V))
    for x in WORLD:
        if all(x[place] == token for place, token in known):
            for row, place in enumerate(asked):
                p[row, x[place]] += JOINT[x]
    return p / p.sum(-1, keepdims=True)


def exact_denoiser() -> CausalTable:
    table = torch.full((V + 1,) * L + (L, V + 1), 1e9, dtype=torch.float64)  # the mask's column must be ignored
    for z in itertools.product(range(V + 1), repeat=L):
        known = tuple((place, token) for place, token in enumerate(z) if token != MASK)
        table[z][:, :V] = torch.from_numpy(np.log(np.maximum(bayes(known, tuple(range(L))), 1e-300)))
    return CausalTable(table)


def conditional_of(network: DiT | Llama) -> Conditional:
    """The network's own distributions, without a cache."""

    @memoised
    def conditional(known: Known, asked: tuple[int, ...]) -> np.ndarray:
        ids_BL = torch.tensor([[*(token for _, token in known), *(MASK for _ in asked)]])
        positions_BL = torch.tensor([[*(place for place, _ in known), *asked]])
        with torch.no_grad():
            logits_NV = network(causal(ids_BL, positions_BL))[0, len(known) :, :V]
        return logits_NV.double().softmax(-1).numpy()

    return conditional


def law(plans: Plans, conditional: Conditional) -> list[float]:
    """The probability of each sequence of the world."""
    total = dict.fromkeys(WORLD, 0.0)
    for chance, turns in plans:
        for x in WORLD:
            known: Known = ()
            p = chance
            for asked in turns:
                rows = conditional(known, asked)
                p *= math.prod(float(rows[i, x[place]]) for i, place in enumerate(asked))
                known += tuple((place, x[place]) for place in asked)
            total[x] += p
    assert math.isclose(sum(total.values()), 1)
    return [total[x] for x in WORLD]


def shuffles(turns: tuple[tuple[int, ...], ...]) -> Plans:
    """Every order inside every turn, equally likely."""
    each = [list(itertools.permutations(turn)) for turn in turns]
    yield from ((1 / math.prod(map(len, each)), choice) for choice in itertools.product(*each))


def ancestral(steps: int, alpha_0: float) -> Plans:
    """Each position independently in one of the steps, equally likely, or left over."""
    for assigned in itertools.product(range(steps + 1), repeat=L):
        chance = math.prod(alpha_0 / steps if step < steps else 1 - alpha_0 for step in assigned)
        turns = [tuple(i for i in range(L) if assigned[i] == step) for step in range(steps)]
        for share, choice in shuffles(tuple(turn for turn in turns if turn)):
            yield chance * share, (*choice, *((i,) for i in range(L) if assigned[i] == steps))


def blocks(order: str) -> Plans:
    """Two steps: positions 0 and 2, and position 1."""
    for turns in itertools.permutations(((0, 2), (1,))) if order != "natural" else [((0, 2), (1,))]:
        for share, choice in shuffles(turns) if order == "shuffled" else [(1.0, turns)]:
            yield share * (1.0 if order == "natural" else 0.5), choice


def p_value(ids_BL: Tensor, expected: list[float]) -> float:
    counts = torch.bincount((ids_BL * torch.tensor([V**2, V, 1])).sum(1), minlength=V**L).tolist()
    return float(chisquare(counts, [DRAWS * p for p in expected]).pvalue)


def draw(network: CausalDenoiser, sampler: Callable[..., tuple[Tensor, Tensor]], **options: Any) -> Tensor:
    return sampler(network, torch.full((DRAWS, L), MASK), request=request(DRAWS, law=TokenLaw(mask_id=MASK)), **options)[0]


@pytest.mark.parametrize(("steps", "alpha_0"), [(1, 1.0), (2, 1.0), (1, 0.5), (3, 0.7), (2, 0.0)])
def test_law_of_the_exact_denoiser(steps: int, alpha_0: float) -> None:
    ids_BL = draw(exact_denoiser(), sample_esolm, steps=steps, alpha_0=alpha_0)
    assert p_value(ids_BL, law(ancestral(steps, alpha_0), bayes)) > 1e-4
    data = p_value(ids_BL, [float(JOINT[x]) for x in WORLD])
    assert data > 1e-4 if alpha_0 == 0 else data < 1e-8  # few steps are told from the data


@pytest.mark.parametrize("alpha_0", [1.0, 0.4])
def test_many_steps_of_the_exact_denoiser_give_the_data(alpha_0: float) -> None:
    assert p_value(draw(exact_denoiser(), sample_esolm, steps=3000, alpha_0=alpha_0), [float(JOINT[x]) for x in WORLD]) > 1e-4


@pytest.mark.parametrize("kind", ["dit", "llama"])
def test_laws_of_a_network_that_is_not_exact(kind: Literal["dit", "llama"]) -> None:
    """Its predictions depend on the order and on the masks before them, so these laws tell orders apart."""
    network = real(kind, MASK)
    conditional = conditional_of(network)
    cases: list[tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Any], Plans]] = [
        (sample_esolm, {"steps": 2, "alpha_0": 0.6}, ancestral(2, 0.6)),
        (sample_esolm, {"steps": 1, "alpha_0": 1.0}, ancestral(1, 1.0)),
        (sample_esolm_left_to_right, {}, [(1.0, ((0,), (1,), (2,)))]),
        (sample_esolm_block_autoregressive, {"steps": 2, "segments": 1}, [(1.0, ((0,), (2,), (1,)))]),
        *[(sample_esolm_block, {"steps": 2, "order": order}, blocks(order)) for order in ("natural", "shuffled_steps", "shuffled")],
    ]
    laws = [law(plans, conditional) for _, _, plans in cases]
    for i, (sampler, options, _) in enumerate(cases):
        ids_BL = draw(network, sampler, **options)
        assert p_value(ids_BL, laws[i]) > 1e-4, (sampler, options)
        assert p_value(ids_BL, laws[i - 1]) < 1e-4
