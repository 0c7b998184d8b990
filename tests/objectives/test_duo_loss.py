"""Duo's `token_loss`: values and gradients against the plain float64 formula, at the ends of its range, in slices and over two ranks.

Shape suffixes: B sequences, L positions, P padded vocabulary, K all ids, v columns of one rank.
"""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.duo import Duo
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests.distributed import run_distributed

WORDS = Vocabulary(tokenizer_size=40, model_size=41, padded_size=48, mask_id=40, eos_id=0)
VOCAB = VocabShard.whole(WORDS)
DUO = Duo(WORDS, ObjectiveConfig(name="duo"))
B, L, TEXT = 4, 12, 9


def batch() -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and targets of B samples, the last of which is all padding; padding holds ids that no model predicts or even has."""
    samples = []
    for index in range(B):
        text_L = np.arange(L) < (0 if index == B - 1 else TEXT)
        tokens_L = np.where(text_L, np.random.default_rng(index).integers(0, 40, L), [40, 999] * (L // 2))
        samples.append(DUO.corrupt(tokens_L, np.where(text_L, 0, -1).astype(np.int32), Noise(5, index, index, B), evaluation=False))
    stacked = {key: torch.from_numpy(np.stack([sample.targets[key] for sample in samples])) for key in samples[0].targets}
    stacked["noisy"][0, 1] = 40  # the mask, as noise
    return 3 * torch.randn(B, L, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), stacked


def loss_and_gradient(method: Duo, logits_BLP: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    leaf_BLP = logits_BLP.clone().requires_grad_()
    loss = method.token_loss(leaf_BLP, targets, vocab)
    loss.loss_B.sum().backward()
    assert leaf_BLP.grad is not None
    return loss.loss_B.detach(), loss.nelbo_B, leaf_BLP.grad


def plain(logits_BLP: Tensor, targets: dict[str, Tensor], words: Vocabulary) -> tuple[Tensor, Tensor]:
    """[B, L] nats and the gradient of their sum: float64 autograd of the formula as the authors' code has it."""
    leaf_BLP, classes = logits_BLP.double().clone().requires_grad_(), words.model_size
    keep_K = torch.arange(classes) != words.mask_id
    p_BLK = leaf_BLP[..., :classes].masked_fill(~keep_K, -torch.inf).softmax(-1)
    i_BL, m_BL = (targets[key].clamp(max=classes - 1).unsqueeze(-1) for key in ("noisy", "ids"))
    alpha, noise, slope = (targets[key].view(-1, 1) for key in ("alpha", "one_minus_alpha", "alpha_derivative"))
    xbar_BLK = classes * alpha.unsqueeze(-1) * p_BLK + noise.unsqueeze(-1)
    xbar_i, xbar_m = xbar_BLK.gather(-1, i_BL).squeeze(-1), xbar_BLK.gather(-1, m_BL).squeeze(-1)
    same, kappa = (i_BL == m_BL).squeeze(-1).double(), noise / (classes * alpha + noise)
    bracket = classes / (noise + classes * alpha * same) - classes / xbar_i
    bracket = bracket - (kappa * same + 1 - same) * (classes * xbar_i.log() - xbar_BLK.log().sum(-1))
    bracket = bracket - classes * alpha / noise * (xbar_i / xbar_m).log() * (1 - same)
    bracket = bracket - ((classes - 1) * kappa * same - (1 - same) / kappa) * kappa.log()
    nats_BL = slope / (classes * alpha) * bracket * targets["scored"]
    nats_BL.sum().backward()
    assert leaf_BLP.grad is not None
    return nats_BL.detach(), leaf_BLP.grad


