"""MDM-Prime's samplers against the law of their Markov chain over every string of digits of a tiny world.

Shape suffixes: M states of all digits, S states of one token's, N sequences of the toy, L positions, J digits, V ids, B sequences.
"""

from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.hf_model import sampling_draw
from pretrain.hf_model.attention_patterns import KeyValueCache
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.hf_model.digits import DigitCode
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_network import BLANK, Request
from pretrain.hf_model.sampling_prime import sample_prime, sample_prime_left_to_right
from tests.reference_math import random_toy
from tests.sampling.worlds import p_value

V, L, J, BASE = 3, 2, 2, 2
CODE = DigitCode(V, base=BASE, digits=J, shuffle_seed=3)
TABLE = [tuple(row) for row in CODE.table_VJ.tolist()]  # [(0, 1), (1, 0), (0, 0)]: digits of different draws could end at (1, 1), which is no id
ONE_S = list(product(range(BASE + 1), repeat=J))
STATES = list(product(ONE_S, repeat=L))
HIDDEN = (BASE,) * J
TOY = random_toy(V, L, 4)
DRAWS = 20_000


class TableDenoiser:
    """[M, L, V]: logits for every state of the digits."""

    def __init__(self, logits_MLV: np.ndarray) -> None:
        self.table, self.seen, self.rows, self.read = torch.from_numpy(logits_MLV), list[Tensor](), list[int](), 0

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        assert inputs.digits_BLJ is not None and inputs.attention is Attention.FULL and not inputs.conditioning_B.any()
        self.seen.append(inputs.digits_BLJ.clone())
        self.read += len(inputs.digits_BLJ)
        place = (BASE + 1) ** torch.arange(L * J - 1, -1, -1)
        return self.table[(inputs.digits_BLJ.flatten(1) * place).sum(-1)]

    def logits(self, features: Tensor) -> Tensor:
        self.rows.append(len(features))
        return features


def agrees(token: int, digits: tuple[int, ...]) -> bool:
    return all(y in (BASE, own) for y, own in zip(digits, TABLE[token], strict=True))


def senseless() -> np.ndarray:
    """Another row for each state; ids that contradict it get a large logit, which the sampler must ignore."""
    logits_MLV = 1.5 * np.random.default_rng(3).normal(size=(len(STATES), L, V))
    for m, place, v in product(range(len(STATES)), range(L), range(V)):
        if not agrees(v, STATES[m][place]):
            logits_MLV[m, place, v] = 9.0
    return logits_MLV


def exact() -> np.ndarray:
    """log q(x^l = v | visible digits), by enumeration."""
    logits_MLV = np.zeros((len(STATES), L, V))
    for m, state in enumerate(STATES):
        weight_N = np.array([q * all(map(agrees, x, state)) for x, q in zip(TOY.sequences_NL.tolist(), TOY.q_N, strict=True)])
        for place, v in product(range(L), range(V)):
            logits_MLV[m, place, v] = np.log(weight_N[TOY.sequences_NL[:, place] == v].sum() + 1e-300)
    return logits_MLV


def shaped(logits_V: np.ndarray, digits: tuple[int, ...], temperature: float = 1.0, top_k: int = V, top_p: float = 1.0) -> np.ndarray:
    """[V]: p over the ids that agree, with options; zeros where no id does."""
    possible_V = [agrees(v, digits) for v in range(V)]
    if not any(possible_V):
        return np.zeros(V)
    score_V = np.where(possible_V, logits_V, -np.inf) / temperature
    p_V = np.exp(score_V - score_V.max())
    order = np.argsort(-p_V)
    p_V[order[top_k:]] = 0.0
    p_V /= p_V.sum()
    p_V[order[1:][np.cumsum(p_V[order])[:-1] >= top_p]] = 0.0
    return p_V / p_V.sum()


def token_step(digits: tuple[int, ...], p_V: np.ndarray, chance: float, joint: bool) -> np.ndarray:
    """[S]: a token's next digits, when each masked one (or all together) is revealed with this chance."""
    hidden = [j for j in range(J) if digits[j] == BASE]
    next_S = np.zeros(len(ONE_S))
    for pattern in product((False, True), repeat=len(hidden)):
        shown = [j for j, is_shown in zip(hidden, pattern, strict=True) if is_shown]
        weight = chance ** len(shown) * (1 - chance) ** (len(hidden) - len(shown))
        if joint:
            weight = {len(hidden): chance, 0: 1 - chance}.get(len(shown), 0.0) if hidden else 1.0
        for v in range(V):
            after = tuple(TABLE[v][j] if j in shown else digits[j] for j in range(J))
            next_S[ONE_S.index(after)] += weight * p_V[v]
    return next_S


