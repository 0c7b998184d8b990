"""Duo's samplers against the law of their Markov chain, computed by multiplying transition matrices over every state of a tiny world.

Shape suffixes: M states, L positions, K all ids (the mask is the last), B sequences.
"""

from functools import reduce
from itertools import pairwise
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.hf_model import sampling_draw
from pretrain.hf_model.sampling_duo import TAIL_TIME, sample_duo, sample_duo_left_to_right
from pretrain.hf_model.sampling_psi import Loop, Psi
from tests import reference_duo as reference
from tests.reference_math import random_toy
from tests.sampling.worlds import TableDenoiser, all_states, index, p_value, probabilities, random_logits, real_network, request

K, L, MASK = 4, 2, 3
DRAWS = 20_000
STATES = all_states(K, L)
TOY = random_toy(MASK, L, 1)
DATA_M = np.zeros(K**L)
DATA_M[[index(tuple(x), K) for x in TOY.sequences_NL.tolist()]] = TOY.q_N
Step = tuple[float, float, float]


def senseless(alpha: float) -> np.ndarray:
    """[M, L, K]: logits that depend on the state and, smoothly, on the time."""
    logits_MLK = random_logits(K, L, 3) * (0.5 + alpha)
    logits_MLK[..., -1] = 9.0
    return logits_MLK


def exact(alpha: float) -> np.ndarray:
    """[M, L, K]: the leave-one-out posterior of the toy."""
    return reference.leave_one_out(TOY, np.array(STATES), alpha)


def masked(batch: int) -> Tensor:
    return torch.full((batch, L), MASK)


