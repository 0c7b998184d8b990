"""Samplers on worlds small enough to enumerate: their frequencies against laws computed from the joint distribution."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from pretrain.hf_model.attention_patterns import KeyValueCache
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.hf_model.sampling_ar import sample_ar
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_mdlm import sample_first_hitting, sample_mdlm
from pretrain.hf_model.sampling_network import Request

V, L, MASK = 3, 2, 3
DRAWS = 20_000
JOINT = np.random.default_rng(7).dirichlet(np.full(V**L, 0.4)).reshape((V,) * L)
WORLD = list(itertools.product(range(V), repeat=L))


class ExactDenoiser:
    """The Bayes posterior q(x^l | unmasked part of z) as a table; the mask's column gets a large logit that the sampler must ignore."""

    def __init__(self) -> None:
        self.sequences_read = 0
        self.table = torch.zeros((V + 1,) * L + (L, V + 1), dtype=torch.float64)
        for z in itertools.product(range(V + 1), repeat=L):
            for place, v in itertools.product(range(L), range(V)):
                agree = [x for x in WORLD if x[place] == v and all(zi in (MASK, xi) for zi, xi in zip(z, x, strict=True))]
                self.table[z][place, v] = sum(JOINT[x] for x in agree)
            self.table[z][:, MASK] = 1e9
        self.table = self.table.log()

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        assert inputs.ids_BL is not None and (inputs.ids_BL == MASK).any(-1).all()
        self.sequences_read += len(inputs.ids_BL)
        return self.table[tuple(inputs.ids_BL.T)]

    def logits(self, features: Tensor) -> Tensor:
        return features


def law_of_ancestral(steps: int) -> list[float]:
    """The probability of each sequence under `steps` steps, summed over which step reveals which position."""
    marginal = (JOINT.sum(axis=1), JOINT.sum(axis=0))
    together = 1 / steps  # both positions fall into one of the equally likely steps
    return [(1 - together) * JOINT[x] + together * marginal[0][x[0]] * marginal[1][x[1]] for x in WORLD]


def p_value(ids_BL: Tensor, law: list[float]) -> float:
    counts = torch.bincount(ids_BL[:, 0] * V + ids_BL[:, 1], minlength=V**L).tolist()
    return float(chisquare(counts, [DRAWS * p for p in law]).pvalue)


def request(names: Tensor | int, *, vocab_size: int = V + 1, mask_id: int | None = MASK, seed: int = 1) -> Request:
    sequences_B = torch.arange(names) if isinstance(names, int) else names
    return Request(law=TokenLaw(mask_id=mask_id), vocab_size=vocab_size, seed=seed, sequences_B=sequences_B)


def masked(batch: int, length: int = L) -> Tensor:
    return torch.full((batch, length), MASK)


@pytest.mark.parametrize("steps", [1, 2, 5, 50])
def test_ancestral_law(steps: int) -> None:
    law = law_of_ancestral(steps)
    assert sum(law) == pytest.approx(1)
    ids_BL, evaluations_B = sample_mdlm(ExactDenoiser(), masked(DRAWS), steps, request(DRAWS))
    assert p_value(ids_BL, law) > 1e-4
    if steps < 3:  # the test has the power to tell few steps from many
        assert p_value(ids_BL, law_of_ancestral(2000)) < 1e-8
    assert int(evaluations_B.max()) <= min(steps, L)


def test_first_hitting_law_is_the_data() -> None:
    ids_BL, evaluations_B = sample_first_hitting(ExactDenoiser(), masked(DRAWS), request(DRAWS))
    assert p_value(ids_BL, [float(JOINT[x]) for x in WORLD]) > 1e-4
    assert (evaluations_B == L).all()


def test_unchanged_inputs_are_not_evaluated_again() -> None:
    network = ExactDenoiser()
    _, evaluations_B = sample_mdlm(network, masked(50), 200, request(50))
    assert network.sequences_read == int(evaluations_B.sum()) <= 50 * L


def real(kind: str, vocab_size: int = 11) -> torch.nn.Module:
    config = NetworkConfig(kind=kind, vocab_size=vocab_size, hidden=16, layers=2, heads=2, kv_heads=2, ffn=32, cond_dim=8)
    network = build_network(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter == 1))
    return network


