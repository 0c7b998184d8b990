"""With a prompt, every objective bounds -log p(rest | prompt): by enumeration over toys, and what stands at a prompt changes nothing.

For each value of the first token the rest is a toy of its own. The product gets the whole sequence with that token as prompt, and logits
at the prompt that would ruin any sum that they entered.

Shape suffixes: N sequences of the rest, B samples, L positions (prompt first), J digits, E width of an embedding, P padded vocabulary.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.build import OBJECTIVES
from pretrain.objectives.base import Corrupted, Objective
from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from pretrain.objectives.mdm_prime import MDMPrime
from pretrain.objectives.replaid import RePlaid
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests import reference_duo, reference_mdm_prime
from tests import reference_math as reference
from tests.reference_math import Toy

TOYS = [(2, 3, 1), (3, 3, 4)]
RUIN = 1e4
METHODS = {
    "ar": ObjectiveConfig(name="ar"),
    "mdlm": ObjectiveConfig(name="mdlm"),
    "duo": ObjectiveConfig(name="duo"),
    "duo curriculum": ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk", top_k=3)),
    "esolm": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "esolm natural": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5, clean_order="natural")),
    "replaid": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=4, schedule_hidden=8)),
    "replaid table": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=4, schedule_hidden=8, prompt_embedding=True)),
    "mdm_prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=5)),
}


def rests(toy: Toy) -> Iterator[tuple[int, float, Toy]]:
    """(first token, its probability, the rest given it)."""
    length = toy.length - 1
    for token in range(toy.vocabulary):
        own_N = toy.sequences_NL[:, 0] == token
        yield token, toy.q_N[own_N].sum(), Toy(toy.vocabulary, length, toy.sequences_NL[own_N][:, 1:], toy.q_N[own_N] / toy.q_N[own_N].sum())


def build(config: ObjectiveConfig, size: int) -> Objective:
    mask = config.name not in ("ar", "mdm_prime")
    words = Vocabulary(tokenizer_size=size, model_size=size + mask, padded_size=size + mask + 3, mask_id=size if mask else None, eos_id=0)
    return OBJECTIVES[config.name](words, config)


def stacked(samples: list[Corrupted], what: str = "targets") -> dict[str, Tensor]:
    arrays = [getattr(sample, what) for sample in samples]
    return {key: torch.from_numpy(np.stack([one[key] for one in arrays])) for key in arrays[0]}


def prefixed(rest_BLV: np.ndarray, objective: Objective) -> Tensor:
    """[B, 1 + L, P]: logits of the rest after one position of ruin; padding and forbidden columns as well."""
    wide = np.full((rest_BLV.shape[0], rest_BLV.shape[1] + 1, objective.vocabulary.padded_size), RUIN)
    wide[:, 1:, : rest_BLV.shape[-1]] = rest_BLV
    return torch.from_numpy(wide)


def prompt(length: int) -> np.ndarray:
    return np.arange(length) == 0


def texts(token: int, rest: Toy) -> list[np.ndarray]:
    return [np.concatenate(([token], sequence_L)) for sequence_L in rest.sequences_NL]


def zeros(length: int) -> np.ndarray:
    return np.zeros(length, dtype=np.int32)


# ---- enumeration --------------------------------------------------------------------------------------------------------------------


def ar_nats(token: int, rest: Toy) -> np.ndarray:
    """The prompt is the first of the next tokens: one more stands before it."""
    ar = build(METHODS["ar"], rest.vocabulary)
    rows = []
    for text_L in texts(token, rest):
        window = np.concatenate(([0], text_L))
        sample = ar.corrupt(window, zeros(len(window)), Noise(0, 0, 0, 1), evaluation=True, prompt=np.arange(len(window)) < 2)
        assert sample.count == rest.length
        logp_LV = np.array([reference.bayes_next_token(rest, tuple(text_L[1 : 1 + i])) for i in range(rest.length)])
        rows.append(ar.token_nelbo(prefixed(logp_LV[None], ar), stacked([sample]), VocabShard.whole(ar.vocabulary)).sum().item())
    return np.array(rows)


def mdlm_nats(token: int, rest: Toy) -> np.ndarray:
    """The masks are those of all positions; the product leaves the prompt's out."""
    mdlm, denoiser, length = build(METHODS["mdlm"], rest.vocabulary), reference.bayes_denoiser(rest), rest.length + 1
    masks_ML, total_N = reference.all_masks(length), np.zeros(len(rest.q_N))
    for t, share in zip(*reference.quadrature(0.0, 1.0), strict=True):
        chance_M = reference.mask_probability(masks_ML, t)
        for mask_L, chance in zip(masks_ML, chance_M, strict=True):
            samples = [mdlm.noised(x_L, zeros(length), t=float(t), masked_L=mask_L, prompt=prompt(length)) for x_L in texts(token, rest)]  # type: ignore[attr-defined]
            assert all(s.inputs["ids"][0] == token and s.count == rest.length for s in samples)
            logits = prefixed(np.stack([denoiser(tuple(s.inputs["ids"][1:].tolist())) for s in samples]), mdlm)
            total_N += share * chance * mdlm.token_nelbo(logits, stacked(samples), VocabShard.whole(mdlm.vocabulary)).sum(-1).numpy()
    return total_N


