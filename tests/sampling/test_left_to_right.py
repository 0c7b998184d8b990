"""From left to right with exact denoisers: for every objective the law is that of the data, given prompts of unequal lengths, and drawing ends.

Shape suffixes: B sequences, L positions, K all ids (the last one is the mask), E width, J digits.
"""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.hf_model.attention_patterns import KeyValueCache
from pretrain.hf_model.digits import DigitCode
from pretrain.hf_model.network_input import NetworkInput
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_methods import Constants, Method, fill
from pretrain.hf_model.sampling_network import BLANK, Request
from pretrain.hf_model.sampling_replaid import LatentSpace
from tests import reference_replaid
from tests.reference_duo import leave_one_out
from tests.reference_math import Toy
from tests.sampling.esolm_examples import CausalTable
from tests.sampling.worlds import p_value, real_network

V, L, END = 3, 4, 2
MASK, DRAWS = V, 4500
PROMPTS = [(0,), (1,), (0, 1)]
SEQUENCES = [x for x in itertools.product(range(V), repeat=L) if all(b == END for a, b in itertools.pairwise(x) if a == END)]
"""Texts of two letters that end: after END there is nothing else."""
Q_N = np.random.default_rng(5).dirichlet(np.full(len(SEQUENCES), 3.0))
CODE = DigitCode(V, base=2, digits=2, shuffle_seed=3)
GAMMA_1 = 30.0
TABLE_KE = np.concatenate((reference_replaid.unit_vectors(V, 2), [[0.6, 0.8]]))
OBJECTIVES = ("ar", "mdlm", "duo", "esolm", "replaid", "mdm_prime")


def posterior(z: tuple[int, ...]) -> np.ndarray:
    """[L, K]: log q(x^l | what is not masked), -inf where impossible; the mask's column is large and must be ignored."""
    p_LK = np.zeros((L, V + 1))
    for x, q in zip(SEQUENCES, Q_N, strict=True):
        if all(token in (MASK, own) for token, own in zip(z, x, strict=True)):
            p_LK[range(L), x] += q
    with np.errstate(divide="ignore"):
        return np.concatenate((np.log(np.maximum(p_LK, 1e-300))[:, :V], np.full((L, 1), 99.0)), 1)


TABLE = torch.from_numpy(np.stack([posterior(z) for z in itertools.product(range(V + 1), repeat=L)])).reshape(*(V + 1,) * L, L, V + 1)


class Exact:
    """The posterior of what is clean, however an objective shows that; remembers what it was told."""

    def __init__(self) -> None:
        self.seen: list[NetworkInput] = []

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        self.seen.append(inputs)
        if inputs.ids_BL is not None:
            known_BL = inputs.ids_BL
        elif inputs.digits_BLJ is not None:
            known_BL = torch.where((inputs.digits_BLJ == CODE.base).any(-1), MASK, CODE.decode(inputs.digits_BLJ))
            return TABLE[tuple(known_BL.T)][..., :V]
        else:
            assert inputs.latents_BLE is not None and (inputs.conditioning_B == GAMMA_1).all()
            e_KE = torch.from_numpy(TABLE_KE)  # a clean token's latents are its vector, which noise does not hit
            apart_BLK = (inputs.latents_BLE[..., None, :].double() - e_KE).norm(dim=-1)[..., :V]
            known_BL = torch.where(apart_BLK.min(-1).values < 1e-6, apart_BLK.argmin(-1), MASK)
        return TABLE[tuple(known_BL.T)]

    def logits(self, features: Tensor) -> Tensor:
        return features


class ExactDuo:
    """The leave-one-out posterior where data of V letters is noised over K ids."""

    def __init__(self, classes: int) -> None:
        self.toy, self.told = Toy(classes - 1, L, np.array(SEQUENCES), Q_N), list[Tensor]()

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        assert inputs.ids_BL is not None
        self.told.append(torch.exp(-inputs.conditioning_B.double()))
        rows = torch.empty(*inputs.ids_BL.shape, self.toy.vocabulary + 1, dtype=torch.float64)
        for alpha in self.told[-1].unique().tolist():
            chosen = self.told[-1] == alpha
            rows[chosen] = torch.from_numpy(np.maximum(leave_one_out(self.toy, inputs.ids_BL[chosen].numpy(), alpha), -700))
        return rows

    def logits(self, features: Tensor) -> Tensor:
        return features


def network_of(objective: str, classes: int) -> Any:
    return {
        "ar": partial(CausalTable, TABLE.where(TABLE < 99, -torch.inf), ahead=1),
        "esolm": partial(CausalTable, TABLE),
        "duo": partial(ExactDuo, classes),
    }.get(objective, Exact)()


def constants_of(objective: str) -> Constants:
    space = LatentSpace(table_VE=torch.from_numpy(TABLE_KE), gamma=lambda t: GAMMA_1 * t)
    return Constants(objective=objective, schedule_eps=1e-6, code=CODE, space=space)