def test_given_tokens_are_carried_over() -> None:
    """Infilling: only masks change, also when one sequence has none and another is all masks."""
    start_BL = torch.tensor([[1, 10, 2, 10, 10, 3], [4, 5, 6, 7, 8, 9], [10, 10, 10, 10, 10, 10]])
    asked = request(3, vocab_size=11, mask_id=10)
    for ids_BL, evaluations_B in (sample_mdlm(real("dit"), start_BL, 4, asked), sample_first_hitting(real("dit"), start_BL, asked)):
        assert torch.equal(ids_BL[start_BL != 10], start_BL[start_BL != 10])
        assert evaluations_B[1] == 0 and (ids_BL != 10).all()


@pytest.mark.parametrize("kind", ["dit", "llama"])
@pytest.mark.parametrize("sampler", ["ar", "mdlm", "first_hitting"])
def test_samples_do_not_depend_on_the_batch(kind: str, sampler: str) -> None:
    network = real(kind)

    def draw(names: list[int], seed: int = 1) -> Tensor:
        asked = request(torch.tensor(names), vocab_size=11, mask_id=10, seed=seed)
        if sampler == "ar":
            return sample_ar(network, torch.zeros(len(names), 1, dtype=torch.long), 12, asked)[0]
        start_BL = torch.full((len(names), 12), 10)
        return sample_mdlm(network, start_BL, 8, asked)[0] if sampler == "mdlm" else sample_first_hitting(network, start_BL, asked)[0]

    together = draw([0, 1, 2, 3, 4, 5])
    assert torch.equal(torch.cat([draw([i]) for i in range(6)]), together)
    assert torch.equal(draw([4, 2]), together[[4, 2]])
    assert len({tuple(row) for row in together.tolist()}) == 6
    assert not torch.equal(draw([0, 1, 2, 3, 4, 5], seed=2), together)


def test_ar_sampler_draws_from_the_chain_rule() -> None:
    """Frequencies of two-token continuations of a prompt against the product of the network's own conditionals, computed without a cache."""
    network = real("llama", vocab_size=3)
    prompt = torch.tensor([2, 0])

    def conditional(ids: list[int]) -> Tensor:
        ids_BL = torch.tensor([ids])
        given = NetworkInput(ids_BL=ids_BL, positions_BL=torch.arange(len(ids))[None], conditioning_B=torch.zeros(1), attention=Attention.CAUSAL)
        return network(given)[0, -1].detach().double().softmax(-1)

    first = conditional([2, 0])
    law = [float(first[a] * conditional([2, 0, a])[b]) for a in range(3) for b in range(3)]
    ids_BL, evaluations_B = sample_ar(network, prompt.expand(DRAWS, -1), 2, request(DRAWS, vocab_size=3, mask_id=None))
    assert (ids_BL[:, :2] == prompt).all() and (evaluations_B == 2).all()
    assert p_value(ids_BL[:, 2:], law) > 1e-4


@dataclass(frozen=True, kw_only=True)
class RecordingLaw(TokenLaw):
    """A law that remembers the logits that it was asked about."""

    asked: list[Tensor] = field(default_factory=list)

    def draw(self, logits_NV: Tensor, uniform_N: Tensor) -> Tensor:
        self.asked.append(logits_NV)
        return super().draw(logits_NV, uniform_N)


@pytest.mark.parametrize("kind", ["dit", "llama"])
@torch.no_grad()
def test_cached_logits_of_autoregression_are_uncached_ones_at_every_step(kind: str) -> None:
    """After a prompt of five tokens, for each of thirty: against a whole pass without a cache over what was sampled."""
    network, law = real(kind), RecordingLaw()
    prompt_BL = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(0))
    asked = Request(law=law, vocab_size=11, seed=1, sequences_B=torch.arange(4))
    ids_BL, _ = sample_ar(network, prompt_BL, 30, asked)
    whole = NetworkInput(
        ids_BL=ids_BL, positions_BL=torch.arange(35).expand(4, -1), conditioning_B=torch.zeros(4), attention=Attention.CAUSAL
    )  # fmt: skip
    logits_BLV = network(whole)
    assert len(law.asked) == 30
    for step, cached_BV in enumerate(law.asked):
        torch.testing.assert_close(cached_BV, logits_BLV[:, 4 + step], rtol=1e-5, atol=1e-5)


def test_post_condition() -> None:
    with pytest.raises(RuntimeError, match="left 2 masks"):
        request(1).check(torch.tensor([[3, 0, 3]]))
    with pytest.raises(RuntimeError, match="outside"):
        request(1).check(torch.tensor([[4, 0]]))