def duo_nats(token: int, rest: Toy) -> np.ndarray:
    duo, states_ML, length = build(METHODS["duo"], rest.vocabulary), reference_duo.states(rest), rest.length + 1
    total_N = np.zeros(len(rest.q_N))
    for t, share in zip(*reference_duo.smooth_quadrature(0.0, 1.0), strict=True):
        level = duo.level(float(t), evaluation=True)  # type: ignore[attr-defined]
        logp_MLV = reference_duo.leave_one_out(rest, states_ML, level.alpha)[..., : rest.vocabulary]
        chance_NM = reference_duo.state_probability(rest, states_ML, level.alpha)
        for n, x_L in enumerate(texts(token, rest)):
            noisy_ML = [np.concatenate(([(token + 1) % rest.vocabulary], z_L)) for z_L in states_ML]  # the prompt's noise is left out
            samples = [duo.noised(x_L, zeros(length), t=float(t), level=level, noisy_L=z_L, prompt=prompt(length)) for z_L in noisy_ML]  # type: ignore[attr-defined]
            assert all(s.inputs["ids"][0] == token and s.count == rest.length for s in samples)
            nats_ML = duo.token_nelbo(prefixed(logp_MLV, duo), stacked(samples), VocabShard.whole(duo.vocabulary)).numpy()
            total_N[n] += share * (nats_ML.sum(1) @ chance_NM[n])
    return total_N


def prime_nats(token: int, rest: Toy) -> np.ndarray:
    digits = (rest.vocabulary - 1).bit_length()
    words = Vocabulary(tokenizer_size=rest.vocabulary, model_size=rest.vocabulary, padded_size=rest.vocabulary + 3, mask_id=None, eos_id=0)
    prime = MDMPrime(words, ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=digits)))
    states = reference_mdm_prime.states(rest, prime.code.table_VJ)
    with np.errstate(divide="ignore"):
        logp_MNLV = np.log(reference_mdm_prime.bayes(states))
    total_N, length = np.zeros(len(rest.q_N)), rest.length + 1
    flat_MK = states.masks_MLJ.reshape(len(states.masks_MLJ), -1)
    for t, share in zip(*reference.quadrature(0.0, 1.0), strict=True):
        chance_M = reference.mask_probability(flat_MK, t)
        for mask_LJ, logp_NLV, chance in zip(states.masks_MLJ, logp_MNLV, chance_M, strict=True):
            whole_LJ = np.concatenate((np.ones((1, digits), bool), mask_LJ))
            samples = [prime.noised(x_L, zeros(length), t=float(t), masked_LJ=whole_LJ, prompt=prompt(length)) for x_L in texts(token, rest)]
            assert all((s.inputs["digits"][0] == prime.code.table_VJ[token]).all() and s.count == rest.length for s in samples)
            nats_NL = prime.token_nelbo(prefixed(logp_NLV, prime), stacked(samples), VocabShard.whole(words))
            total_N += share * chance * nats_NL.sum(-1).numpy()
    return total_N


