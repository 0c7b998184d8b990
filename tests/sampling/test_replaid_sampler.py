"""RePlaid's sampler on a tiny world whose exact denoiser is known by enumeration, and what it asks of the network.

Shape suffixes: M states, V ids without the mask, K with it, L positions, E width, B sequences, N positions to fill.
"""

from math import log
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from pretrain.hf_model import sampling_draw
from pretrain.hf_model.attention_patterns import KeyValueCache
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.hf_model.gaussian_diffusion import UnitEmbedding
from pretrain.hf_model.gaussian_solvers import Solver
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.monotone_schedule import LearnedSchedule
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.hf_model.sampling_noise import normals
from pretrain.hf_model.sampling_replaid import LatentSpace, sample_replaid, sample_replaid_left_to_right
from tests import reference_replaid as reference
from tests.reference_math import random_toy
from tests.sampling.worlds import index, p_value, request

V, K, L, E, MASK = 3, 4, 2, 2, 3
GAMMA_0, GAMMA_1 = -5.0, 7.0
TOY = random_toy(V, L, 1)
TABLE_VE = reference.unit_vectors(V, E)
TABLE_KE = np.concatenate((TABLE_VE, [[0.6, 0.8]]))
DATA_M = np.zeros(K**L)
DATA_M[[index(tuple(x), K) for x in TOY.sequences_NL.tolist()]] = TOY.q_N


def space(**options: Any) -> LatentSpace:
    return LatentSpace(table_VE=torch.from_numpy(TABLE_KE), gamma=lambda t: GAMMA_0 + (GAMMA_1 - GAMMA_0) * t, **options)


class ExactDenoiser:
    """log q(x^l | z_t) less the evidence that the sampler adds; a large logit for the mask; remembers what it was asked."""

    def __init__(self, evidence: float = 1.0) -> None:
        self.evidence, self.seen, self.rows = evidence, list[NetworkInput](), list[int]()

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        assert inputs.latents_BLE is not None and inputs.attention is Attention.FULL
        self.seen.append(inputs)
        gamma = inputs.conditioning_B.unique().item()
        a, s = reference.scales(gamma)
        z_BLE = inputs.latents_BLE.double().numpy() * np.sqrt(a**2 / E + s**2)
        logits_BLV = reference.log_marginals(TOY, TABLE_VE, z_BLE, gamma) - self.evidence * a / s**2 * z_BLE @ TABLE_VE.T
        return torch.from_numpy(np.concatenate((logits_BLV, np.full((*z_BLE.shape[:2], 1), 99.0)), -1))

    def logits(self, features: Tensor) -> Tensor:
        self.rows.append(len(features))
        return features


def masked(batch: int) -> Tensor:
    return torch.full((batch, L), MASK)


@pytest.mark.parametrize(("solver", "steps", "evidence"), [("ddpm", 150, 1.0), ("ddim", 100, 0.0), ("dpm++", 40, 0.5), ("heun", 40, 1.0)])
def test_many_steps_with_the_exact_denoiser_sample_the_data(solver: Solver, steps: int, evidence: float) -> None:
    draws = 3000
    network = ExactDenoiser(evidence)
    ids_BL, evaluations_B = sample_replaid(network, masked(draws), steps, request(draws, K), space=space(evidence=evidence), solver=solver)
    assert p_value(ids_BL, DATA_M, K) > 1e-4
    assert (evaluations_B == steps * (2 if solver == "heun" else 1) + 1).all() and len(network.seen) == evaluations_B[0]
    apart_M = np.zeros(K**L)  # the test can tell the data from independent positions
    first_V, second_V = TOY.q_N.reshape(V, V).sum(1), TOY.q_N.reshape(V, V).sum(0)
    apart_M[[index((a, b), K) for a in range(V) for b in range(V)]] = np.outer(first_V, second_V).reshape(-1)
    assert p_value(ids_BL, apart_M, K) < 1e-8


