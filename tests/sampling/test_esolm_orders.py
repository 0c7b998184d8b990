"""Eso-LM's plans: which positions in which turn, and the laws of what is random in them."""

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from scipy.stats import binom, chisquare
from torch import Tensor

from pretrain.hf_model.esolm_math import PartialSchedule
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_esolm_orders import BlockOrder, Reveals, ancestral_reveals, block_reveals, left_to_right_reveals
from pretrain.hf_model.sampling_network import Request

MASK = 9


def request(names: int | Tensor, seed: int = 1, mask_id: int | None = MASK) -> Request:
    sequences_B = torch.arange(names) if isinstance(names, int) else names
    return Request(law=TokenLaw(mask_id=mask_id), vocab_size=10, seed=seed, sequences_B=sequences_B)


def masked(batch: int, length: int) -> Tensor:
    return torch.full((batch, length), MASK)


def turns(plan: Reveals, b: int = 0) -> list[list[int]]:
    """Positions by turn, in order; what is given comes first, in a list that may be empty."""
    order, known = plan.order_BL[b].tolist(), [0, *plan.known_BT[b].tolist()]
    pieces = [order[start:end] for start, end in itertools.pairwise(known)]
    count = int(plan.turns_B[b])
    assert sorted(order) == list(range(len(order))) and known[-1] == len(order)
    assert all(pieces[1 : count + 1]) and not any(pieces[count + 1 :])
    return pieces[: count + 1]


