"""Values and gradients of MDM-Prime's `token_loss` against the plain float64 formula, in slices, on padding and at the extremes.

Shape suffixes: B sequences, L positions, J digits, V ids, P padded vocabulary.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.objectives.config import MDMPrimeConfig, ObjectiveConfig
from pretrain.objectives.mdm_prime import MDMPrime
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests.distributed import run_distributed

B, L, TEXT = 4, 12, 9
WORDS = Vocabulary(tokenizer_size=40, model_size=40, padded_size=48, mask_id=None, eos_id=0)
VOCAB = VocabShard.whole(WORDS)
FORMS: dict[str, dict[str, object]] = {
    "bits": {"digits": 6},
    "bits, joint": {"digits": 6, "loss": "joint"},
    "bits, no carry-over": {"digits": 6, "carry_over": False},
    "bits, joint, no carry-over": {"digits": 6, "carry_over": False, "loss": "joint"},
    "base 3": {"base": 3, "digits": 4, "shuffle_seed": None},
    "base 7": {"base": 7, "digits": 2, "carry_over": False},
    "whole tokens": {"base": 40, "digits": 1},
    "masked together": {"digits": 6, "joint_mask_above": 0.0},
}


def prime(words: Vocabulary = WORDS, **section: object) -> MDMPrime:
    return MDMPrime(words, ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(**section)))  # type: ignore[arg-type]


def batch(method: MDMPrime, words: Vocabulary = WORDS) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and targets of B samples, the last of which is all padding; padding ids are ones no model could predict."""
    samples = []
    for index in range(B):
        text_L = np.arange(L) < (0 if index == B - 1 else TEXT)
        tokens_L = np.where(text_L, np.random.default_rng(index).integers(0, words.model_size, L), 10**6)
        samples.append(method.corrupt(tokens_L, np.where(text_L, 0, -1).astype(np.int32), Noise(5, index, index, B), evaluation=False))
    stacked = {key: torch.from_numpy(np.stack([sample.targets[key] for sample in samples])) for key in samples[0].targets}
    return 3 * torch.randn(B, L, words.padded_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), stacked


