"""Masked diffusion that masks again, against the law of its Markov chain over every state of a tiny world.

Shape suffixes: M states, L positions, K all ids (the mask is the last), B sequences.
"""

from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.hf_model.sampling_mdlm import sample_mdlm
from pretrain.hf_model.sampling_psi import Loop, Psi, ReverseStep
from pretrain.hf_model.sampling_remask import remasking_probability, revealing_probability, sample_mdlm_psi
from tests.reference_math import bayes_denoiser, random_toy
from tests.sampling.worlds import TableDenoiser, all_states, index, p_value, probabilities, random_logits, real_network, request

K, L, MASK = 4, 2, 3
DRAWS = 20_000
STATES = all_states(K, L)
SENSELESS = random_logits(K, L, 5)
TOY = random_toy(MASK, L, 3)
Step = tuple[float, float, float]


def bayes() -> np.ndarray:
    denoiser = bayes_denoiser(TOY)
    return np.stack([np.concatenate((denoiser(z), np.zeros((L, 1))), axis=1) for z in STATES])


def masked(batch: int) -> Tensor:
    return torch.full((batch, L), MASK)


def forward(p_K: np.ndarray, alpha: float) -> np.ndarray:
    """[K]: a token drawn from p and masked with probability 1 - alpha."""
    return alpha * p_K + (1 - alpha) * np.eye(K)[MASK]


def posterior(z: int, p_K: np.ndarray, t: float, s: float) -> np.ndarray:
    """[K]: q(z_s | z_t = z, p) by Bayes' rule: of the forward path x -> z_s -> z_t, summed over x ~ p; where no path leads to z, z stays."""
    joint_K = np.zeros(K)
    for v in range(K):
        stays = (1 - t) / (1 - s) if s < 1 else 1.0
        to_z = (stays if v == z else 0.0) + ((1 - stays) if z == MASK else 0.0)
        joint_K[v] = forward(p_K, 1 - s)[v] * (1.0 if v == z == MASK else to_z)
    return joint_K / joint_K.sum() if joint_K.sum() > 0 else np.eye(K)[z]


def law_of_chain(logits_MLK: np.ndarray, steps: list[Step], greedy: bool = False, first: int = MASK) -> np.ndarray:
    """[M]: the law of the last state, from masks (and a first token that is given)."""
    law_M = np.zeros(K**L)
    law_M[index((first, MASK), K)] = 1.0
    for number, (t, s, kappa) in enumerate(steps):
        after_M = np.zeros(K**L)
        for m, state in enumerate(STATES):
            rows = []
            for place, z in enumerate(state):
                p_K = probabilities(logits_MLK[m, place])
                if greedy and number == len(steps) - 1:
                    p_K = np.eye(K)[p_K.argmax()]
                x0_K = p_K if z == MASK else np.eye(K)[z]
                mixed_K = kappa * posterior(z, x0_K, t, s) + (1 - kappa) * forward(x0_K, 1 - s)
                rows.append(np.eye(K)[z] if place == 0 and first != MASK else mixed_K)
            after_M += law_M[m] * reduce(np.kron, rows)
        law_M = after_M
    return law_M


EVEN = [(1.0, 0.75), (0.75, 0.5), (0.5, 0.25), (0.25, 0.0)]
CASES: dict[str, tuple[int, list[Step], dict[str, Any]]] = {
    "ancestral": (4, [(t, s, 1.0) for t, s in EVEN], {"psi": Psi()}),
    "mixed": (4, [(t, s, 0.4) for t, s in EVEN], {"psi": Psi(eta=0.4)}),
    "correcting": (4, [(t, s, 0.0) for t, s in EVEN], {"psi": Psi(eta=0.0)}),
    "remdm": (4, [(1.0, 0.75, 1 - 0.3 / 0.75), (0.75, 0.5, 1 - 0.3 / 0.5), (0.5, 0.25, 0.0), (0.25, 0.0, 1.0)], {"psi": Psi(mode="remdm", eta=0.3)}),
    "loop": (
        5,
        [(1.0, 0.6, 1.0), (0.6, 0.2, 1.0), (0.2, 0.2, 0.1), (0.2, 0.2, 0.1), (0.2, 0.0, 1.0)],
        {"psi": Psi(eta=0.1, loop=Loop(alpha=0.8, rise=0.4, fall=0.2))},
    ),
    "greedy": (4, [(t, s, 0.4) for t, s in EVEN], {"psi": Psi(eta=0.4), "noise_removal": "greedy"}),
}