@pytest.mark.parametrize(("size", "length", "seed"), TOYS)
@pytest.mark.parametrize(("nats", "tolerance"), [(ar_nats, 1e-12), (mdlm_nats, 1e-10), (duo_nats, 1e-7), (prime_nats, 1e-10)])
def test_the_bound_is_the_conditional_entropy_with_the_exact_denoiser(nats, tolerance, size, length, seed):
    toy = reference.random_toy(size, length, seed)
    found = sum(share * rest.q_N @ nats(token, rest) for token, share, rest in rests(toy))
    first_V = np.array([share for _, share, _ in rests(toy)])
    assert found == pytest.approx(toy.entropy + first_V @ np.log(first_V), abs=tolerance)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("evaluation", [False, True])
def test_replaids_terms_with_a_prompt_are_those_of_the_rest_alone(evaluation, part):
    """The same noise and logits: so the bound of the rest, which other tests hold to its exact value, is that of the rest given the prompt."""
    generator, found = np.random.default_rng(0), []
    rest, noise = generator.integers(0, 17, (2, 5)), Noise(3, 4, 1, 2, part=part, share=0.5)
    normals_BLE, logits_BLP = generator.normal(size=(2, 5, 4)).astype(np.float32), generator.normal(size=(2, 5, 21))
    for before in (0, 3):
        objective = build(METHODS["replaid"], 17)
        assert isinstance(objective, RePlaid)
        given = np.arange(5 + before) < before
        drawn = [
            objective.corrupt(np.concatenate((np.full(before, 2), x)), zeros(5 + before), noise, evaluation=evaluation, prompt=given) for x in rest
        ]
        assert all(sample.count == 5 for sample in drawn)
        inputs, targets = stacked(drawn, "inputs"), stacked(drawn)
        for tensors in (inputs, targets):
            tensors["normals"] = torch.from_numpy(np.concatenate((np.full((2, before, 4), np.nan, np.float32), normals_BLE), 1))
        inputs, targets = objective.prepare(inputs, targets, evaluation=evaluation)
        logits = torch.from_numpy(np.concatenate((np.full((2, before, 21), RUIN), logits_BLP), 1))
        found.append(objective.token_nelbo(logits, targets, VocabShard.whole(objective.vocabulary)).detach()[:, before:])
    assert torch.equal(*found)


# ---- what a prompt is to every objective ----------------------------------------------------------------------------------------------


LENGTH, PROMPT = 12, 5


def samples_of(objective: Objective, tokens_BL: np.ndarray, *, part: int = 0, evaluation: bool = False) -> list[Corrupted]:
    """A padded batch with a prompt of five tokens in each."""
    length = tokens_BL.shape[1]
    documents = np.where(np.arange(length) < length - 2, 0, -1).astype(np.int32)
    given = np.arange(length) < PROMPT
    return [
        objective.corrupt(x, documents, Noise(1, n, n, len(tokens_BL), part=part, share=0.5), evaluation=evaluation, prompt=given)
        for n, x in enumerate(tokens_BL)
    ]


