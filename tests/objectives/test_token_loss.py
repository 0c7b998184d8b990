"""Values and gradients of `token_loss` against the plain float64 formula; what must contribute nothing contributes exactly nothing.

Shape suffixes: B sequences, L positions, P padded vocabulary.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.objectives.ar import AR
from pretrain.objectives.base import Objective
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.mdlm import MDLM
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary

WORDS = Vocabulary(tokenizer_size=40, model_size=41, padded_size=48, mask_id=40, eos_id=0)
VOCAB = VocabShard.whole(WORDS)
B, L, TEXT = 3, 12, 9
OBJECTIVES = ["ar", "mdlm", "mdlm-elbo"]


def objective(name: str) -> Objective:
    if name == "ar":
        return AR(WORDS, ObjectiveConfig(name="ar"))
    return MDLM(WORDS, ObjectiveConfig(name="mdlm", low_variance=name == "mdlm"))


def batch(method: Objective) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and targets of B samples, the last of which is all padding; padding ids are ones no model could predict."""
    samples = []
    for index in range(B):
        length = L + method.lookahead
        text_L = np.arange(length) < (0 if index == B - 1 else TEXT)
        tokens_L = np.where(text_L, np.random.default_rng(index).integers(0, 40, length), WORDS.mask_id)
        samples.append(method.corrupt(tokens_L, np.where(text_L, 0, -1).astype(np.int32), Noise(5, index, index, B), evaluation=False))
    stacked = {key: torch.from_numpy(np.stack([sample.targets[key] for sample in samples])) for key in samples[0].targets}
    return 3 * torch.randn(B, L, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), stacked


def loss_and_gradient(method: Objective, logits_BLP: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    leaf_BLP = logits_BLP.clone().requires_grad_()
    loss = method.token_loss(leaf_BLP, targets, VOCAB)
    loss.loss_B.sum().backward()
    assert leaf_BLP.grad is not None
    return loss.loss_B.detach(), loss.nelbo_B, leaf_BLP.grad


def scored(targets: dict[str, Tensor]) -> Tensor:
    return targets["masked"] if "masked" in targets else targets["scored"]


def plain(method: Objective, logits_BLP: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """float64 autograd of the formula, with the forbidden columns cut away."""
    leaf_BLP = logits_BLP.double().clone().requires_grad_()
    logp_BLV = leaf_BLP[..., :40].log_softmax(-1)
    nats_BL = -logp_BLV.gather(-1, targets["ids"].clamp(max=39).unsqueeze(-1)).squeeze(-1)
    loss_B = (nats_BL * scored(targets)).sum(-1) * targets.get("loss_weight", torch.ones(B))
    loss_B.sum().backward()
    assert leaf_BLP.grad is not None
    return loss_B.detach(), leaf_BLP.grad


@pytest.mark.parametrize("name", OBJECTIVES)
def test_against_the_plain_form_in_float64(name: str) -> None:
    method = objective(name)
    logits_BLP, targets = batch(method)
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(method, logits_BLP, targets)
    expected_B, expected_BLP = plain(method, logits_BLP, targets)
    torch.testing.assert_close(loss_B, expected_B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient_BLP, expected_BLP, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(nelbo_B, method.token_nelbo(logits_BLP, targets, VOCAB).sum(-1), rtol=1e-13, atol=1e-13)
    if name == "mdlm":
        torch.testing.assert_close(nelbo_B, loss_B * targets["nelbo_weight"], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_in_the_precision_of_training(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """The loss is computed in fp32 from the logits as they are; only the returned gradient is rounded to their type."""
    method = objective(name)
    logits_BLP, targets = batch(method)
    loss_B, _, gradient_BLP = loss_and_gradient(method, logits_BLP.to(dtype), targets)
    expected_B, expected_BLP = plain(method, logits_BLP.to(dtype), targets)
    assert loss_B.dtype == torch.float32 and gradient_BLP.dtype == dtype
    torch.testing.assert_close(loss_B.double(), expected_B, rtol=1e-5, atol=1e-6)
    assert (gradient_BLP.double() - expected_BLP).norm() < tolerance * expected_BLP.norm()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("size", [1, 5, 11])
def test_slices_add_up(name: str, size: int) -> None:
    method = objective(name)
    logits_BLP, targets = batch(method)
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(method, logits_BLP, targets)
    parts = []
    for start in range(0, L, size):
        part = {key: value[:, start : start + size] if value.ndim > 1 else value for key, value in targets.items()}
        parts.append(loss_and_gradient(method, logits_BLP[:, start : start + size], part))
    torch.testing.assert_close(sum(p[0] for p in parts), loss_B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(sum(p[1] for p in parts), nelbo_B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat([p[2] for p in parts], dim=1), gradient_BLP, rtol=0, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_unscored_positions_and_forbidden_columns_contribute_exactly_nothing(name: str) -> None:
    """Carry-over (clean positions), padding, an empty sample, the mask and the padded vocabulary; even where their logits are huge."""
    method = objective(name)
    logits_BLP, targets = batch(method)
    scored_BL = scored(targets)
    assert not scored_BL[:, TEXT:].any() and scored_BL.sum() > 0 and (name == "ar" or (~scored_BL[:, :TEXT]).any())
    loss_B, nelbo_B, gradient_BLP = loss_and_gradient(method, logits_BLP, targets)
    assert (gradient_BLP[~scored_BL] == 0).all() and (gradient_BLP[..., 40:] == 0).all()
    assert loss_B[-1] == 0 and nelbo_B[-1] == 0 and torch.isfinite(loss_B).all()

    shouting_BLP = logits_BLP.clone()
    shouting_BLP[..., 40:] = 1e4
    shouting_BLP[~scored_BL] = 1e4
    again = loss_and_gradient(method, shouting_BLP, targets)
    for a, b in zip((loss_B, nelbo_B, gradient_BLP), again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_network_input(name: str) -> None:
    method = objective(name)
    sample = method.corrupt(np.zeros(L + method.lookahead, np.int64), np.zeros(L + method.lookahead, np.int32), Noise(1, 0, 0, 1), evaluation=False)
    inputs = {key: torch.from_numpy(np.stack([value])) for key, value in sample.inputs.items()}
    network = method.network_input(inputs, VOCAB)
    assert network.documents_BL is not None and network.attention == method.attention and (network.conditioning_B == 0).all()
    del inputs["documents"]
    assert method.network_input(inputs, VOCAB).documents_BL is None