def test_one_step_law() -> None:
    """z_0 = q(z_0 | z_1, e_hat(z_1)) and the most likely token there, in plain NumPy with other numbers."""
    draws = 20_000
    ids_BL, _ = sample_replaid(ExactDenoiser(), masked(draws), 1, request(draws, K), space=space())
    generator = np.random.default_rng(5)
    z_BLE = generator.normal(size=(draws, L, E))
    (a_t, s_t), (a_s, s_s) = reference.scales(GAMMA_1), reference.scales(GAMMA_0)
    back = a_t / a_s * s_s**2 / s_t**2
    clean_BLE = np.exp(reference.log_marginals(TOY, TABLE_VE, z_BLE, GAMMA_1)) @ TABLE_VE
    z_BLE = a_s * clean_BLE + back * (z_BLE - a_t * clean_BLE) + np.sqrt(s_s**2 - (back * s_t) ** 2) * generator.normal(size=z_BLE.shape)
    expected_BL = reference.log_marginals(TOY, TABLE_VE, z_BLE, GAMMA_0).argmax(-1)
    counts, others = (np.bincount([index(tuple(x), K) for x in ids], minlength=K**L) for ids in (ids_BL.tolist(), expected_BL.tolist()))
    seen = counts + others > 20
    assert seen.sum() >= 2 and ((counts - others)[seen] ** 2 / (counts + others)[seen]).sum() < 30


