"""Eso-LM's `token_loss`: values and gradients against the plain float64 formula, what must contribute nothing, and two ranks against one.

Shape suffixes: B sequences, L positions, P padded vocabulary, v columns of one rank.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.objectives.config import EsoLMConfig, ObjectiveConfig
from pretrain.objectives.esolm import EsoLM
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests.distributed import run_distributed

WORDS = Vocabulary(tokenizer_size=40, model_size=41, padded_size=48, mask_id=40, eos_id=0)
VOCAB = VocabShard.whole(WORDS)
B, L, TEXT = 4, 12, 9
Answer = tuple[Tensor, Tensor, Tensor]
FORMS: dict[str, tuple[float, bool | None, str, int, float]] = {
    "low variance": (1.0, None, "nelbo", 0, 1.0),
    "diffusion alone": (1.0, False, "nelbo", 0, 1.0),
    "diffusion": (0.6, None, "nelbo", 0, 0.25),
    "sequential": (0.6, None, "nelbo", 1, 0.75),
    "autoregression": (0.0, None, "nelbo", 0, 1.0),
    "any order": (0.6, None, "any_order", 0, 1.0),
}
"""alpha_0, low_variance, evaluate, part, share."""


def batch(form: str) -> tuple[EsoLM, Tensor, dict[str, Tensor]]:
    """Logits and targets of B samples, the last of which is all padding; padding ids are ones that no model could predict."""
    alpha_0, low_variance, evaluate, part, share = FORMS[form]
    section = EsoLMConfig(alpha_0=alpha_0, evaluate=evaluate)  # type: ignore[arg-type]
    method = EsoLM(WORDS, ObjectiveConfig(name="esolm", low_variance=low_variance, esolm=section))
    samples = []
    for index in range(B):
        text_L = np.arange(L) < (0 if index == B - 1 else TEXT)
        tokens_L = np.where(text_L, np.random.default_rng(index).integers(0, 40, L), (WORDS.mask_id, 47, 1000)[index % 3])
        noise = Noise(5, index, index, B, part=part, share=share)
        samples.append(method.corrupt(tokens_L, np.where(text_L, 0, -1).astype(np.int32), noise, evaluation=form == "any order"))
    targets = {key: torch.from_numpy(np.stack([sample.targets[key] for sample in samples])) for key in samples[0].targets}
    return method, 3 * torch.randn(B, L, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), targets


def answer(method: EsoLM, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard = VOCAB) -> Answer:
    """Loss, nelbo and the gradient of the logits."""
    leaf_BLv = logits_BLv.clone().requires_grad_()
    loss = method.token_loss(leaf_BLv, targets, vocab)
    loss.loss_B.sum().backward()
    assert leaf_BLv.grad is not None and not loss.nelbo_B.requires_grad
    return loss.loss_B.detach(), loss.nelbo_B, leaf_BLv.grad


def plain(form: str, logits_BLP: Tensor, targets: dict[str, Tensor]) -> Answer:
    """float64 autograd of the formula over the 40 ids that can be predicted; t recovered from the noise that drew it."""
    alpha_0, low_variance, evaluate, part, share = FORMS[form]
    leaf_BLP = logits_BLP.double().clone().requires_grad_()
    nats_BL = -leaf_BLP[..., :40].log_softmax(-1).gather(-1, targets["ids"].clamp(max=39).unsqueeze(-1)).squeeze(-1)
    t_B = 1e-3 + (1 - 1e-3) * torch.tensor([Noise(5, i, i, B).stratified_time("t") for i in range(B)], dtype=torch.float64)
    diffusion = alpha_0 > 0 and part == 0 and evaluate == "nelbo"
    weight_B = alpha_0 * 0.999 / (1 - alpha_0 * (1 - 0.999 * t_B)) / share if diffusion else torch.full((B,), 1 / share, dtype=torch.float64)
    nats_B = (nats_BL * targets["masked"]).sum(-1)
    loss_B = nats_B if form == "low variance" else nats_B * weight_B
    loss_B.sum().backward()
    assert leaf_BLP.grad is not None
    return loss_B.detach(), (nats_B * weight_B).detach(), leaf_BLP.grad


@pytest.mark.parametrize("form", FORMS)
def test_against_the_plain_form_in_float64(form: str) -> None:
    method, logits_BLP, targets = batch(form)
    got = answer(method, logits_BLP, targets)
    for mine, want in zip(got, plain(form, logits_BLP, targets), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got[1], method.token_nelbo(logits_BLP, targets, VOCAB).sum(-1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("form", FORMS)
def test_in_the_precision_of_training(form: str, dtype: torch.dtype, tolerance: float) -> None:
    method, logits_BLP, targets = batch(form)
    loss_B, nelbo_B, gradient_BLP = answer(method, logits_BLP.to(dtype), targets)
    want_loss_B, want_nelbo_B, want_BLP = plain(form, logits_BLP.to(dtype), targets)
    assert loss_B.dtype == nelbo_B.dtype == torch.float32 and gradient_BLP.dtype == dtype
    torch.testing.assert_close(loss_B.double(), want_loss_B, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(nelbo_B.double(), want_nelbo_B, rtol=1e-5, atol=1e-6)
    assert (gradient_BLP.double() - want_BLP).norm() < tolerance * want_BLP.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 5])
def test_slices_add_up(form: str, size: int) -> None:
    method, logits_BLP, targets = batch(form)
    loss_B, nelbo_B, gradient_BLP = answer(method, logits_BLP, targets)
    parts = []
    for start in range(0, L, size):
        part = {key: value[:, start : start + size] if value.ndim > 1 else value for key, value in targets.items()}
        parts.append(answer(method, logits_BLP[:, start : start + size], part))
    torch.testing.assert_close(sum(p[0] for p in parts), loss_B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(sum(p[1] for p in parts), nelbo_B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat([p[2] for p in parts], dim=1), gradient_BLP, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_scored_contributes_exactly_nothing(form: str) -> None:
    """Clean tokens, padding, an empty sample, the mask and the padded vocabulary; whatever their logits are."""
    method, logits_BLP, targets = batch(form)
    masked_BL = targets["masked"]
    assert not masked_BL[:, TEXT:].any() and masked_BL[:-1].any(-1).all()
    loss_B, nelbo_B, gradient_BLP = answer(method, logits_BLP, targets)
    assert (gradient_BLP[~masked_BL] == 0).all() and (gradient_BLP[..., 40:] == 0).all()
    assert loss_B[-1] == 0 and nelbo_B[-1] == 0 and torch.isfinite(loss_B).all()
    shouting_BLP = logits_BLP.clone()
    shouting_BLP[..., 40:] = 1e4
    shouting_BLP[~masked_BL] = 1e4
    for a, b in zip((loss_B, nelbo_B, gradient_BLP), answer(method, shouting_BLP, targets), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("alpha_0", [0.5, 1.0])
def test_extreme_logits_at_the_smallest_time(alpha_0: float) -> None:
    """V = 131072 in bf16 at t = 1e-3: confidently right, confidently wrong, flat, and among many equals."""
    words = Vocabulary(tokenizer_size=131071, model_size=131072, padded_size=131072, mask_id=3, eos_id=2)
    method = EsoLM(words, ObjectiveConfig(name="esolm", low_variance=False if alpha_0 == 1 else None, esolm=EsoLMConfig(alpha_0=alpha_0)))
    tokens_L, every = np.array([7, 131071, 5, 9]), np.ones(4, dtype=bool)
    documents_L = np.zeros(4, dtype=np.int32)
    sample = method.diffused(tokens_L, documents_L, order_L=np.arange(4), masked_L=every, t=1e-3, share=0.5, evaluation=False)
    targets = {key: torch.from_numpy(np.stack([value])) for key, value in sample.targets.items()}
    logits_BLP = torch.zeros(1, 4, 131072)
    logits_BLP[0, 0, 7], logits_BLP[0, 1, 11], logits_BLP[0, 2], logits_BLP[0, 3, ::2] = 1e4, 1e4, -1e4, 50.0
    logits_BLP[..., 3] = 3e38
    loss_B, nelbo_B, gradient_BLP = answer(method, logits_BLP.bfloat16(), targets, VocabShard.whole(words))
    weight = alpha_0 * 0.999 / (1 - alpha_0 * (1 - 0.999e-3)) / 0.5
    large, fifty = float(torch.tensor(1e4).bfloat16()), 50.0
    nats = 0 + large + np.log(131071) + (fifty + np.log(65536 + 65535 * np.exp(-fifty)))
    assert torch.isfinite(gradient_BLP).all() and gradient_BLP.abs().max() <= weight * 1.01 and (gradient_BLP[..., 3] == 0).all()
    assert loss_B.item() == nelbo_B.item() == pytest.approx(weight * nats, rel=1e-5)


def columns_of_this_rank() -> dict[str, Answer]:
    """Each form's answer for half of the columns."""
    start = 24 * dist.get_rank()
    vocab = VocabShard(WORDS, start=start, end=start + 24, group=dist.group.WORLD)
    answers = {}
    for form in FORMS:
        method, logits_BLP, targets = batch(form)
        answers[form] = answer(method, logits_BLP[..., start : start + 24], targets, vocab)
    return {form: tuple(x.numpy() for x in found) for form, found in answers.items()}  # type: ignore[misc]


def test_two_ranks_equal_one() -> None:
    first, second = run_distributed(columns_of_this_rank, 2)
    for form in FORMS:
        method, logits_BLP, targets = batch(form)
        loss_B, nelbo_B, gradient_BLP = (x.numpy() for x in answer(method, logits_BLP, targets))
        for rank in (first, second):
            np.testing.assert_allclose(rank[form][0], loss_B, rtol=1e-12)
            np.testing.assert_allclose(rank[form][1], nelbo_B, rtol=1e-12)
        np.testing.assert_allclose(np.concatenate((first[form][2], second[form][2]), -1), gradient_BLP, rtol=1e-12, atol=1e-14)