@pytest.mark.parametrize("name", CASES)
def test_law_of_few_steps(name: str) -> None:
    steps, way, options = CASES[name]
    law_M = law_of_chain(SENSELESS, way, greedy=name == "greedy")
    assert law_M.sum() == pytest.approx(1) and law_M[[MASK in state for state in STATES]].sum() == pytest.approx(0, abs=1e-12)
    network = TableDenoiser(lambda alpha: SENSELESS, K, L)
    ids_BL, evaluations_B = sample_mdlm_psi(network, masked(DRAWS), steps, request(DRAWS, K), **options)
    assert p_value(ids_BL, law_M, K) > 1e-4
    assert network.sequences_read == int(evaluations_B.sum()) and evaluations_B.max() <= steps
    others = [law_of_chain(SENSELESS, CASES[other][1], greedy=other == "greedy") for other in CASES if other != name]
    assert all(p_value(ids_BL, other_M, K) < 1e-4 for other_M in others), "the test can tell the family's members apart"


def test_without_correction_it_is_the_ancestral_sampler_and_many_steps_sample_the_data() -> None:
    network = TableDenoiser(lambda alpha: SENSELESS, K, L)
    for steps in (1, 3, 10):
        ours, _ = sample_mdlm_psi(network, masked(500), steps, request(500, K), psi=Psi())
        assert torch.equal(ours, sample_mdlm(network, masked(500), steps, request(500, K))[0])
    data_M = np.zeros(K**L)
    data_M[[index(tuple(x), K) for x in TOY.sequences_NL.tolist()]] = TOY.q_N
    exact = bayes()
    ids_BL, _ = sample_mdlm_psi(TableDenoiser(lambda alpha: exact, K, L), masked(DRAWS), 400, request(DRAWS, K), psi=Psi(mode="max_capped", eta=0.01))
    assert p_value(ids_BL, data_M, K) > 1e-4


def test_probabilities_are_remdms() -> None:
    """sigma of a token, and (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t) of a mask."""
    for t, s, kappa in [(1.0, 0.7, 0.2), (0.6, 0.6, 0.9), (0.5, 0.25, 0.0), (0.3, 0.0, 0.4)]:
        step = ReverseStep(t, s, kappa)
        sigma = remasking_probability(step)
        assert sigma == pytest.approx((1 - kappa) * s) and 0 <= sigma <= min(1.0, s / (1 - t) if t < 1 else 1.0)
        assert revealing_probability(step) == pytest.approx(((1 - s) - (1 - sigma) * (1 - t)) / t)


def test_given_tokens_never_move() -> None:
    law_M = law_of_chain(SENSELESS, CASES["mixed"][1], first=1)
    start_BL = torch.tensor([[1, MASK]]).repeat(DRAWS, 1)
    ids_BL, _ = sample_mdlm_psi(TableDenoiser(lambda alpha: SENSELESS, K, L), start_BL, 4, request(DRAWS, K), psi=Psi(eta=0.4))
    assert (ids_BL[:, 0] == 1).all() and p_value(ids_BL, law_M, K) > 1e-4


def test_prompts_batches_progress_and_what_is_watched() -> None:
    start_BL = torch.tensor([[1, 10, 2, 10, 10, 3], [4, 5, 6, 7, 8, 9], [10] * 6, [0, 1, 2, 3, 4, 10]])
    network: Any = real_network("dit")
    told, seen = list[int](), list[Tensor]()

    def draw(rows: list[int], seed: int = 1, **options: Any) -> Tensor:
        asked = request(torch.tensor(rows), 11, seed=seed, **options)
        return sample_mdlm_psi(network, start_BL[rows], 12, asked, psi=Psi(eta=0.3))[0]

    together = draw([0, 1, 2, 3], progress=told.append, watch=lambda snapshot: seen.append(snapshot.ids_BL))
    assert torch.equal(together[start_BL != 10], start_BL[start_BL != 10]) and (together < 10).all()
    assert sum(told) == 10 and min(told) >= 0 and len(seen) == 12 and torch.equal(seen[-1], together)
    again = [((before >= 0) & (after < 0)).any() for before, after in zip(seen, seen[1:], strict=False)]
    assert any(again), "some token was masked again"
    assert torch.equal(torch.cat([draw([i]) for i in range(4)]), together) and torch.equal(draw([3, 0]), together[[3, 0]])
    assert not torch.equal(draw([0, 1, 2, 3], seed=2), together)