def test_the_network_reads_what_training_showed_it() -> None:
    """An even grid down to exactly 0; latents of mean square 1; prompts without noise; the estimate is the last plain e_hat."""
    network, draws = ExactDenoiser(), 300
    start_BL = masked(draws)
    start_BL[: draws // 2, 0] = 1
    asked = request(draws, K, temperature=0.3)
    sample_replaid(network, start_BL, 4, asked, space=space(), score_temperature=0.8)
    assert [inputs.conditioning_B[0].item() for inputs in network.seen] == [7.0, 4.0, 1.0, -2.0, -5.0]
    assert network.seen[0].latents_BLE.square().mean((0, 2))[1].item() == pytest.approx(1, abs=0.2)  # type: ignore[union-attr]
    last_BLE = torch.zeros(draws, L, E)
    for inputs in network.seen:
        assert inputs.latents_BLE is not None and inputs.estimate_BLE is not None
        a, s = reference.scales(inputs.conditioning_B[0].item())
        z_BLE = inputs.latents_BLE * np.sqrt(a**2 / E + s**2)
        prompt_BE = torch.from_numpy(TABLE_VE[1]).float().expand(draws // 2, E)
        torch.testing.assert_close(z_BLE[: draws // 2, 0], prompt_BE)
        torch.testing.assert_close(inputs.estimate_BLE, last_BLE * E**0.5, atol=1e-4, rtol=1e-4)
        mean_BLE = np.exp(reference.log_marginals(TOY, TABLE_VE, z_BLE.double().numpy(), inputs.conditioning_B[0].item())) @ TABLE_VE
        last_BLE = torch.from_numpy(mean_BLE).float()
        last_BLE[: draws // 2, 0] = prompt_BE
    without = ExactDenoiser()
    sample_replaid(without, start_BL, 2, asked, space=space(self_conditioning=False))
    assert not any(inputs.estimate_BLE.any() for inputs in without.seen if inputs.estimate_BLE is not None)


@pytest.mark.parametrize("left_to_right", [False, True])
def test_a_network_with_a_table_for_prompts_is_told_what_is_given(left_to_right: bool) -> None:
    """At every evaluation: the ids, and which of them are known by then; one without a table is told neither."""
    start_BL = torch.tensor([[1, MASK], [2, MASK]])
    for table in (True, False):
        network = ExactDenoiser()
        if left_to_right:
            sample_replaid_left_to_right(network, start_BL, request(2, K), space=space(prompt_table=table))
        else:
            sample_replaid(network, start_BL, 3, request(2, K), space=space(prompt_table=table))
        assert len(network.seen) == (1 if left_to_right else 4)
        for inputs in network.seen:
            if not table:
                assert inputs.ids_BL is None and inputs.given_BL is None
                continue
            assert inputs.ids_BL is not None and inputs.given_BL is not None
            assert inputs.ids_BL[:, 0].tolist() == [1, 2] and inputs.given_BL.tolist() == [[True, False], [True, False]]


def test_temperatures_shape_the_step() -> None:
    """One step of ddim from the same z_1: e_hat under x_theta ** (1/0.5), and with the predicted noise divided by 0.7."""
    network, draws = ExactDenoiser(), 50
    sample_replaid(network, masked(draws), 1, request(draws, K, temperature=0.5), space=space(), solver="ddim", score_temperature=0.7)
    z_BLE = normals(1, torch.arange(draws), 0, torch.arange(L), E).numpy()
    (a_t, s_t), (a_s, s_s) = reference.scales(GAMMA_1), reference.scales(GAMMA_0)
    p_BLV = np.exp(reference.log_marginals(TOY, TABLE_VE, z_BLE, GAMMA_1) / 0.5)
    clean_BLE = p_BLV / p_BLV.sum(-1, keepdims=True) @ TABLE_VE
    noise_BLE = (z_BLE - a_t * clean_BLE) / s_t / 0.7
    expected_BLE = a_s * (z_BLE - s_t * noise_BLE) / a_t + s_s * noise_BLE
    assert network.seen[1].latents_BLE is not None
    found_BLE = network.seen[1].latents_BLE.numpy() * np.sqrt(a_s**2 / E + s_s**2)
    np.testing.assert_allclose(found_BLE, expected_BLE, rtol=2e-4, atol=2e-4)


def test_a_prompt_conditions_the_rest() -> None:
    """A denoiser that knows the first token from its latents, which stand without noise, samples q(second | first)."""
    draws = 3000

    class Told(ExactDenoiser):
        def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
            assert inputs.latents_BLE is not None
            gamma = inputs.conditioning_B[0].item()
            a, s = reference.scales(gamma)
            z_BLE = inputs.latents_BLE.double().numpy() * np.sqrt(a**2 / E + s**2)
            first_B = ((z_BLE[:, :1] - TABLE_VE) ** 2).sum(-1).argmin(-1)
            # Evidence is added by the sampler: what is left is the conditional law of the second token.
            logits_BV = np.log(TOY.q_N.reshape(V, V)[first_B])
            logits_BK = np.concatenate((logits_BV, np.full((len(z_BLE), 1), 99.0)), -1)
            return torch.from_numpy(np.stack((logits_BK, logits_BK), 1))

    start_BL = masked(draws)
    start_BL[:, 0] = torch.arange(draws) % V
    ids_BL, _ = sample_replaid(Told(), start_BL, 60, request(draws, K), space=space())
    assert torch.equal(ids_BL[:, 0], start_BL[:, 0])
    law_VV = TOY.q_N.reshape(V, V) / TOY.q_N.reshape(V, V).sum(1, keepdims=True) / V
    law_M = np.zeros(K**L)
    law_M[[index(tuple(x), K) for x in TOY.sequences_NL.tolist()]] = law_VV.reshape(-1)
    assert p_value(ids_BL, law_M, K) > 1e-4


def test_a_score_temperature_needs_steps_enough() -> None:
    for solver in ("ddpm", "ddim", "dpm++", "heun"):
        with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="score temperature 0.01 is too small for 20 steps"):
            sample_replaid(ExactDenoiser(), masked(4), 20, request(4, K), space=space(), solver=solver, score_temperature=0.01)  # type: ignore[arg-type]
    cold_BL, _ = sample_replaid(ExactDenoiser(), masked(500), 60, request(500, K), space=space(), score_temperature=0.2)
    warm_BL, _ = sample_replaid(ExactDenoiser(), masked(500), 60, request(500, K), space=space(), score_temperature=3.0)
    assert len(cold_BL.unique(dim=0)) < len(warm_BL.unique(dim=0))
    for bad in ({"score_temperature": 0.0}, {"solver": "euler"}, {"steps": 0}):
        with pytest.raises(ValueError):
            sample_replaid(ExactDenoiser(), masked(1), **({"steps": 1, "request": request(1, K), "space": space()} | bad))  # type: ignore[arg-type]


def real_world() -> tuple[Any, LatentSpace]:
    generator = torch.Generator().manual_seed(3)
    config = NetworkConfig(kind="dit", vocab_size=11, hidden=16, layers=2, heads=2, kv_heads=2, ffn=32, cond_dim=8, reads="latents", latent=5)
    network, embedding, schedule = build_network(config), UnitEmbedding(12, 5), LearnedSchedule(-3.0, 6.0, 8)
    with torch.no_grad():
        for module in (network, embedding, schedule.interior):
            for name, parameter in module.named_parameters():
                small = 0.06 if "final_modulation" in name or name == "lm_head.bias" else 0.4
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * small)
    return network, LatentSpace.of(embedding, schedule, 11)


START_BL = torch.tensor([[1, 10, 2, 10, 10, 3], [4, 5, 6, 7, 8, 9], [10] * 6, [0, 1, 2, 3, 4, 10]])


@pytest.mark.parametrize("solver", ["ddpm", "dpm++", "heun"])
def test_prompts_batches_and_slices(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    network, latents = real_world()
    told = list[int]()

    def draw(rows: list[int], seed: int = 1) -> Tensor:
        asked = request(torch.tensor(rows), 11, seed=seed, progress=told.append)
        return sample_replaid(network, START_BL[rows], 6, asked, space=latents, solver=solver)[0]

    together = draw([0, 1, 2, 3])
    assert torch.equal(together[START_BL != 10], START_BL[START_BL != 10]) and (together < 10).all()
    assert sum(told) == 10 and min(told) >= 0 and START_BL[2, 0] == 10
    assert torch.equal(torch.cat([draw([i]) for i in range(4)]), together) and torch.equal(draw([3, 0]), together[[3, 0]])
    assert not torch.equal(draw([0, 1, 2, 3], seed=2), together)
    asked = request(4, 11)
    _, evaluations_B = sample_replaid(network, START_BL, 6, asked, space=latents, solver=solver)
    assert evaluations_B.tolist() == [n * (13 if solver == "heun" else 7) for n in (1, 0, 1, 1)]
    monkeypatch.setattr(sampling_draw, "MAX_ELEMENTS", 3 * 11)
    assert torch.equal(draw([0, 1, 2, 3]), together)


def test_latent_space_of_trained_modules() -> None:
    embedding, schedule = UnitEmbedding(12, 5), LearnedSchedule(-3.0, 6.0, 8)
    torch.nn.init.normal_(embedding.weight)
    made = LatentSpace.of(embedding, schedule, 11)
    assert made.table_VE.shape == (11, 5) and made.table_VE.dtype == torch.float64 and not made.table_VE.requires_grad
    torch.testing.assert_close(made.table_VE.norm(dim=-1), torch.ones(11, dtype=torch.float64))
    torch.nn.init.normal_(schedule.interior.slope)
    torch.nn.init.normal_(schedule.interior.height)
    levels = made.levels(5, torch.device("cpu"))
    assert levels[0] == 6 and levels[-1] == -3 and (levels.diff() < 0).all()


@pytest.mark.parametrize("width", [1, 4, 5])
def test_normals(width: int) -> None:
    """Standard normal, another number for every sequence, step, position and component, and the same in any batch."""
    n_BLE = normals(7, torch.arange(500), 3, torch.arange(10), width)
    assert n_BLE.shape == (500, 10, width) and n_BLE.dtype == torch.float64
    values = torch.cat((n_BLE.flatten(), normals(7, torch.arange(500), 4, torch.arange(10), width).flatten()))
    assert len(values.unique()) == len(values) and kstest(values.numpy(), "norm").pvalue > 1e-3
    correlation = np.corrcoef(n_BLE.reshape(500, -1).numpy().T) - np.eye(10 * width)
    assert np.abs(correlation).max() < 0.25
    assert torch.equal(normals(7, torch.tensor([42]), 3, torch.arange(10), width)[0], n_BLE[42])
    assert torch.equal(normals(7, torch.arange(500), 3, torch.tensor([6]), width)[:, 0], n_BLE[:, 6])
    assert values.abs().max() < (2 * 53 * log(2)) ** 0.5
