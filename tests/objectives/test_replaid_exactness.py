"""RePlaid's bound against exact numbers on toys, through the product's `token_nelbo`.

Shape suffixes: N sequences of the toy, M noises, B = N M entries, L positions, E width of an embedding, V vocabulary, P padded vocabulary.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.objectives.config import ObjectiveConfig, RePlaidConfig
from pretrain.objectives.replaid import RePlaid
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests import reference_math, reference_replaid
from tests.reference_math import Toy

TOYS = {
    "two dependent bits": (2, 2, 1, 0.25),
    "three dependent bits": (2, 3, 1, 0.6),
    "four tokens on a circle": (4, 1, 2, 0.3),
}
"""Vocabulary, length, width of the embedding, step of the quadrature."""

Denoiser = Callable[[np.ndarray, float], np.ndarray]
"""(z [B, L, E], gamma) -> log probabilities [B, L, V]."""


class Case:
    """A toy, the product's objective with the toy's embeddings, and every (sequence, noise) of the quadrature."""

    def __init__(self, name: str, gamma_0: float, gamma_1: float, *, output_prior: bool = False) -> None:
        vocabulary, length, width, step = TOYS[name]
        self.toy: Toy = reference_math.random_toy(vocabulary, length, 1)
        self.table_VE = reference_replaid.unit_vectors(vocabulary, width)
        nodes, self.weights_M = reference_replaid.normal_grid(length * width, step)
        self.nodes_MLE = nodes.reshape(-1, length, width)
        words = Vocabulary(tokenizer_size=vocabulary, model_size=vocabulary + 1, padded_size=vocabulary + 3, mask_id=vocabulary, eos_id=0)
        constants = RePlaidConfig(
            latent=width, gamma_0=gamma_0, gamma_1=gamma_1, schedule_hidden=32, output_prior=output_prior, prior_ramp_steps=0
        )
        self.objective = RePlaid(words, ObjectiveConfig(name="replaid", replaid=constants))
        self.objective.modules().double()
        self.objective.embedding.weight.data[:vocabulary] = torch.from_numpy(self.table_VE)
        self.vocab = VocabShard.whole(words)

    def drawn(self, *, part: int, t: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs and targets as the loader makes them, with the quadrature's noise and time in place of the drawn ones."""
        samples = [
            self.objective.corrupt(
                ids_L, np.zeros(self.toy.length, np.int32), Noise(seed=0, index=0, position=0, batch=1, part=part, share=0.5), evaluation=True
            )
            for ids_L in self.toy.sequences_NL
        ]
        groups = []
        for arrays in ([sample.inputs for sample in samples], [sample.targets for sample in samples]):
            stacked = {key: np.repeat(np.stack([a[key] for a in arrays]), len(self.nodes_MLE), axis=0) for key in arrays[0]}
            stacked["normals"] = np.tile(self.nodes_MLE, (len(samples), 1, 1))
            stacked["u"] = np.full(len(stacked["u"]), 1 - t)
            groups.append({key: torch.from_numpy(value) for key, value in stacked.items()})
        return groups[0], groups[1]

    def nats(self, denoiser: Denoiser, *, part: int, t: float) -> np.ndarray:
        """[N]: the product's nelbo of one draw, averaged over the noise."""
        inputs, targets = self.objective.prepare(*self.drawn(part=part, t=t), evaluation=True)
        gamma_B, _ = self.objective.schedule(targets["t"])
        gamma = gamma_B[0].item()
        z_BLE = reference_replaid.noisy(self.toy, self.table_VE, self.nodes_MLE, gamma)
        logits_BLP = np.full((*z_BLE.shape[:2], self.vocab.end), 7.0)
        logits_BLP[..., : self.toy.vocabulary] = denoiser(z_BLE, gamma)
        with torch.no_grad():
            nats_BL = self.objective.token_nelbo(torch.from_numpy(logits_BLP), targets, self.vocab)
        return nats_BL.sum(-1).reshape(len(self.toy.q_N), -1).numpy() @ self.weights_M

    def bound(self, denoiser: Denoiser, *, nodes: int) -> np.ndarray:
        """[N]: the mean over a sequence's draws, one in each part, with t integrated in the diffusion part."""
        reconstruction_N = self.nats(denoiser, part=0, t=0.3)
        diffusion_N = np.zeros_like(reconstruction_N)
        for t, share in zip(*reference_math.quadrature(0.0, 1.0, nodes), strict=True):
            diffusion_N += share * self.nats(denoiser, part=1, t=float(t))
        return (reconstruction_N + diffusion_N) / 2

    def bayes(self, z_BLE: np.ndarray, gamma: float) -> np.ndarray:
        """The exact marginals; where the product adds the evidence of z itself, without that."""
        logp_BLV = reference_replaid.log_marginals(self.toy, self.table_VE, z_BLE, gamma)
        if not self.objective.config.output_prior:
            return logp_BLV
        a, s = reference_replaid.scales(gamma)
        return logp_BLV - a / s**2 * z_BLE @ self.table_VE.T


