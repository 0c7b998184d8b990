"""Eso-LM's samplers: every logit against the whole sequence without a cache, what each evaluation asks about, and what the samples depend on.

Shape suffixes: B sequences, L positions, N positions drawn together, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pretrain.hf_model import sampling_draw
from pretrain.hf_model.attention_patterns import KeyValueCache
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.network_input import NetworkInput
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_esolm import sample_esolm, sample_esolm_block, sample_esolm_block_autoregressive, sample_esolm_left_to_right
from pretrain.hf_model.sampling_esolm_orders import Reveals, ancestral_reveals, block_reveals, left_to_right_reveals, position_noise
from pretrain.hf_model.sampling_network import CausalDenoiser, Request
from tests.sampling.esolm_examples import causal, real, request

Sampler = Callable[[CausalDenoiser, Tensor, Request], tuple[Tensor, Tensor]]
Planner = Callable[[Tensor, Request], Reveals]


def pair(sampler: Callable[..., tuple[Tensor, Tensor]], planner: Callable[..., Reveals], **options: Any) -> tuple[Sampler, Planner]:
    """A sampler and what it plans, as functions of (network,) ids and request."""
    extra = {"anchors": True} if sampler is sample_esolm_block_autoregressive else {}
    steps = options.pop("steps", None)
    if steps is None:
        return partial(sampler, **options), partial(planner, **options, **extra)
    return (
        lambda network, ids_BL, asked: sampler(network, ids_BL, steps, asked, **options),
        lambda ids_BL, asked: planner(ids_BL, steps, asked, **options, **extra),
    )


SAMPLERS = {
    "few steps": pair(sample_esolm, ancestral_reveals, steps=3, alpha_0=0.6),
    "many steps": pair(sample_esolm, ancestral_reveals, steps=60, alpha_0=1.0),
    "one step": pair(sample_esolm, ancestral_reveals, steps=1, alpha_0=1.0, given="shuffled"),
    "sequential": pair(sample_esolm, ancestral_reveals, steps=5, alpha_0=0.0),
    "block": pair(sample_esolm_block, block_reveals, steps=4),
    "shuffled block": pair(sample_esolm_block, block_reveals, steps=4, order="shuffled", given="shuffled"),
    "block autoregressive": pair(sample_esolm_block_autoregressive, block_reveals, steps=3, segments=2, order="shuffled_steps"),
    "left to right": pair(sample_esolm_left_to_right, left_to_right_reveals),
}
EVERY_SAMPLER = pytest.mark.parametrize("name", SAMPLERS)


@dataclass(frozen=True, kw_only=True)
class RecordingLaw(TokenLaw):
    """A law that remembers what it was asked."""

    asked: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def draw(self, logits_NV: Tensor, uniform_N: Tensor) -> Tensor:
        self.asked.append((logits_NV, uniform_N))
        return super().draw(logits_NV, uniform_N)


def start(mask_id: int = 10) -> Tensor:
    """Nothing given, prompts of two lengths, a gap to fill, single masks, and nothing to do."""
    ids_BL = torch.full((6, 14), mask_id)
    ids_BL[1, :3] = torch.tensor([4, 2, 7])
    ids_BL[2, :6] = torch.tensor([1, 1, 0, 9, 8, 3])
    ids_BL[3, :4], ids_BL[3, 9:] = 5, 6
    ids_BL[4, [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]] = 2
    ids_BL[5] = 3
    return ids_BL


@EVERY_SAMPLER
@pytest.mark.parametrize("kind", ["dit", "llama"])
@torch.no_grad()
def test_cached_logits_are_those_of_the_whole_sequence(kind: Literal["dit", "llama"], name: str) -> None:
    """At every turn, of both phases: [given, revealed so far, all masks left] in the plan's order under causal attention, without a cache."""
    network, law = real(kind, 10), RecordingLaw(mask_id=10)
    sampler, planner = SAMPLERS[name]
    ids_BL, asked = start(), request(6, law=law)
    result_BL, _ = sampler(network, ids_BL, asked)
    plan, uniform_BL = planner(ids_BL, asked), position_noise(ids_BL, asked)[1]
    got = {u: row_V for logits_NV, uniform_N in law.asked for row_V, u in zip(logits_NV, uniform_N.tolist(), strict=True)}
    assert len(got) == sum(len(u) for _, u in law.asked) == int((ids_BL == 10).sum())
    ordered_BL, ordered_uniform_BL = result_BL.gather(1, plan.order_BL), uniform_BL.gather(1, plan.order_BL)
    for turn in range(int(plan.turns_B.max())):
        known_B1, after_B1 = plan.known_BT[:, turn, None], plan.known_BT[:, turn + 1, None]
        index_L = torch.arange(ids_BL.shape[1])
        logits_BLV = network(causal(torch.where(index_L < known_B1, ordered_BL, 10), plan.order_BL))
        for b, i in ((index_L >= known_B1) & (index_L < after_B1)).nonzero().tolist():
            row_V = got.pop(float(ordered_uniform_BL[b, i]))
            torch.testing.assert_close(row_V, logits_BLV[b, i], rtol=1e-5, atol=1e-5)
            assert int(TokenLaw(mask_id=10).draw(logits_BLV[b, i][None], ordered_uniform_BL[b, i][None])) == int(ordered_BL[b, i])
    assert not got