def test_against_the_papers_form_in_float64() -> None:
    logits_BLP, targets = batch()
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(DUO, logits_BLP, targets, VOCAB)
    expected_BL, expected_BLP = plain(logits_BLP, targets, WORDS)
    torch.testing.assert_close(DUO.token_nelbo(logits_BLP, targets, VOCAB), expected_BL, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(loss_B, expected_BL.sum(-1), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradient_BLP, expected_BLP, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(nelbo_B, loss_B, rtol=0, atol=0)
    assert not nelbo_B.requires_grad and (targets["noisy"] == targets["ids"])[:, :TEXT].any() and (expected_BL > 0)[:3, :TEXT].all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_in_the_precision_of_training(dtype: torch.dtype, tolerance: float) -> None:
    """The loss is computed in fp32 from the logits as they are; only the returned gradient is rounded to their type."""
    logits_BLP, targets = batch()
    loss_B, _, gradient_BLP = loss_and_gradient(DUO, logits_BLP.to(dtype), targets, VOCAB)
    expected_BL, expected_BLP = plain(logits_BLP.to(dtype), targets, WORDS)
    assert loss_B.dtype == torch.float32 and gradient_BLP.dtype == dtype
    torch.testing.assert_close(loss_B.double(), expected_BL.sum(-1), rtol=1e-5, atol=1e-6)
    assert (gradient_BLP.double() - expected_BLP).norm() < tolerance * expected_BLP.norm()


@pytest.mark.parametrize("size", [1, 5, 11])
def test_slices_add_up(size: int) -> None:
    logits_BLP, targets = batch()
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(DUO, logits_BLP, targets, VOCAB)
    parts = []
    for start in range(0, L, size):
        part = {key: value[:, start : start + size] if value.ndim > 1 else value for key, value in targets.items()}
        parts.append(loss_and_gradient(DUO, logits_BLP[:, start : start + size], part, VOCAB))
    torch.testing.assert_close(sum(p[0] for p in parts), loss_B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(sum(p[1] for p in parts), nelbo_B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat([p[2] for p in parts], dim=1), gradient_BLP, rtol=1e-12, atol=1e-15)


def test_padding_and_forbidden_columns_contribute_exactly_nothing() -> None:
    """Padding, an empty sample, the mask's column and the padded vocabulary; even where their logits are huge, of either sign."""
    logits_BLP, targets = batch()
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(DUO, logits_BLP, targets, VOCAB)
    assert (gradient_BLP[~targets["scored"]] == 0).all() and (gradient_BLP[..., 40:] == 0).all() and (gradient_BLP[:3, :TEXT, :40] != 0).all()
    assert loss_B[-1] == 0 and nelbo_B[-1] == 0 and torch.isfinite(loss_B).all()
    for loud in (1e4, -1e4):
        shouting_BLP = logits_BLP.clone()
        shouting_BLP[..., 40:] = loud
        shouting_BLP[~targets["scored"]] = loud
        for a, b in zip((loss_B, nelbo_B, gradient_BLP), loss_and_gradient(DUO, shouting_BLP, targets, VOCAB), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---- The ends of the range, at the vocabulary of the large run ----------------------------------------------------------------------

LARGE = Vocabulary(tokenizer_size=131072, model_size=131072, padded_size=131072, mask_id=3, eos_id=2)
TOLD = 8  # positions: z = x or not; the network sure of x, sure of another id, sure of z, or knowing nothing


def extremes(t: float, confidence: float, eps: float, dtype: torch.dtype) -> tuple[Duo, Tensor, dict[str, Tensor]]:
    method = Duo(LARGE, ObjectiveConfig(name="duo", schedule_eps=eps))
    text_L, noisy_L = np.full(TOLD, 11), np.where(np.arange(TOLD) < 4, 11, 77)
    noisy_L[-1] = 3  # the mask, as noise
    sample = method.noised(text_L, np.zeros(TOLD, np.int32), t=t, level=method.level(t, evaluation=False), noisy_L=noisy_L)
    targets = {key: torch.from_numpy(value[None]) for key, value in sample.targets.items()}
    logits_1LP = torch.randn(1, TOLD, 131072, generator=torch.Generator().manual_seed(0)).to(dtype)
    for position, (told, lift) in enumerate([(11, 1), (500, 1), (11, -1), (11, 0), (11, 1), (500, 1), (77, 1), (11, 0)]):
        logits_1LP[0, position, told] += lift * confidence
    return method, logits_1LP, targets


@pytest.mark.parametrize("confidence", [12.0, 100.0, 1e4])
@pytest.mark.parametrize("t", [1e-3, 0.3, 0.999, 1.0])
def test_extreme_logits_in_bf16(t: float, confidence: float) -> None:
    """Finite everywhere; values as in float64 and gradients as the type allows, confidently right and confidently wrong."""
    method, logits_1LP, targets = extremes(t, confidence, 1e-3, torch.bfloat16)
    vocab = VocabShard.whole(LARGE)
    loss_B, _, gradient_1LP = loss_and_gradient(method, logits_1LP, targets, vocab)
    nats_1L = method.token_nelbo(logits_1LP, targets, vocab)
    assert torch.isfinite(loss_B).all() and torch.isfinite(gradient_1LP).all() and (nats_1L >= -1e-5).all()
    expected_1L, expected_1LP = plain(logits_1LP, targets, LARGE)
    torch.testing.assert_close(nats_1L.double(), expected_1L, rtol=2e-5, atol=2e-5)
    for got_P, expected_P in zip(gradient_1LP[0].double(), expected_1LP[0], strict=True):
        # 1e-4: fp32 rounding of a probability of 1, times weights of 1000.
        assert (got_P - expected_P).norm() <= 4e-3 * expected_P.norm() + 1e-4


@pytest.mark.parametrize("t", [1e-15, 1e-6, 1 - 1e-6, 1 - 1e-12, 1.0])
def test_the_ends_that_a_bound_reaches(t: float) -> None:
    """e = 0: fp32 stays finite and equal to float64, where the paper's form has nothing left."""
    method, logits_1LP, targets = extremes(t, 10.0, 0.0, torch.float32)
    nats_1L, exact_1L = (method.token_nelbo(logits_1LP.to(dtype), targets, VocabShard.whole(LARGE)) for dtype in (torch.float32, torch.float64))
    assert torch.isfinite(exact_1L).all() and (exact_1L > -1e-9).all()
    torch.testing.assert_close(nats_1L.double(), exact_1L, rtol=2e-5, atol=2e-6)


# ---- Tensor parallelism -----------------------------------------------------------------------------------------------------------


def half(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rank = dist.get_rank()
    logits_BLP, targets = batch()
    vocab = VocabShard(WORDS, start=24 * rank, end=24 * rank + 24, group=dist.group.WORLD)
    return loss_and_gradient(DUO, logits_BLP[..., vocab.start : vocab.end].to(dtype), targets, vocab)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_two_ranks_equal_one(dtype: torch.dtype, tolerance: float) -> None:
    logits_BLP, targets = batch()
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(DUO, logits_BLP.to(dtype), targets, VOCAB)
    first, second = run_distributed(partial(half, dtype), 2)
    for rank in (first, second):
        torch.testing.assert_close(rank[0], loss_B, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(rank[1], nelbo_B, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat((first[2], second[2]), -1), gradient_BLP, rtol=10 * tolerance, atol=tolerance)
    assert (first[2] != 0).any() and (second[2] != 0).any()