def shaped(logits_K: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """[K]: p as the options shape it."""
    p_K = probabilities(logits_K, temperature)
    order = np.argsort(-p_K)
    if top_k:
        p_K[order[top_k:]] = 0.0
        p_K = p_K / p_K.sum()
    if top_p < 1:
        p_K[order[1:][np.cumsum(p_K[order])[:-1] >= top_p]] = 0.0
    return p_K / p_K.sum()


def law_of_chain(
    table: Any, steps: list[Step], eps: float, greedy: bool = False, free: tuple[bool, ...] = (True,) * L, **options: float
) -> np.ndarray:
    """[M]: the law of the last state, from uniform noise where `free` and state 0 elsewhere."""
    start = [np.full(K, 1 / K) if is_free else np.eye(K)[0] for is_free in free]
    law_M = reduce(np.kron, start)
    for t, s, kappa in [*steps, *([(TAIL_TIME, -1.0, 1.0)] if greedy else [])]:
        logits_MLK = table(max(1 - t, eps))
        after_M = np.zeros(K**L)
        for m, state in enumerate(STATES):
            rows = []
            for place, z in enumerate(state):
                p_K = shaped(logits_MLK[m, place], **options)  # type: ignore[arg-type]
                if not free[place]:
                    rows.append(np.eye(K)[z])
                elif s < 0:
                    rows.append(np.eye(K)[p_K.argmax()])
                else:
                    guess_K = reference.reverse_step(p_K, z, 1 - t, 1.0) @ reference.kernel(K, 1 - s)
                    rows.append(kappa * reference.reverse_step(p_K, z, 1 - t, 1 - s) + (1 - kappa) * guess_K)
            after_M += law_M[m] * reduce(np.kron, rows)
        law_M = after_M
    return law_M


def even(steps: int, kappa: float = 1.0, end: float = 0.0) -> list[Step]:
    times = np.linspace(1, end, steps + 1).tolist()
    return [(t, s, kappa) for t, s in pairwise(times)]


CASES: dict[str, tuple[int, list[Step], dict[str, Any], dict[str, float]]] = {
    "one step": (1, even(1), {}, {}),
    "two steps": (2, even(2), {}, {}),
    "five steps": (5, even(5), {}, {}),
    "correcting": (3, even(3, 0.0), {"psi": Psi(eta=0.0)}, {}),
    "mixed": (4, even(4, 0.4), {"psi": Psi(eta=0.4)}, {}),
    "remdm": (
        4,
        [(1.0, 0.75, 1 - 0.3 / 0.75), (0.75, 0.5, 1 - 0.3 / 0.5), (0.5, 0.25, 0.0), (0.25, 0.0, 1.0)],
        {"psi": Psi(mode="remdm", eta=0.3)},
        {},
    ),
    "loop": (
        5,
        [(1.0, 0.6, 1.0), (0.6, 0.2, 1.0), (0.2, 0.2, 0.1), (0.2, 0.2, 0.1), (0.2, 0.0, 1.0)],
        {"psi": Psi(eta=0.1, loop=Loop(alpha=0.8, rise=0.4, fall=0.2))},
        {},
    ),
    "temperature": (3, even(3), {}, {"temperature": 0.5}),
    "most likely": (3, even(3), {}, {"temperature": 0.0}),
    "top-k": (3, even(3), {}, {"top_k": 2}),
    "nucleus": (3, even(3, 0.5), {"psi": Psi(eta=0.5)}, {"top_p": 0.7}),
    "greedy": (3, even(3, end=TAIL_TIME), {"noise_removal": "greedy"}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_law_of_few_steps(name: str) -> None:
    steps, way, options, shape = CASES[name]
    reference_shape = shape | ({"temperature": 1e-3} if shape.get("temperature") == 0 else {})
    law_M = law_of_chain(senseless, way, 1e-3, greedy=name == "greedy", **reference_shape)
    assert law_M.sum() == pytest.approx(1) and law_M[[MASK in state for state in STATES]].sum() == pytest.approx(0, abs=1e-12)
    ids_BL, evaluations_B = sample_duo(TableDenoiser(senseless, K, L), masked(DRAWS), steps, request(DRAWS, K, **shape), **options)
    assert p_value(ids_BL, law_M, K) > 1e-4
    assert evaluations_B.max() <= len(way) + (name == "greedy")
    if name != "five steps":  # the test can tell this sampler from another
        assert p_value(ids_BL, law_of_chain(senseless, even(5), 1e-3), K) < 1e-8


def test_many_steps_with_the_exact_denoiser_sample_the_data() -> None:
    law_M, coarse_M = (law_of_chain(exact, even(steps), 2.0**-53) for steps in (64, 1))
    assert np.abs(law_M - DATA_M).sum() < 0.02 < 0.4 < np.abs(coarse_M - DATA_M).sum()
    ids_BL, _ = sample_duo(TableDenoiser(exact, K, L), masked(DRAWS), 64, request(DRAWS, K), schedule_eps=0.0)
    assert p_value(ids_BL, law_M, K) > 1e-4


def test_sequences_whose_positions_are_all_kept_are_not_evaluated() -> None:
    """Over 400 steps two positions are open in about 2 log 400 steps each, and the law is still that of the chain."""
    network = TableDenoiser(senseless, K, L)
    ids_BL, evaluations_B = sample_duo(network, masked(2000), 400, request(2000, K))
    assert network.sequences_read == int(evaluations_B.sum()) and evaluations_B.double().mean() < 30
    assert p_value(ids_BL, law_of_chain(senseless, even(400), 1e-3), K) > 1e-4


def test_left_to_right_law() -> None:
    """The chain rule of p, averaged over the noise that fills the suffix; alpha is the share of clean positions, at least e."""
    law_M = np.zeros(K**L)
    for x in STATES:
        if MASK not in x:
            first = np.mean([probabilities(senseless(1e-3)[m, 0])[x[0]] for m in range(K**L)])
            second = np.mean([probabilities(senseless(0.5)[index((x[0], z), K), 1])[x[1]] for z in range(K)])
            law_M[index(x, K)] = first * second
    network = TableDenoiser(senseless, K, L)
    ids_BL, evaluations_B = sample_duo_left_to_right(network, masked(DRAWS), request(DRAWS, K))
    assert p_value(ids_BL, law_M, K) > 1e-4 and (evaluations_B == L).all()
    for inputs, alpha in zip(network.seen, (1e-3, 0.5), strict=True):
        assert inputs.conditioning_B.tolist() == pytest.approx([-log(alpha)] * DRAWS)


def test_noise_of_the_suffix() -> None:
    """Uniform over all ids, fresh for every token, the same for the same seed."""
    networks = [TableDenoiser(senseless, K, L) for _ in range(2)]
    for network in networks:
        sample_duo_left_to_right(network, masked(DRAWS), request(DRAWS, K))
    first, second = (inputs.ids_BL for inputs in networks[0].seen)
    assert first is not None and second is not None and torch.equal(first, networks[1].seen[0].ids_BL)  # type: ignore[arg-type]
    uniform_M = np.full(K**L, 1 / K**L)
    assert p_value(first, uniform_M, K) > 1e-4
    assert p_value(torch.stack((first[:, 1], second[:, 1]), dim=1), uniform_M, K) > 1e-4


def test_a_prompt_stands_clean_beside_the_noise() -> None:
    """Id 0 is given at the first position, for half of the batch; the law of the second is that of a chain where the first never moves."""
    start_BL = torch.tensor([[0, MASK], [MASK, MASK]]).repeat(DRAWS // 2, 1)
    ids_BL, _ = sample_duo(TableDenoiser(senseless, K, L), start_BL, 3, request(DRAWS, K), psi=Psi(eta=0.5))
    assert p_value(ids_BL[::2], law_of_chain(senseless, even(3, 0.5), 1e-3, free=(False, True)), K) > 1e-4
    assert p_value(ids_BL[1::2], law_of_chain(senseless, even(3, 0.5), 1e-3), K) > 1e-4
    network = TableDenoiser(senseless, K, L)
    sample_duo(network, start_BL[:2], 3, request(2, K))
    assert all((inputs.ids_BL[0, 0] == 0).all() for inputs in network.seen if inputs.ids_BL is not None)


START_BL = torch.tensor([[1, 10, 2, 10, 10, 3], [4, 5, 6, 7, 8, 9], [10] * 6, [0, 1, 2, 3, 4, 10]])


@pytest.mark.parametrize("sampler", ["ancestral", "greedy", "loop", "left_to_right"])
def test_prompts_of_any_length_are_kept(sampler: str) -> None:
    told = list[int]()
    asked, network = request(4, 11, progress=told.append), real_network("dit")
    if sampler == "left_to_right":
        ids_BL, evaluations_B = sample_duo_left_to_right(network, START_BL, asked)  # type: ignore[arg-type]
        assert evaluations_B.tolist() == [3, 0, 6, 1]
    else:
        options: dict[str, Any] = {"ancestral": {}, "greedy": {"noise_removal": "greedy"}, "loop": {"psi": Psi(eta=0.5, loop=Loop())}}[sampler]
        ids_BL, evaluations_B = sample_duo(network, START_BL, 7, asked, **options)  # type: ignore[arg-type]
        assert evaluations_B[1] == 0 and (evaluations_B[[0, 2, 3]] > 0).all()
    assert torch.equal(ids_BL[START_BL != 10], START_BL[START_BL != 10])
    assert (ids_BL != 10).all() and (ids_BL < 11).all() and (ids_BL >= 0).all()
    assert sum(told) == 10 and min(told) >= 0 and START_BL[2, 0] == 10


@pytest.mark.parametrize("sampler", ["ancestral", "greedy", "psi", "left_to_right"])
def test_samples_do_not_depend_on_the_batch(sampler: str) -> None:
    network: Any = real_network("llama" if sampler in ("psi", "greedy") else "dit")

    def draw(names: list[int], seed: int = 1) -> Tensor:
        start_BL, asked = torch.full((len(names), 12), 10), request(torch.tensor(names), 11, seed=seed, top_p=0.9)
        if sampler == "left_to_right":
            return sample_duo_left_to_right(network, start_BL, asked)[0]
        psi = Psi(mode="max_rescaled", eta=0.3) if sampler == "psi" else Psi()
        return sample_duo(network, start_BL, 9, asked, psi=psi, noise_removal="greedy" if sampler == "greedy" else "ancestral")[0]

    together = draw(list(range(6)))
    assert torch.equal(torch.cat([draw([i]) for i in range(6)]), together)
    assert torch.equal(draw([4, 2]), together[[4, 2]]) and len({tuple(row) for row in together.tolist()}) == 6
    assert not torch.equal(draw(list(range(6)), seed=2), together)


def test_logits_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> tuple[Tensor, int]:
        network = TableDenoiser(senseless, K, L)
        ids_BL, _ = sample_duo(network, masked(50), 3, request(50, K), noise_removal="greedy")
        return ids_BL, max(network.rows_of_logits)

    whole_BL, rows = draw()
    assert rows == 100
    monkeypatch.setattr(sampling_draw, "MAX_ELEMENTS", 7 * K)
    sliced_BL, rows = draw()
    assert rows == 7 and torch.equal(sliced_BL, whole_BL)


def test_the_network_is_told_the_time() -> None:
    network = TableDenoiser(senseless, K, L)
    sample_duo(network, masked(200), 4, request(200, K), noise_removal="greedy", schedule_eps=1e-2)
    told = [inputs.conditioning_B.unique().tolist() for inputs in network.seen]
    alphas = [1e-2, 0.25, 0.5, 0.75, 1 - TAIL_TIME]
    expected = [[pytest.approx(-log(alpha), abs=1e-4)] for alpha in alphas]
    assert told == expected and network.seen[-1].conditioning_B[0].item() == pytest.approx(1e-5, rel=1e-3)
