"""Every likelihood against the entropy of a toy distribution, through the product's own `token_nelbo`.

Shape suffixes: N sequences of the toy, M mask patterns, L positions, P padded vocabulary.
"""

import numpy as np
import pytest
import torch

from pretrain.objectives.ar import AR
from pretrain.objectives.base import Corrupted
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.mdlm import MDLM
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests import reference_math as reference

TOYS = [(2, 2, 0), (2, 3, 1), (3, 2, 2), (4, 2, 3), (3, 3, 4)]
NO_NOISE = Noise(seed=0, index=0, position=0, batch=1)


def vocabulary(toy: reference.Toy, *, mask: bool) -> Vocabulary:
    model = toy.vocabulary + mask
    return Vocabulary(
        tokenizer_size=toy.vocabulary, model_size=model, padded_size=model + 3, mask_id=toy.mask if mask else None, eos_id=0
    )


def padded_logits(logp_LV: np.ndarray, padded: int) -> torch.Tensor:
    """[1, L, P]: what a network could say. The mask and padding columns get logits that would win if they were let."""
    logits_LP = np.full((len(logp_LV), padded), 7.0)
    logits_LP[:, : logp_LV.shape[1]] = logp_LV
    return torch.from_numpy(logits_LP)[None]


def targets(*samples: Corrupted) -> dict[str, torch.Tensor]:
    """Stacked as the loader stacks them."""
    return {key: torch.from_numpy(np.stack([sample.targets[key] for sample in samples])) for key in samples[0].targets}


def product_bound(toy: reference.Toy, denoiser: reference.Denoiser, *, eps: float, t_min: float) -> np.ndarray:
    """[N]: the product's nelbo summed over every mask and integrated over t; only the chance of each state comes from the reference."""
    mdlm = MDLM(vocabulary(toy, mask=True), ObjectiveConfig(name="mdlm"))
    vocab = VocabShard.whole(mdlm.vocabulary)
    masks_ML = reference.all_masks(toy.length)
    documents_L = np.zeros(toy.length, dtype=np.int32)
    noisy = [reference.apply_mask(toy, tokens_L, mask_L) for tokens_L in toy.sequences_NL for mask_L in masks_ML]
    logits_BLP = torch.cat([padded_logits(denoiser(z), vocab.end) for z in noisy])
    total_N = np.zeros(len(toy.sequences_NL))
    for t, share in zip(*reference.quadrature(t_min, 1.0), strict=True):
        samples = [mdlm.noised(tokens_L, documents_L, t=float(t), masked_L=mask_L) for tokens_L in toy.sequences_NL for mask_L in masks_ML]
        assert [tuple(sample.inputs["ids"]) for sample in samples] == noisy
        nats_NM = mdlm.token_nelbo(logits_BLP, targets(*samples), vocab).sum(-1).reshape(len(total_N), -1).numpy()
        total_N += share * (nats_NM @ reference.mask_probability(masks_ML, (1 - eps) * t))
    return total_N


@pytest.mark.parametrize(("size", "length", "seed"), TOYS)
def test_mdlm_bound_is_the_entropy_with_the_exact_denoiser(size: int, length: int, seed: int) -> None:
    toy = reference.random_toy(size, length, seed)
    bound_N = product_bound(toy, reference.bayes_denoiser(toy), eps=0.0, t_min=0.0)
    assert (toy.q_N @ bound_N) == pytest.approx(toy.entropy, abs=1e-10)
    np.testing.assert_allclose(bound_N, reference.masked_bound(toy, reference.bayes_denoiser(toy), eps=0.0, t_min=0.0), atol=1e-10)


@pytest.mark.parametrize(("size", "length", "seed"), TOYS)
def test_the_authors_constants_fall_below_the_entropy(size: int, length: int, seed: int) -> None:
    """Why e = 1e-3 with t >= 1e-3 is labelled an estimate."""
    toy = reference.random_toy(size, length, seed)
    value = toy.q_N @ product_bound(toy, reference.bayes_denoiser(toy), eps=1e-3, t_min=1e-3)
    assert toy.entropy - 0.01 < value < toy.entropy - 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_a_bound_defines_a_distribution_and_the_unweighted_form_does_not(seed: int) -> None:
    toy = reference.random_toy(3, 2, seed)
    denoiser = reference.random_denoiser(toy, seed)
    assert np.exp(-product_bound(toy, denoiser, eps=0.0, t_min=0.0)).sum() <= 1 + 1e-9
    assert np.exp(-reference.masked_bound(toy, denoiser, eps=0.0, t_min=0.0, weighted=False)).sum() > 1


def test_the_labels_follow_the_constants() -> None:
    words = vocabulary(reference.random_toy(2, 2, 0), mask=True)
    bound, authors = (MDLM(words, ObjectiveConfig(name="mdlm", evaluation=e)) for e in ("bound", "authors"))
    assert (bound.label(evaluation=True), bound.label(evaluation=False), authors.label(evaluation=True)) == ("bound", "estimate", "estimate")
    assert AR(words, ObjectiveConfig(name="ar")).label(evaluation=True) == "exact"


@pytest.mark.parametrize(("size", "length", "seed"), TOYS)
@pytest.mark.parametrize("mask", [False, True])
def test_ar_is_exact(size: int, length: int, seed: int, mask: bool) -> None:
    """The first token of the window stands for what came before: the L predicted tokens carry the whole entropy."""
    toy = reference.random_toy(size, length, seed)
    ar = AR(vocabulary(toy, mask=mask), ObjectiveConfig(name="ar"))
    vocab = VocabShard.whole(ar.vocabulary)
    nats_N = []
    for sequence_L in toy.sequences_NL:
        tokens = np.concatenate(([0], sequence_L))
        sample = ar.corrupt(tokens, np.zeros(length + 1, dtype=np.int32), NO_NOISE, evaluation=True)
        logp_LV = np.array([reference.bayes_next_token(toy, tuple(sequence_L[:i])) for i in range(length)])
        assert (sample.count, list(sample.inputs["ids"])) == (length, list(tokens[:-1]))
        nats_N.append(ar.token_nelbo(padded_logits(logp_LV, vocab.end), targets(sample), vocab).sum().item())
    assert (toy.q_N @ np.array(nats_N)) == pytest.approx(toy.entropy, abs=1e-12)
    np.testing.assert_allclose(nats_N, -np.log(toy.q_N), atol=1e-12)


@pytest.mark.parametrize(("name", "mask", "classes"), [("ar", False, 50), ("ar", True, 49), ("mdlm", True, 49)])
def test_loss_of_a_zero_head(name: str, mask: bool, classes: int) -> None:
    """Zero logits: log of the ids that can win. For MDLM that is the cross-entropy of a masked position."""
    words = Vocabulary(tokenizer_size=50 - mask, model_size=50, padded_size=128, mask_id=49 if mask else None, eos_id=0)
    objective = AR(words, ObjectiveConfig(name="ar")) if name == "ar" else MDLM(words, ObjectiveConfig(name="mdlm"))
    tokens = np.random.default_rng(0).integers(0, 49, 64 + objective.lookahead)
    sample = objective.corrupt(tokens, np.zeros(len(tokens), dtype=np.int32), Noise(1, 5, 3, 8), evaluation=False)
    loss_B = objective.token_loss(torch.zeros(1, 64, 128), targets(sample), VocabShard.whole(words)).loss_B
    scored = sample.targets["masked"].sum() if name == "mdlm" else 64
    assert loss_B.item() / scored == pytest.approx(np.log(classes), rel=1e-6)