def law_of_chain(logits_MLV: np.ndarray, steps: int, joint_above: float = 1.0, first: tuple[int, ...] = HIDDEN, **options: Any) -> np.ndarray:
    """[V ** L]: the law of the final ids, from masks (and a first token that is given)."""
    law_M = np.zeros(len(STATES))
    law_M[STATES.index((first, HIDDEN))] = 1.0
    for i in range(steps):
        t, after_M = 1 - i / steps, np.zeros(len(STATES))
        for m in np.flatnonzero(law_M):
            rows = []
            for place, digits in enumerate(STATES[m]):
                p_V = shaped(logits_MLV[m, place], digits, **options)
                rows.append(token_step(digits, p_V, 1 / steps / t, t > joint_above))
            after_M += law_M[m] * reduce(np.kron, rows)
        law_M = after_M
    return final(law_M)


def final(law_M: np.ndarray) -> np.ndarray:
    """[V ** L]: of states, to sequences of ids; all of it, since no state without an id has weight."""
    law = np.array([law_M[STATES.index(tuple(TABLE[v] for v in x))] for x in product(range(V), repeat=L)])
    assert law.sum() == pytest.approx(1)
    return law


def request(names: Tensor | int, vocab_size: int = V, seed: int = 1, progress: Any = lambda tokens: None, **law: Any) -> Request:
    sequences_B = torch.arange(names) if isinstance(names, int) else names
    return Request(law=TokenLaw(**law), vocab_size=vocab_size, seed=seed, sequences_B=sequences_B, progress=progress)


def blank(batch: int) -> Tensor:
    return torch.full((batch, L), BLANK)


@pytest.mark.parametrize(
    ("steps", "joint_above", "shape"),
    [
        (1, None, {}),
        (2, None, {}),
        (4, None, {}),
        (3, 0.0, {}),
        (4, 0.5, {}),
        (3, None, {"temperature": 0.5}),
        (3, None, {"top_k": 2}),
        (3, None, {"top_p": 0.6}),
    ],
)
def test_law_of_few_steps(steps: int, joint_above: float | None, shape: dict[str, Any]) -> None:
    table = senseless()
    law = law_of_chain(table, steps, 1.0 if joint_above is None else joint_above, **shape)
    ids_BL, evaluations_B = sample_prime(TableDenoiser(table), blank(DRAWS), steps, request(DRAWS, **shape), code=CODE, joint_above=joint_above)
    assert p_value(ids_BL, law, V) > 1e-4 and evaluations_B.max() <= steps and evaluations_B.min() >= 1
    if shape or joint_above is not None:  # the test can tell options from none
        assert p_value(ids_BL, law_of_chain(table, steps), V) < 1e-8


def test_most_likely_tokens_at_temperature_0() -> None:
    ids_BL, _ = sample_prime(TableDenoiser(senseless()), blank(2000), 3, request(2000, temperature=0.0), code=CODE)
    assert p_value(ids_BL, law_of_chain(senseless(), 3, temperature=0.01), V) > 1e-4


@pytest.mark.parametrize("joint_above", [None, 0.0, 0.5])
def test_many_steps_with_the_exact_denoiser_sample_the_data(joint_above: float | None) -> None:
    """Digits one after another, or tokens: either way the chain rule. A single step, which draws all positions apart, is far off."""
    steps, draws = 40, 6000
    law, coarse = law_of_chain(exact(), steps, 1.0 if joint_above is None else joint_above), law_of_chain(exact(), 1)
    assert np.abs(law - TOY.q_N).sum() < 0.03 < 0.2 < np.abs(coarse - TOY.q_N).sum()
    ids_BL, _ = sample_prime(TableDenoiser(exact()), blank(draws), steps, request(draws), code=CODE, joint_above=joint_above)
    assert p_value(ids_BL, law, V) > 1e-4 and p_value(ids_BL, coarse, V) < 1e-8


def test_left_to_right_law() -> None:
    table = senseless()
    law = np.zeros(V**L)
    first_V = shaped(table[STATES.index((HIDDEN, HIDDEN)), 0], HIDDEN)
    for x in range(V):
        law[x * V : (x + 1) * V] = first_V[x] * shaped(table[STATES.index((TABLE[x], HIDDEN)), 1], HIDDEN)
    ids_BL, evaluations_B = sample_prime_left_to_right(TableDenoiser(table), blank(DRAWS), request(DRAWS), code=CODE)
    assert p_value(ids_BL, law, V) > 1e-4 and (evaluations_B == L).all()
    data_BL, _ = sample_prime_left_to_right(TableDenoiser(exact()), blank(DRAWS), request(DRAWS), code=CODE)
    assert p_value(data_BL, TOY.q_N, V) > 1e-4