def loss_and_gradient(method: MDMPrime, logits_BLP: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    leaf_BLP = logits_BLP.clone().requires_grad_()
    loss = method.token_loss(leaf_BLP, targets, VocabShard.whole(method.vocabulary))
    loss.loss_B.sum().backward()
    assert leaf_BLP.grad is not None
    return loss.loss_B.detach(), loss.nelbo_B, leaf_BLP.grad


def plain_nats(method: MDMPrime, logits_BLP: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """([B, L], [B, L]) marginal and joint: log-softmax over the ids that carry-over allows, then log-sum-exp over those with the true digit."""
    digits_VJ, size = torch.from_numpy(method.code.table_VJ), method.vocabulary.model_size
    equal_BLVJ = digits_VJ[targets["ids"]].unsqueeze(2) == digits_VJ
    masked_BLJ = targets["masked"]
    allowed_BLV = (equal_BLVJ | masked_BLJ.unsqueeze(2)).all(-1) if method.prime.carry_over else torch.ones_like(equal_BLVJ[..., 0])
    logp_BLV = logits_BLP.double()[..., :size].masked_fill(~allowed_BLV, -torch.inf).log_softmax(-1)
    logs_BLVJ = logp_BLV.unsqueeze(-1).expand_as(equal_BLVJ).masked_fill(~equal_BLVJ, -torch.inf)
    marginal_BL = -torch.where(masked_BLJ, logs_BLVJ.logsumexp(2), 0.0).sum(-1)
    true_BL = logp_BLV.gather(-1, targets["ids"].unsqueeze(-1)).squeeze(-1)
    return marginal_BL, -torch.where(masked_BLJ.any(-1), true_BL, 0.0)


def plain(method: MDMPrime, logits_BLP: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, nelbo and gradient by float64 autograd."""
    leaf_BLP = logits_BLP.double().clone().requires_grad_()
    marginal_BL, joint_BL = plain_nats(method, leaf_BLP, targets)
    loss_B = (joint_BL if method.prime.loss == "joint" else marginal_BL).sum(-1) * targets["weight"]
    (gradient_BLP,) = torch.autograd.grad(loss_B.sum(), leaf_BLP)
    return loss_B.detach(), (marginal_BL.sum(-1) * targets["weight"]).detach(), gradient_BLP


@pytest.mark.parametrize("form", FORMS)
def test_against_the_plain_form_in_float64(form: str) -> None:
    method = prime(**FORMS[form])
    logits_BLP, targets = batch(method)
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(method, logits_BLP, targets)
    expected_B, expected_nelbo_B, expected_BLP = plain(method, logits_BLP, targets)
    assert targets["masked"].sum() > 10 and not targets["masked"][:, :TEXT].all()
    torch.testing.assert_close(loss_B, expected_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nelbo_B, expected_nelbo_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient_BLP, expected_BLP, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(nelbo_B, method.token_nelbo(logits_BLP, targets, VOCAB).sum(-1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("form", FORMS)
def test_in_the_precision_of_training(form: str, dtype: torch.dtype, tolerance: float) -> None:
    """The loss is computed in fp32 from the logits as they are; only the returned gradient is rounded to their type."""
    method = prime(**FORMS[form])
    logits_BLP, targets = batch(method)
    loss_B, _, gradient_BLP = loss_and_gradient(method, logits_BLP.to(dtype), targets)
    expected_B, _, expected_BLP = plain(method, logits_BLP.to(dtype), targets)
    assert loss_B.dtype == torch.float32 and gradient_BLP.dtype == dtype
    torch.testing.assert_close(loss_B.double(), expected_B, rtol=1e-5, atol=1e-6)
    assert (gradient_BLP.double() - expected_BLP).norm() < tolerance * expected_BLP.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 5, 11])
def test_slices_add_up(form: str, size: int) -> None:
    """Slices of a [L, B, P] buffer, as the engine cuts them."""
    method = prime(**FORMS[form])
    logits_BLP, targets = batch(method)
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(method, logits_BLP, targets)
    logits_LBP = logits_BLP.transpose(0, 1).contiguous()
    parts = []
    for start in range(0, L, size):
        part = {key: value[:, start : start + size] if value.ndim > 1 else value for key, value in targets.items()}
        parts.append(loss_and_gradient(method, logits_LBP[start : start + size].transpose(0, 1), part))
    torch.testing.assert_close(sum(p[0] for p in parts), loss_B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(sum(p[1] for p in parts), nelbo_B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat([p[2] for p in parts], dim=1), gradient_BLP, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_count_contributes_exactly_nothing(form: str) -> None:
    """Fully visible tokens, padding, an empty sample, padded columns, and the ids that carry-over excludes; even where logits are huge."""
    method = prime(**FORMS[form])
    logits_BLP, targets = batch(method)
    scored_BL = targets["masked"].any(-1)
    scored_BL[0, :3] = False  # fully visible tokens among the others
    targets["masked"] &= scored_BL.unsqueeze(-1)
    assert not scored_BL[:, TEXT:].any() and scored_BL.sum() > 0
    digits_BLJ = torch.where(targets["masked"], method.code.base, method.code.encode(targets["ids"]))
    excluded_BLV = ~method.code.possible(digits_BLJ) if method.prime.carry_over else torch.zeros(B, L, 40, dtype=torch.bool)
    assert not method.prime.carry_over or excluded_BLV[scored_BL].any() == (form not in ("whole tokens", "masked together"))

    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(method, logits_BLP, targets)
    assert (gradient_BLP[~scored_BL] == 0).all() and (gradient_BLP[..., 40:] == 0).all() and (gradient_BLP[..., :40][excluded_BLV] == 0).all()
    assert loss_B[-1] == 0 and nelbo_B[-1] == 0 and torch.isfinite(loss_B).all()
    shouting_BLP = logits_BLP.clone()
    shouting_BLP[..., 40:] = 1e4
    shouting_BLP[~scored_BL] = 1e4
    shouting_BLP[..., :40][excluded_BLV] = 1e4
    for a, b in zip((loss_B, nelbo_B, gradient_BLP), loss_and_gradient(method, shouting_BLP, targets), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [15, 16, 17])
@pytest.mark.parametrize("loss", ["marginal", "joint"])
def test_marginals_are_right_in_both_tails_in_fp32(bits: int, loss: str) -> None:
    """Logits from flat to 100 nats apart, the true id confidently right, wrong, or one bit off the favourite, against float64."""
    words = Vocabulary(tokenizer_size=2**bits - 7, model_size=2**bits - 7, padded_size=2**bits, mask_id=None, eos_id=0)
    method = prime(words, digits=bits, loss=loss)
    generator = torch.Generator().manual_seed(bits)
    positions = 8
    ids_BL = torch.randint(words.model_size, (1, positions), generator=generator)
    logits_BLP = torch.randn(1, positions, words.padded_size, generator=generator) * torch.tensor([0.0, 1, 3, 6, 12, 3, 3, 3]).unsqueeze(-1)
    favourite_BL = ids_BL.clone()
    favourite_BL[0, 6] = (ids_BL[0, 6] + 1) % words.model_size
    nearest = method.code.encode(ids_BL[0, 7])
    favourite_BL[0, 7] = next(i for b in range(bits) if (i := int(method.code.decode(nearest ^ (torch.arange(bits) == b).long()))) >= 0)
    logits_BLP.scatter_add_(-1, favourite_BL.unsqueeze(-1), torch.tensor([0.0, 0, 0, 0, 0, 60, 60, 60]).view(1, -1, 1))
    masked_BLJ = torch.rand(1, positions, bits, generator=generator) < 0.7
    masked_BLJ[:, 5:] = True
    targets = {"ids": ids_BL, "masked": masked_BLJ, "weight": torch.ones(1), "joint": torch.tensor([False])}
    index = int(loss == "joint")
    nats_BL = method._nats(logits_BLP, targets, VocabShard.whole(words))[index]
    _, _, gradient_BLP = loss_and_gradient(method, logits_BLP, targets)
    expected_BL = plain_nats(method, logits_BLP, targets)[index]
    assert expected_BL[0, 5] < 1e-15 and expected_BL[0, 6] > 40
    torch.testing.assert_close(nats_BL.double(), expected_BL, rtol=2e-6, atol=2e-6)
    assert nats_BL[0, 5].item() == pytest.approx(expected_BL[0, 5].item(), rel=1e-4)  # a loss of 1e-17 keeps its digits
    torch.testing.assert_close(gradient_BLP.double(), plain(method, logits_BLP, targets)[2], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("carry_over", [True, False])
@pytest.mark.parametrize("loss", ["marginal", "joint"])
def test_extreme_bf16_logits_of_a_large_vocabulary_stay_finite(loss: str, carry_over: bool) -> None:
    """131072 ids of 17 bits at t = 1e-3, the first half of the positions confidently right, the second confidently wrong."""
    words = Vocabulary(tokenizer_size=2**17, model_size=2**17, padded_size=2**17, mask_id=None, eos_id=0)
    method = prime(words, digits=17, loss=loss, carry_over=carry_over)
    gaps = [50.0, 90, 120, 200, 1e4, 1e20]
    positions = 2 * len(gaps)
    ids_BL = torch.arange(positions).unsqueeze(0) * 9001
    logits_BLP = torch.randn(1, positions, 2**17, generator=torch.Generator().manual_seed(0)).bfloat16()
    favourite_BL = torch.where(torch.arange(positions) < len(gaps), ids_BL, ids_BL + 1)
    logits_BLP.scatter_(-1, favourite_BL.unsqueeze(-1), torch.tensor(gaps * 2).bfloat16().view(1, -1, 1))
    masked_BLJ = torch.rand(1, positions, 17, generator=torch.Generator().manual_seed(1)) < 0.5
    targets = {"ids": ids_BL, "masked": masked_BLJ, "weight": torch.tensor([1e3]), "joint": torch.tensor([False])}
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(method, logits_BLP, targets)
    assert torch.isfinite(torch.cat((loss_B, nelbo_B))).all() and torch.isfinite(gradient_BLP).all()
    for first in (0, len(gaps)):  # up to a gap of 120 nats the numbers are right too
        part = {key: value[:, first : first + 3] if value.ndim > 1 else value for key, value in targets.items()}
        got, expected = loss_and_gradient(method, logits_BLP[:, first : first + 3], part), plain(method, logits_BLP[:, first : first + 3], part)
        torch.testing.assert_close(got[0].double(), expected[0], rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(got[2].double(), expected[2], rtol=4e-3, atol=1e-3)


def test_a_network_that_has_diverged_is_not_hidden() -> None:
    method = prime(digits=6)
    logits_BLP, targets = batch(method)
    logits_BLP[0, int(targets["masked"][0].any(-1).nonzero()[0]), 0] = torch.nan
    loss_B, nelbo_B, _ = loss_and_gradient(method, logits_BLP.float(), targets)
    assert loss_B[0].isnan() and nelbo_B[0].isnan() and torch.isfinite(loss_B[1:]).all()


@pytest.mark.parametrize("carry_over", [True, False])
def test_loss_of_a_zero_head(carry_over: bool) -> None:
    """32 ids of 5 bits and zero logits: log 2 per masked bit, visible ones or not."""
    words = Vocabulary(tokenizer_size=32, model_size=32, padded_size=128, mask_id=None, eos_id=0)
    method = prime(words, digits=5, carry_over=carry_over)
    sample = method.corrupt(np.arange(64) % 32, np.zeros(64, dtype=np.int32), Noise(1, 5, 3, 8), evaluation=False)
    targets = {key: torch.from_numpy(value[None]) for key, value in sample.targets.items()}
    nelbo_B = method.token_loss(torch.zeros(1, 64, 128), targets, VocabShard.whole(words)).nelbo_B
    assert nelbo_B.item() * sample.t / sample.targets["masked"].sum() == pytest.approx(np.log(2), rel=1e-6)


SMALL = Vocabulary(tokenizer_size=20, model_size=20, padded_size=48, mask_id=None, eos_id=0)
"""Of two ranks the second holds padding only."""
SMALL_FORMS: dict[str, dict[str, object]] = {"bits": {"digits": 5}, "base 3, joint": {"base": 3, "digits": 3, "loss": "joint"}}
LAYOUTS = [(WORDS, FORMS), (SMALL, SMALL_FORMS)]


def on_two_ranks() -> list[tuple[Tensor, Tensor, Tensor]]:
    """(loss, nelbo, gradient of this rank's columns) of every form and layout."""
    results, columns = [], slice(24 * dist.get_rank(), 24 * dist.get_rank() + 24)
    for words, forms in LAYOUTS:
        vocab = VocabShard(words, start=columns.start, end=columns.stop, group=dist.group.WORLD)
        for section in forms.values():
            method = prime(words, **section)
            logits_BLP, targets = batch(method, words)
            leaf_BLv = logits_BLP[..., columns].clone().requires_grad_()
            loss = method.token_loss(leaf_BLv, targets, vocab)
            loss.loss_B.sum().backward()
            assert leaf_BLv.grad is not None
            results.append((loss.loss_B.detach(), loss.nelbo_B, leaf_BLv.grad))
    return results


def test_two_tensor_parallel_ranks_equal_one() -> None:
    ranks = run_distributed(on_two_ranks, 2)
    methods = [prime(words, **section) for words, forms in LAYOUTS for section in forms.values()]
    for method, first, second in zip(methods, *ranks, strict=True):
        loss_B, nelbo_B, gradient_BLP = loss_and_gradient(method, *batch(method, method.vocabulary))
        for rank in (first, second):
            torch.testing.assert_close(rank[0], loss_B, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(rank[1], nelbo_B, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat((first[2], second[2]), -1), gradient_BLP, rtol=1e-11, atol=1e-12)