def tokens_of(objective: Objective, count: int = 4) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 20, (count, LENGTH + objective.lookahead))


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_stands_clean_is_not_scored_and_not_counted(method, part):
    objective = build(METHODS[method], 20)
    tokens_BL = tokens_of(objective)
    text = LENGTH + objective.lookahead - 2
    for tokens_L, sample in zip(tokens_BL, samples_of(objective, tokens_BL, part=part), strict=True):
        assert sample.count == text - PROMPT
        if METHODS[method].name == "ar":
            assert sample.targets["scored"].tolist() == [False] * (PROMPT - 1) + [True] * (text - PROMPT) + [False] * (LENGTH + 1 - text)
        elif METHODS[method].name == "esolm":
            order_L = sample.inputs["positions"][-LENGTH:]
            assert order_L[:PROMPT].tolist() == list(range(PROMPT))  # first, from left to right
            assert not sample.targets["masked"][:PROMPT].any() and (sample.inputs["ids"][:PROMPT] == tokens_L[:PROMPT]).all()
            clean = order_L[PROMPT:][~sample.targets["masked"][PROMPT:]]
            assert "natural" not in method or (np.diff(clean[clean < text]) > 0).all()
        elif METHODS[method].name == "mdm_prime":
            assert isinstance(objective, MDMPrime) and not sample.targets["masked"][:PROMPT].any()
            assert (sample.inputs["digits"][:PROMPT] == objective.code.table_VJ[tokens_L[:PROMPT]]).all()
        elif METHODS[method].name == "replaid":
            assert not sample.inputs["normals"][:PROMPT].any() and sample.targets["text"].tolist() == [False] * 5 + [True] * 5 + [False] * 2
        else:
            ids = sample.inputs["ids"][:PROMPT]
            if ids.ndim == 2:  # softened: one id of weight 1
                assert (sample.inputs["weights"][:PROMPT] == [1.0, 0.0, 0.0]).all()
                ids = ids[:, 0]
            assert (ids == tokens_L[:PROMPT]).all()


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_no_gradient_comes_from_a_prompt_and_its_tokens_are_no_target(method, evaluation, part):
    """Logits at the prompt get a gradient of exactly 0, and other tokens there leave every loss as it is, bit for bit."""
    objective = build(METHODS[method], 20)
    vocab = VocabShard.whole(objective.vocabulary)
    tokens_BL, losses = tokens_of(objective), []
    for shift in (0, 1):
        changed = tokens_BL.copy()
        changed[:, : PROMPT - objective.lookahead] = (changed[:, : PROMPT - objective.lookahead] + shift) % 20
        drawn = samples_of(objective, changed, part=part, evaluation=evaluation)
        _, targets = objective.prepare(stacked(drawn, "inputs"), stacked(drawn), evaluation=evaluation)
        scored = next(iter(value.shape[1] for value in targets.values() if value.dim() > 1))
        positions = LENGTH - scored  # what Eso-LM leaves out of the noisy stream
        logits = torch.from_numpy(np.random.default_rng(2).normal(size=(4, scored, objective.vocabulary.padded_size))).requires_grad_()
        loss = objective.token_loss(logits, targets, vocab).loss_B
        loss.sum().backward()
        assert logits.grad is not None and loss.isfinite().all()
        scored_from = max(PROMPT - objective.lookahead - positions, 0)
        assert torch.equal(logits.grad[:, :scored_from], torch.zeros_like(logits.grad[:, :scored_from]))
        assert logits.grad[:, scored_from:].abs().sum() > 0
        losses.append(loss.detach())
    assert torch.equal(*losses)


@pytest.mark.parametrize("method", ["replaid", "replaid table"])
@pytest.mark.parametrize("estimated", [False, True])
def test_replaid_reads_a_prompt_without_noise(method, estimated):
    """Its latents are the clean embeddings, its estimate is itself once there is one, and no gradient reaches its normals."""
    objective = build(METHODS[method], 20)
    assert isinstance(objective, RePlaid)
    drawn = samples_of(objective, tokens_of(objective, 8))
    inputs, _ = objective.prepare(stacked(drawn, "inputs"), stacked(drawn), evaluation=False)
    inputs["normals"] = inputs["normals"].clone().requires_grad_()
    if estimated:
        inputs["estimate"] = torch.where(inputs["self_conditioned"].view(-1, 1, 1), torch.full((8, LENGTH, 4), 0.25), torch.zeros(1))
    read = objective.network_input(inputs, VocabShard.whole(objective.vocabulary))
    assert read.latents_BLE is not None and read.estimate_BLE is not None
    read.latents_BLE.square().sum().backward()
    normals = inputs["normals"].grad
    assert normals is not None and not normals[:, :PROMPT].any() and normals[:, PROMPT:-2].abs().min() > 0
    clean_BLE = objective.embedding(0, 20)[inputs["ids"]]
    gamma_B = read.conditioning_B.detach()
    scale_B = (1 / ((1 / (1 + gamma_B.exp())) / 4 + 1 / (1 + (-gamma_B).exp()))).sqrt()
    torch.testing.assert_close(read.latents_BLE[:, :PROMPT].detach(), (scale_B.view(-1, 1, 1) * clean_BLE[:, :PROMPT]).detach())
    conditioned = inputs["self_conditioned"]
    assert conditioned.any() and not conditioned.all()
    want = 2 * clean_BLE[:, :PROMPT].detach() if estimated else torch.zeros(8, PROMPT, 4)  # 2 = sqrt of the width
    torch.testing.assert_close(read.estimate_BLE[conditioned][:, :PROMPT].detach(), want[conditioned])
    assert not read.estimate_BLE[~conditioned].any()
    if method == "replaid":
        assert read.ids_BL is None and read.given_BL is None
    else:
        assert read.ids_BL is inputs["ids"] and read.given_BL is not None
        assert read.given_BL[:, :PROMPT].all() and not read.given_BL[:, PROMPT:].any()
