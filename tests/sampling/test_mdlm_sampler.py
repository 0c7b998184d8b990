"""Orders of masked diffusion and its greedy ending, against laws summed over every path of a tiny world.

Shape suffixes: M states, L positions, K ids, B sequences.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.hf_model import sampling_draw
from pretrain.hf_model.sampling_mdlm import sample_mdlm
from pretrain.hf_model.sampling_orders import TIE, Order, sample_mdlm_in_order
from tests.reference_math import Toy, bayes_denoiser, random_toy
from tests.sampling.worlds import TableDenoiser, all_states, index, p_value, probabilities, random_logits, real_network, request

K, L, MASK = 4, 3, 3
DRAWS = 20_000
ORDERS: tuple[Order, ...] = ("confidence", "margin", "left_to_right")


def table_of(logits_MLK: np.ndarray) -> TableDenoiser:
    return TableDenoiser(lambda alpha: logits_MLK, K, L)


def bayes_logits(toy: Toy) -> np.ndarray:
    denoiser = bayes_denoiser(toy)
    mask_logit = np.zeros((L, 1))
    return np.stack([np.concatenate((denoiser(z), mask_logit), axis=1) for z in all_states(K, L)])


def masked(batch: int) -> Tensor:
    return torch.full((batch, L), MASK)


def next_positions(logits_LK: np.ndarray, places: list[int], order: Order, tokens: int) -> list[int]:
    def score(place: int) -> float:
        second, first = np.sort(probabilities(logits_LK[place]))[-2:]
        return float({"confidence": first, "margin": first - second, "left_to_right": -place}[order])

    best = sorted(places, key=score, reverse=True)
    assert all(score(a) - score(b) > TIE for a, b in pairwise(best))
    return best[:tokens]


def law_of_order(
    logits_MLK: np.ndarray, order: Order, tokens: int, temperature: float = 1.0, start: tuple[int, ...] = (MASK,) * L, block: int = L
) -> np.ndarray:
    """[M]: the probability of each final state; blocks are counted from the start of the sequence."""
    law_M = np.zeros(K**L)
    waiting = [(start, 1.0)]
    while waiting:
        state, chance = waiting.pop()
        places = [i for i in range(L) if state[i] == MASK]
        if not places:
            law_M[index(state, K)] += chance
            continue
        places = [i for i in places if i // block == places[0] // block]
        logits_LK = logits_MLK[index(state, K)]
        reached = [(state, chance)]
        for place in next_positions(logits_LK, places, order, tokens):
            p_K = probabilities(logits_LK[place], temperature)
            reached = [(z[:place] + (v,) + z[place + 1 :], c * p_K[v]) for z, c in reached for v in range(MASK)]
        waiting += reached
    return law_M


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tokens", "temperature"), [(1, 1.0), (1, 0.5), (2, 1.0), (5, 1.0)])
def test_law_of_any_denoiser(order: Order, tokens: int, temperature: float) -> None:
    logits_MLK = random_logits(K, L, seed=24)
    law_M = law_of_order(logits_MLK, order, tokens, temperature)
    asked = request(DRAWS, K, temperature=temperature)
    ids_BL, evaluations_B = sample_mdlm_in_order(table_of(logits_MLK), masked(DRAWS), asked, order=order, tokens=tokens)
    assert p_value(ids_BL, law_M, K) > 1e-4
    assert (evaluations_B == -(-L // tokens)).all()
    if tokens == 1:  # the test can tell orders apart, and temperatures
        others = [law_of_order(logits_MLK, other, 1, temperature) for other in ORDERS if other != order]
        others.append(law_of_order(logits_MLK, order, 1, 1.5 - temperature))
        assert all(p_value(ids_BL, other_M, K) < 1e-8 for other_M in others)


@pytest.mark.parametrize("order", ["confidence", "margin"])
@pytest.mark.parametrize(("block", "tokens"), [(1, 1), (2, 1), (2, 2)])
def test_law_of_blocks(order: Order, block: int, tokens: int) -> None:
    logits_MLK = random_logits(K, L, seed=24)
    asked = request(DRAWS, K)
    ids_BL, evaluations_B = sample_mdlm_in_order(table_of(logits_MLK), masked(DRAWS), asked, order=order, tokens=tokens, block=block)
    assert p_value(ids_BL, law_of_order(logits_MLK, order, tokens, block=block), K) > 1e-4
    assert p_value(ids_BL, law_of_order(logits_MLK, order, tokens), K) < 1e-8
    assert (evaluations_B == {(1, 1): 3, (2, 1): 3, (2, 2): 2}[block, tokens]).all()


def test_blocks_count_what_is_to_fill() -> None:
    """Two given tokens: blocks of two are positions 1 and 3, then 4 and 5; a sequence with fewer masks has fewer blocks."""
    start_BL = torch.tensor([[1, 10, 2, 10, 10, 10], [10, 4, 4, 4, 4, 4]])
    network, seen = real_network("dit"), list[Tensor]()
    asked = request(2, 11, watch=lambda snapshot: seen.append(snapshot.ids_BL))
    _, evaluations_B = sample_mdlm_in_order(network, start_BL, asked, order="confidence", tokens=2, block=2)  # type: ignore[arg-type]
    assert evaluations_B.tolist() == [2, 1] and [(ids_BL[0] < 0).tolist() for ids_BL in seen] == [[False] * 4 + [True] * 2, [False] * 6]


@pytest.mark.parametrize("order", ORDERS)
def test_one_token_at_a_time_samples_the_data(order: Order) -> None:
    """The chain rule holds in any order, also in one that the draws so far decide."""
    toy = random_toy(MASK, L, seed=7)
    law_M = np.zeros(K**L)
    law_M[[index(tuple(x), K) for x in toy.sequences_NL.tolist()]] = toy.q_N
    ids_BL, _ = sample_mdlm_in_order(table_of(bayes_logits(toy)), masked(DRAWS), request(DRAWS, K), order=order)
    assert p_value(ids_BL, law_M, K) > 1e-4


@pytest.mark.parametrize("order", ORDERS)
def test_ties_go_to_the_left_whatever_rounding_says(order: Order) -> None:
    """Logits that differ by 1e-6, the last position ahead: as an all-masked sequence looks in fp32."""
    logits_MLK = np.zeros((K**L, L, K))
    logits_MLK[..., 1] = 1 + 1e-6 * np.arange(L)
    network = table_of(logits_MLK)
    sample_mdlm_in_order(network, masked(3), request(3, K), order=order)
    for turn, inputs in enumerate(network.seen):
        assert inputs.ids_BL is not None and (inputs.ids_BL != MASK).sum(-1).tolist() == [turn] * 3
        assert (inputs.ids_BL[:, :turn] != MASK).all()


def test_left_to_right_keeps_the_suffix_masked() -> None:
    network = table_of(random_logits(K, L, seed=24))
    sample_mdlm_in_order(network, masked(8), request(8, K), order="left_to_right")
    for turn, inputs in enumerate(network.seen):
        assert inputs.ids_BL is not None
        assert (inputs.ids_BL[:, turn:] == MASK).all() and (inputs.ids_BL[:, :turn] != MASK).all()


@pytest.mark.parametrize("steps", [1, 2])
def test_greedy_ending(steps: int) -> None:
    """Over two steps: each position is drawn in the first with probability 1/2, or else takes the most likely token in the second."""
    logits_MLK = random_logits(K, L, seed=24, scale=0.7)
    middle = {(MASK,) * L: 1.0}
    for place in range(L if steps == 2 else 0):
        p_K = probabilities(logits_MLK[-1, place])
        middle = {
            z[:place] + (v,) + z[place + 1 :]: c * (0.5 if v == MASK else 0.5 * p_K[v]) for z, c in middle.items() for v in range(K)
        }  # fmt: skip
    law_M = np.zeros(K**L)
    for state, chance in middle.items():
        best = [int(probabilities(logits_K).argmax()) for logits_K in logits_MLK[index(state, K)]]
        law_M[index(tuple(best[i] if z == MASK else z for i, z in enumerate(state)), K)] += chance
    ids_BL, _ = sample_mdlm(table_of(logits_MLK), masked(DRAWS), steps, request(DRAWS, K), noise_removal="greedy")
    assert p_value(ids_BL, law_M, K) > 1e-4


def test_prompts_of_any_length_are_kept() -> None:
    start_BL = torch.tensor([[1, 10, 2, 10, 10, 3], [4, 5, 6, 7, 8, 9], [10] * 6, [0, 1, 2, 3, 4, 10]])
    network, told = real_network("dit"), list[int]()
    for order in ORDERS:
        asked = request(4, 11, progress=told.append)
        ids_BL, evaluations_B = sample_mdlm_in_order(network, start_BL, asked, order=order, tokens=2)  # type: ignore[arg-type]
        assert torch.equal(ids_BL[start_BL != 10], start_BL[start_BL != 10]) and (ids_BL != 10).all()
        assert evaluations_B.tolist() == [2, 0, 3, 1]
    assert sum(told) == 3 * 10
    greedy_BL, _ = sample_mdlm(network, start_BL, 3, request(4, 11), noise_removal="greedy")  # type: ignore[arg-type]
    assert torch.equal(greedy_BL[start_BL != 10], start_BL[start_BL != 10]) and (greedy_BL != 10).all()


@pytest.mark.parametrize("order", ORDERS)
def test_samples_do_not_depend_on_the_batch(order: Order) -> None:
    network = real_network("llama" if order == "margin" else "dit")

    def draw(names: list[int], seed: int = 1) -> Tensor:
        start_BL = torch.full((len(names), 12), 10)
        asked = request(torch.tensor(names), 11, seed=seed)
        return sample_mdlm_in_order(network, start_BL, asked, order=order, tokens=3)[0]  # type: ignore[arg-type]

    together = draw(list(range(6)))
    assert torch.equal(torch.cat([draw([i]) for i in range(6)]), together)
    assert torch.equal(draw([4, 2]), together[[4, 2]])
    assert len({tuple(row) for row in together.tolist()}) == 6
    assert not torch.equal(draw(list(range(6)), seed=2), together)


def test_logits_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    network = table_of(random_logits(K, L, seed=24))
    whole_BL, _ = sample_mdlm_in_order(network, masked(50), request(50, K), order="margin")
    assert max(network.rows_of_logits) == 150
    monkeypatch.setattr(sampling_draw, "MAX_ELEMENTS", 7 * K)
    network = table_of(random_logits(K, L, seed=24))
    sliced_BL, _ = sample_mdlm_in_order(network, masked(50), request(50, K), order="margin")
    assert max(network.rows_of_logits) == 7 and torch.equal(sliced_BL, whole_BL)
    sample_mdlm(network, masked(50), 1, request(50, K))
    assert max(network.rows_of_logits) == 7


def test_what_cannot_be_is_refused() -> None:
    network = table_of(random_logits(K, L, seed=24))
    with pytest.raises(ValueError, match="at least one token per evaluation"):
        sample_mdlm_in_order(network, masked(1), request(1, K), order="margin", tokens=0)
    with pytest.raises(ValueError, match="a block holds at least one token, got 0"):
        sample_mdlm_in_order(network, masked(1), request(1, K), order="margin", block=0)
    with pytest.raises(ValueError, match="confidence, margin, left_to_right"):
        sample_mdlm_in_order(network, masked(1), request(1, K), order="random")  # type: ignore[arg-type]