def draw(objective: str, prompts: list[tuple[int, ...]], *, network: Any = None, classes: int = V + 1, end: int | None = END, **given: Any) -> Any:
    mask = None if objective in ("ar", "mdm_prime") else classes - 1
    size = V if objective == "mdm_prime" else classes
    asked = Request(law=TokenLaw(mask_id=mask), vocab_size=size, seed=1, sequences_B=torch.arange(len(prompts)), end=end)
    canvas_BL = torch.tensor([[*prompt, *[BLANK] * (L - len(prompt))] for prompt in prompts])
    method = Method.of(objective, "ar" if objective == "ar" else "left_to_right", given)
    return fill(network or network_of(objective, classes), canvas_BL, asked, constants_of(objective), method)


def law_after(prompt: tuple[int, ...]) -> np.ndarray:
    """[V^L]: the data's law of sequences that begin so."""
    law_M = np.zeros(V**L)
    for x, q in zip(SEQUENCES, Q_N, strict=True):
        if x[: len(prompt)] == prompt:
            law_M[int("".join(map(str, x)), V)] = q
    return law_M / law_M.sum()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_law_is_the_datas_after_every_prompt(objective: str) -> None:
    """For Duo with as many ids as a small tokenizer has: its p cannot know which positions are clean, and the error falls as 1 / K."""
    prompts = [PROMPTS[i % 3] for i in range(DRAWS)]
    ids_BL, evaluations_B = draw(objective, prompts, classes=1500 if objective == "duo" else V + 1)
    for i, prompt in enumerate(PROMPTS):
        assert p_value(ids_BL[i::3], law_after(prompt), V) > 1e-4, prompt
        other = law_after(PROMPTS[i - 1])
        assert p_value(ids_BL[i::3], other, V) < 1e-8
    responses = [row[len(prompt) :] for row, prompt in zip(ids_BL.tolist(), prompts, strict=True)]
    wanted = [row.index(END) + 1 if END in row else len(row) for row in responses]
    assert evaluations_B.tolist() == wanted, "one evaluation per token, and none after the end"


def test_duos_law_with_few_ids_is_another_one() -> None:
    prompts = [(0,)] * DRAWS
    assert p_value(draw("duo", prompts)[0], law_after((0,)), V + 1) < 1e-8


@pytest.mark.parametrize(("share", "alphas"), [("all", [0.25, 0.5, 0.75]), ("filled", [1e-6, 1 / 3, 2 / 3])])
def test_the_share_that_duo_is_told(share: str, alphas: list[float]) -> None:
    network = ExactDuo(V + 1)
    draw("duo", [(0,)] * 5, network=network, end=None, clean_share=share)
    assert [alpha_B.tolist() for alpha_B in network.told] == [[pytest.approx(alpha, rel=1e-3)] * 5 for alpha in alphas]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_end_changes_nothing_before_it_and_neighbours_change_nothing(objective: str) -> None:
    prompts = [PROMPTS[i % 3] for i in range(60)]
    whole_BL, ended_BL = draw(objective, prompts, end=None)[0].tolist(), draw(objective, prompts)[0].tolist()
    for whole, ended, prompt in zip(whole_BL, ended_BL, prompts, strict=True):
        upto = ended.index(END, len(prompt)) + 1 if END in ended[len(prompt) :] else L
        assert whole[:upto] == ended[:upto] and ended[upto:] == [END] * (L - upto)


@pytest.mark.parametrize("kind", ["dit", "llama"])
@pytest.mark.parametrize("end", [None, 5])
def test_unequal_prompts_of_autoregression_as_each_alone(kind: str, end: int | None) -> None:
    """A real network whose cache holds prompts of other lengths beside."""
    network: Any = real_network(kind)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 5], [3, 1, 4, 1, 5], [2] * 11]
    canvas_BL = torch.tensor([[*prompt, *[BLANK] * (14 - len(prompt))] for prompt in prompts])
    method = Method.of("ar")

    def fill_rows(rows: list[int]) -> tuple[Tensor, Tensor]:
        asked = Request(law=TokenLaw(), vocab_size=11, seed=3, sequences_B=torch.tensor(rows), end=end)
        return fill(network, canvas_BL[rows], asked, Constants(objective="ar"), method)

    together_BL, evaluations_B = fill_rows([0, 1, 2, 3, 4])
    alone = [fill_rows([row]) for row in range(5)]
    assert torch.equal(together_BL, torch.cat([ids for ids, _ in alone])) and evaluations_B.tolist() == [int(nfe) for _, nfe in alone]
    mixed_BL, _ = fill_rows([3, 0])
    assert torch.equal(mixed_BL, together_BL[[3, 0]])
    assert end is not None or evaluations_B.tolist() == [7, 13, 12, 9, 3]