def p_value(observed: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square of all outcomes, those expected less than 5 times put together."""
    total = sum(observed.values())
    assert set(observed) <= set(law) and math.isclose(sum(law.values()), 1)
    common = [outcome for outcome, p in law.items() if total * p >= 5]
    counts, expected = [observed[outcome] for outcome in common], [total * law[outcome] for outcome in common]
    if total - sum(expected) > 1:
        counts, expected = [*counts, total - sum(counts)], [*expected, total - sum(expected)]
    return float(chisquare(counts, expected).pvalue) if len(counts) > 1 else 1.0


def test_block_steps_of_the_paper() -> None:
    assert turns(block_reveals(masked(1, 12), 4, request(1)))[1:] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_block_steps_around_given_tokens_and_without_a_remainder() -> None:
    """Steps count masks, not positions: they are of one size, more or less, whatever is given."""
    ids_BL = masked(2, 10)
    ids_BL[0, [0, 1, 5]] = 3
    plan = block_reveals(ids_BL, 3, request(2))
    assert turns(plan, 0) == [[0, 1, 5], [2, 6, 9], [3, 7], [4, 8]]
    assert turns(plan, 1) == [[], [0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert turns(block_reveals(ids_BL, 20, request(2)), 0)[1:] == [[i] for i in (2, 3, 4, 6, 7, 8, 9)]


def test_block_autoregressive_segments() -> None:
    plan = block_reveals(masked(1, 12), 3, request(1), segments=2, anchors=True)
    assert turns(plan)[1:] == [[0], [3], [1, 4], [2, 5], [6], [9], [7, 10], [8, 11]]
    ids_BL = masked(1, 9)
    ids_BL[0, :2] = 3  # seven masks in three segments: 3, 2 and 2
    assert turns(block_reveals(ids_BL, 2, request(1), segments=3, anchors=True))[1:] == [[2], [4], [3], [5], [6], [7], [8]]


@pytest.mark.parametrize("order", ["shuffled_steps", "shuffled"])
def test_shuffled_steps_are_equally_likely(order: BlockOrder) -> None:
    draws, steps = 6000, [(0, 3), (1, 4), (2, 5)]
    plan = block_reveals(masked(draws, 6), 3, request(draws), order=order)
    plans = Counter(tuple(i for turn in turns(plan, b)[1:] for i in turn) for b in range(draws))
    inside = (lambda s: itertools.permutations(s)) if order == "shuffled" else (lambda s: [s])
    outcomes = [sum(choice, ()) for shuffled in itertools.permutations(steps) for choice in itertools.product(*map(inside, shuffled))]
    assert p_value(plans, dict.fromkeys(outcomes, 1 / len(outcomes))) > 1e-4


def test_left_to_right() -> None:
    ids_BL = masked(2, 5)
    ids_BL[1, [0, 3]] = 1
    plan = left_to_right_reveals(ids_BL, request(2))
    assert turns(plan, 0) == [[], [0], [1], [2], [3], [4]] and turns(plan, 1) == [[0, 3], [1], [2], [4]]
    everything = left_to_right_reveals(torch.ones_like(ids_BL), request(2))
    assert everything.turns_B.tolist() == [0, 0] and turns(everything) == [[0, 1, 2, 3, 4]]


def test_without_diffusion_ancestral_is_left_to_right() -> None:
    ids_BL = masked(3, 7)
    ids_BL[1, 4] = 2
    ours, theirs = ancestral_reveals(ids_BL, 5, request(3), alpha_0=0.0), left_to_right_reveals(ids_BL, request(3))
    assert torch.equal(ours.order_BL, theirs.order_BL) and torch.equal(ours.known_BT, theirs.known_BT)


@pytest.mark.parametrize(("alpha_0", "steps"), [(1.0, 1), (1.0, 3), (0.6, 2), (0.25, 3)])
def test_sizes_of_turns_follow_the_binomials_of_the_reverse_process(alpha_0: float, steps: int) -> None:
    """n_i ~ Binomial(masks left, (alpha_s - alpha_t) / (1 - alpha_t)); empty steps left out, and the rest one by one."""
    draws, length, schedule = 8000, 5, PartialSchedule(alpha_0, 0.0)
    grid = [1 - i / steps for i in range(steps + 1)]
    law: dict[tuple[int, ...], float] = defaultdict(float)

    def branch(i: int, left: int, sizes: tuple[int, ...], p: float) -> None:
        if i == steps:
            law[(*sizes, *[1] * left)] += p
            return
        for n in range(left + 1):
            chance = float(binom.pmf(n, left, min(1.0, schedule.reveal_probability(grid[i], grid[i + 1]))))
            if chance > 0:
                branch(i + 1, left - n, (*sizes, n) if n else sizes, p * chance)

    branch(0, length, (), 1.0)
    plan = ancestral_reveals(masked(draws, length), steps, request(draws), alpha_0=alpha_0)
    assert p_value(Counter(tuple(map(len, turns(plan, b)[1:])) for b in range(draws)), law) > 1e-4


@pytest.mark.parametrize("alpha_0", [1.0, 0.5, 0.125])
def test_expected_tokens_of_diffusion_and_evaluations(alpha_0: float) -> None:
    """One step of diffusion is one turn (or none, with probability 2e-15), so turns tell its tokens; of many steps, those that reveal something."""
    draws, length = 2000, 256
    plan = ancestral_reveals(masked(draws, length), 1, request(draws), alpha_0=alpha_0)
    diffused = (1 + length - plan.turns_B).double()
    error = 5 * math.sqrt(length * alpha_0 * (1 - alpha_0) / draws)
    assert diffused.mean().item() == pytest.approx(alpha_0 * length, abs=error)
    assert diffused.var().item() == pytest.approx(length * alpha_0 * (1 - alpha_0), rel=0.2)
    for steps in (16, 256, 100_000):
        turns_B = ancestral_reveals(masked(draws, length), steps, request(draws, seed=2), alpha_0=alpha_0).turns_B.double()
        expected = steps * (1 - (1 - alpha_0 / steps) ** length) + (1 - alpha_0) * length
        assert turns_B.mean().item() == pytest.approx(expected, abs=5 * turns_B.std().item() / math.sqrt(draws) + 1e-5)


def test_orders_of_diffusion_are_equally_likely_and_the_rest_is_sorted() -> None:
    draws = 12_000
    plan = ancestral_reveals(masked(draws, 4), 1, request(draws), alpha_0=1.0)
    uniform = {order: 1 / 24 for order in itertools.permutations(range(4))}
    assert p_value(Counter(map(tuple, plan.order_BL.tolist())), uniform) > 1e-4

    law: dict[tuple[int, ...], float] = defaultdict(float)
    for chosen in itertools.product((True, False), repeat=4):
        first, rest = ([i for i in range(4) if chosen[i] == which] for which in (True, False))
        for order in itertools.permutations(first):
            law[(*order, *rest)] += 0.4 ** len(first) * 0.6 ** len(rest) / math.factorial(len(first))
    plan = ancestral_reveals(masked(draws, 4), 7, request(draws), alpha_0=0.4)
    assert p_value(Counter(map(tuple, plan.order_BL.tolist())), law) > 1e-4


def test_given_tokens_come_first_in_their_order() -> None:
    draws = 3000
    ids_BL = masked(draws, 6)
    ids_BL[:, [1, 2, 5]] = 0
    for plan in (
        ancestral_reveals(ids_BL, 3, request(draws), alpha_0=0.5),
        block_reveals(ids_BL, 2, request(draws), order="shuffled"),
        left_to_right_reveals(ids_BL, request(draws)),
    ):
        assert (plan.known_BT[:, 0] == 3).all() and (plan.order_BL[:, :3] == torch.tensor([1, 2, 5])).all()
    plan = ancestral_reveals(ids_BL, 3, request(draws), alpha_0=0.5, given="shuffled")
    uniform = {order: 1 / 6 for order in itertools.permutations((1, 2, 5))}
    assert p_value(Counter(map(tuple, plan.order_BL[:, :3].tolist())), uniform) > 1e-4


def test_plans_belong_to_sequences_not_to_batches() -> None:
    def plans(names: list[int], seed: int = 1) -> list[list[list[list[int]]]]:
        asked, ids_BL = request(torch.tensor(names), seed), masked(len(names), 30)
        ancestral = ancestral_reveals(ids_BL, 12, asked, alpha_0=0.5)
        block = block_reveals(ids_BL, 6, asked, order="shuffled")
        return [[turns(ancestral, b), turns(block, b)] for b in range(len(names))]

    together = plans(list(range(5)))
    assert plans([3, 1]) == [together[3], together[1]] and plans(list(range(5)), seed=2) != together
    assert all(first[kind] != second[kind] for first, second in itertools.combinations(together, 2) for kind in (0, 1))


def test_impossible_plans_are_programming_errors() -> None:
    ids_BL = masked(1, 4)
    with pytest.raises(ValueError, match="at least one of its steps, got 0"):
        ancestral_reveals(ids_BL, 0, request(1), alpha_0=1.0)
    with pytest.raises(ValueError, match="at least one of its segments, got 0"):
        block_reveals(ids_BL, 2, request(1), segments=0)
    with pytest.raises(ValueError, match="alpha_0 <= 1, got 1.5"):
        ancestral_reveals(ids_BL, 2, request(1), alpha_0=1.5)
    wrong: Any = "random"
    with pytest.raises(ValueError, match="random is no order; choose one of natural, shuffled_steps, shuffled"):
        block_reveals(ids_BL, 2, request(1), order=wrong)
    with pytest.raises(ValueError, match="random is no order; choose one of natural, shuffled"):
        left_to_right_reveals(ids_BL, request(1), given=wrong)
    with pytest.raises(ValueError, match="mask id"):
        left_to_right_reveals(ids_BL, request(1, mask_id=None))