@EVERY_SAMPLER
def test_samples_do_not_depend_on_the_batch_and_keep_what_is_given(name: str) -> None:
    network, sampler, ids_BL = real("dit", 10), SAMPLERS[name][0], start()

    def draw(names: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
        return sampler(network, ids_BL[names], request(torch.tensor(names), law=TokenLaw(mask_id=10), seed=seed))

    together_BL, evaluations_B = draw([0, 1, 2, 3, 4, 5])
    assert torch.equal(together_BL[ids_BL != 10], ids_BL[ids_BL != 10]) and (together_BL != 10).all()
    assert torch.equal(torch.cat([draw([i])[0] for i in range(6)]), together_BL)
    assert torch.equal(torch.cat([draw([i])[1] for i in range(6)]), evaluations_B) and evaluations_B[5] == 0
    assert torch.equal(draw([4, 2, 5])[0], together_BL[[4, 2, 5]])
    assert not torch.equal(draw([0, 1, 2, 3, 4, 5], seed=2)[0], together_BL)


class Metered:
    """A network that notes the sequences and positions of every call, and the tokens of its progress."""

    def __init__(self, network: DiT | Llama) -> None:
        self.network, self.shapes, self.tokens = network, list[tuple[int, int]](), 0
        self.logits, self.new_cache = network.logits, network.new_cache

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        self.shapes.append((inputs.positions_BL.shape[0], inputs.positions_BL.shape[1]))
        return self.network.features(inputs, cache)

    def progress(self, tokens: int) -> None:
        self.tokens += tokens


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (partial(sample_esolm_block, steps=4), [3, 6, 6, 6]),
        (partial(sample_esolm_block_autoregressive, steps=3, segments=2), [1, 2, 3, 4, 3, 2, 3, 4]),
        (sample_esolm_left_to_right, [1] + [2] * 11),
        (partial(sample_esolm, steps=9, alpha_0=0.0), [1] + [2] * 11),
        (partial(sample_esolm, steps=1, alpha_0=1.0), [12]),
        (partial(sample_esolm, steps=10**9, alpha_0=1.0), [1] + [2] * 11),
    ],
)
def test_evaluations_and_the_positions_that_each_asks_about(sampler: Callable[..., tuple[Tensor, Tensor]], expected: list[int]) -> None:
    """Those revealed a turn ago and those revealed now: two per turn in the sequential phase."""
    network = Metered(real("dit", 10))
    asked = Request(law=TokenLaw(mask_id=10), vocab_size=11, seed=1, sequences_B=torch.arange(4), progress=network.progress)
    _, evaluations_B = sampler(network, torch.full((4, 12), 10), request=asked)
    assert network.shapes == [(4, width) for width in expected] and evaluations_B.tolist() == [len(expected)] * 4
    assert network.tokens == 48


def test_finished_sequences_are_not_asked_again() -> None:
    network = Metered(real("dit", 10))
    _, evaluations_B = sample_esolm_left_to_right(network, start(), request(6, law=TokenLaw(mask_id=10)))
    assert evaluations_B.tolist() == [14, 11, 8, 5, 2, 0]
    assert [rows for rows, _ in network.shapes] == [5] * 2 + [4] * 3 + [3] * 3 + [2] * 3 + [1] * 3


def test_logits_are_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    network, laws = real("dit", 10), (RecordingLaw(mask_id=10), RecordingLaw(mask_id=10))
    whole = sample_esolm_block(network, start(), 2, request(6, law=laws[0]))
    monkeypatch.setattr(sampling_draw, "MAX_ELEMENTS", 40)
    sliced = sample_esolm_block(network, start(), 2, request(6, law=laws[1]))
    assert torch.equal(whole[0], sliced[0])
    assert max(len(u) for _, u in laws[0].asked) > 10 and max(len(u) for _, u in laws[1].asked) == 3