def test_digits_stay_once_visible_and_always_leave_an_id() -> None:
    network = TableDenoiser(senseless())
    ids_BL, evaluations_B = sample_prime(network, blank(300), 40, request(300), code=CODE)
    assert int(evaluations_B.sum()) == network.read and network.read < 300 * L * J + 1  # a sequence that shows nothing new is not evaluated
    for name in range(20):
        one = TableDenoiser(senseless())
        alone_BL, _ = sample_prime(one, blank(1), 40, request(torch.tensor([name])), code=CODE)
        path = [state[0] for state in one.seen] + [CODE.encode(alone_BL)[0]]
        for before, after in zip(path, path[1:], strict=False):
            assert (before[before != BASE] == after[before != BASE]).all() and (before != after).any()
            assert CODE.possible(after).any(-1).all()
        assert torch.equal(alone_BL[0], ids_BL[name])


def test_a_prompt_stands_in_its_digits() -> None:
    start_BL = torch.tensor([[1, BLANK], [BLANK, BLANK]]).repeat(DRAWS // 2, 1)
    ids_BL, _ = sample_prime(TableDenoiser(senseless()), start_BL, 3, request(DRAWS), code=CODE)
    assert p_value(ids_BL[::2], law_of_chain(senseless(), 3, first=TABLE[1]), V) > 1e-4
    assert p_value(ids_BL[1::2], law_of_chain(senseless(), 3), V) > 1e-4


START_BL = torch.tensor([[1, -1, 2, -1, -1, 3], [4, 4, 3, 2, 1, 0], [-1] * 6, [0, 1, 2, 3, 4, -1]])


@pytest.mark.parametrize("sampler", ["independent", "joint", "left_to_right"])
@pytest.mark.parametrize(("size", "base", "digits"), [(5, 2, 3), (11, 11, 1)])
def test_prompts_batches_and_slices(sampler: str, size: int, base: int, digits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 ids in 3 bits: three strings are no id, and none is sampled from weights that know nothing."""
    code, told = DigitCode(size, base=base, digits=digits, shuffle_seed=0), list[int]()
    config = NetworkConfig(
        kind="dit", vocab_size=size, hidden=18, layers=2, heads=1, kv_heads=1, ffn=32, cond_dim=8, reads="digits", digits=digits, digit_base=base
    )
    network: Any = build_network(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def draw(rows: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
        asked = request(torch.tensor(rows), size, seed, told.append, top_p=0.95)
        if sampler == "left_to_right":
            return sample_prime_left_to_right(network, START_BL[rows], asked, code=code)
        return sample_prime(network, START_BL[rows], 5, asked, code=code, joint_above=0.3 if sampler == "joint" else None)

    together_BL, evaluations_B = draw([0, 1, 2, 3])
    assert torch.equal(together_BL[START_BL != BLANK], START_BL[START_BL != BLANK])
    assert (together_BL >= 0).all() and (together_BL < size).all() and START_BL[2, 0] == BLANK
    assert sum(told) == 10 and min(told) >= 0
    if sampler == "left_to_right":
        assert evaluations_B.tolist() == [3, 0, 6, 1]
    assert evaluations_B[1] == 0 and (evaluations_B <= 6).all()
    assert torch.equal(torch.cat([draw([i])[0] for i in range(4)]), together_BL) and torch.equal(draw([3, 0])[0], together_BL[[3, 0]])
    assert not torch.equal(draw([0, 1, 2, 3], seed=2)[0], together_BL)
    monkeypatch.setattr(sampling_draw, "MAX_ELEMENTS", 2 * size)
    assert torch.equal(draw([0, 1, 2, 3])[0], together_BL)


def test_every_id_of_an_incomplete_code_is_sampled_and_no_other() -> None:
    """Uniform p over 5 ids in 3 bits, digit by digit: uniform ids."""

    class Flat:
        def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
            assert inputs.digits_BLJ is not None
            return torch.zeros(*inputs.digits_BLJ.shape[:2], 5)

        def logits(self, features: Tensor) -> Tensor:
            return features

    code = DigitCode(5, base=2, digits=3, shuffle_seed=0)
    ids_BL, _ = sample_prime(Flat(), torch.full((4000, 3), BLANK), 8, request(4000, 5), code=code)
    assert p_value(ids_BL, np.full(125, 1 / 125), 5) > 1e-4


def test_what_cannot_be_sampled() -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        sample_prime(TableDenoiser(senseless()), blank(1), 0, request(1), code=CODE)
    with pytest.raises(RuntimeError, match="outside"):
        sample_prime(TableDenoiser(senseless()), torch.tensor([[-2, BLANK]]), 1, request(1), code=CODE)