@pytest.mark.parametrize(("name", "nodes", "tolerance"), [
    ("two dependent bits", 24, 5e-8), ("three dependent bits", 10, 5e-6), ("four tokens on a circle", 24, 5e-8)
])
def test_with_the_exact_denoiser_the_bound_is_the_exact_number_above_the_entropy(name: str, nodes: int, tolerance: float) -> None:
    """Entropy, what separate tokens lose at z_0 and what the prior misses, each by its own quadrature. Near endpoints make the latter large."""
    case = Case(name, -1.0, 3.0)
    bound = float(case.toy.q_N @ case.bound(case.bayes, nodes=nodes))
    exact = reference_replaid.exact_bound(case.toy, case.table_VE, case.nodes_MLE, case.weights_M, -1.0, 3.0)
    assert bound == pytest.approx(exact, abs=tolerance) and bound > case.toy.entropy + 5e-3


def test_the_bound_tends_to_the_entropy_as_the_endpoints_widen() -> None:
    excess = []
    for reach in (1.0, 2.0, 3.0, 5.0):
        case = Case("two dependent bits", -reach, 2 * reach)
        excess.append(float(case.toy.q_N @ case.bound(case.bayes, nodes=32)) - case.toy.entropy)
    assert all(a > b for a, b in zip(excess, excess[1:], strict=False)) and 0 < excess[-1] < 2e-5 < 1e-2 < excess[0]


@pytest.mark.parametrize("output_prior", [False, True])
def test_wide_endpoints(output_prior: bool) -> None:
    """gamma from -12 to 12: the entropy to quadrature error, whether the evidence comes from the network or from the output prior."""
    case = Case("four tokens on a circle", -12.0, 12.0, output_prior=output_prior)
    assert float(case.toy.q_N @ case.bound(case.bayes, nodes=64)) == pytest.approx(case.toy.entropy, abs=3e-6)


def test_the_output_prior_makes_frequencies_the_exact_denoiser_of_one_token() -> None:
    """For L = 1, log q(x | z) = log q(x) + (alpha / sigma^2) z . e_x + const: constant logits are optimal."""
    case = Case("four tokens on a circle", -3.0, 6.0, output_prior=True)
    frequencies_N = case.bound(lambda z_BLE, gamma: np.broadcast_to(np.log(case.toy.q_N), (len(z_BLE), 1, 4)), nodes=8)
    np.testing.assert_allclose(frequencies_N, case.bound(case.bayes, nodes=8), rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["two dependent bits", "four tokens on a circle"])
def test_any_denoiser_defines_a_distribution(name: str, seed: int) -> None:
    case = Case(name, -3.0, 6.0)
    random = np.random.default_rng(seed)
    shape = case.toy.length * case.table_VE.shape[1]
    inner, outer = random.normal(size=(shape + 1, 8)), random.normal(size=(8, case.toy.length * case.toy.vocabulary))

    def denoiser(z_BLE: np.ndarray, gamma: float) -> np.ndarray:
        features = np.concatenate([z_BLE.reshape(len(z_BLE), -1), np.full((len(z_BLE), 1), gamma / 4)], 1)
        return (np.tanh(features @ inner) @ outer).reshape(len(z_BLE), case.toy.length, case.toy.vocabulary)

    assert np.exp(-case.bound(denoiser, nodes=24)).sum() <= 1


def test_every_term_is_needed() -> None:
    """Where gamma_0 leaves much to reconstruct, or gamma_1 much signal, the bound without that term falls below the entropy."""
    late, early = Case("two dependent bits", 0.0, 6.0), Case("two dependent bits", -3.0, 0.0)
    late_N, early_N = late.bound(late.bayes, nodes=24), early.bound(early.bayes, nodes=24)
    prior = 2 * 0.5 * (-0.5 - np.log(0.5) + 0.5)  # two positions of width 1 at alpha^2 = sigma^2 = ½
    own_N = late.nats(late.bayes, part=0, t=0.3) / 2  # the prior at gamma_1 = 6 in it is 1e-4
    assert late.toy.q_N @ (late_N - own_N) < late.toy.entropy - 0.1 < late.toy.entropy < late.toy.q_N @ late_N
    assert early.toy.q_N @ early_N - prior < early.toy.entropy - 0.1 < early.toy.entropy < early.toy.q_N @ early_N


def test_labels() -> None:
    objective = Case("two dependent bits", -3.0, 6.0).objective
    assert objective.label(evaluation=True) == objective.label(evaluation=False) == "bound" and objective.evaluation_parts == 2
