"""RePlaid's `token_loss`: precision, slices, padding, extremes, and the same over two tensor-parallel ranks.

Shape suffixes: B sequences, L positions, E width of an embedding, P padded vocabulary.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.replaid import RePlaid
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests.distributed import run_distributed
from tests.objectives.replaid_examples import VOCAB, WORDS, Batch, L, P, V, batch, small


def random_logits(size: int = 8) -> Tensor:
    return 3 * torch.randn(size, L, P, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients_of(objective: RePlaid, value: Tensor, targets: dict[str, Tensor], logits: Tensor) -> dict[str, Tensor]:
    leaves = {"logits": logits, "g": targets["g"], "dg": targets["dg"], "embedding": objective.embedding.weight}
    leaves |= {"gamma_0": objective.schedule.gamma_0, "gamma_1": objective.schedule.gamma_1}
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def loss_and_gradients(objective: RePlaid, logits_BLP: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    leaf_BLP = logits_BLP.detach().requires_grad_()
    loss = objective.token_loss(leaf_BLP, targets, VOCAB)
    torch.testing.assert_close(loss.nelbo_B, loss.loss_B.detach(), rtol=0, atol=0)
    return loss.loss_B.detach(), gradients_of(objective, loss.loss_B.sum(), targets, leaf_BLP)


def prepared(objective: RePlaid) -> dict[str, Tensor]:
    return objective.prepare(*batch(objective), evaluation=False)[1]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_in_the_precision_of_training(dtype: torch.dtype, tolerance: float) -> None:
    """fp32 parameters and normals, the schedule in float64: the loss as in float64, gradients to the rounding of the logits' type."""
    objective = small()
    targets = prepared(objective)
    exact_B, exact = loss_and_gradients(objective, random_logits().to(dtype).double(), targets)
    objective.embedding.float()
    loss_B, found = loss_and_gradients(objective, random_logits().to(dtype), targets)
    assert loss_B.dtype == torch.float32 and found["logits"].dtype == dtype and found["g"].dtype == torch.float64
    torch.testing.assert_close(loss_B.double(), exact_B, rtol=1e-5, atol=1e-6)
    for name, gradient in found.items():
        limit = tolerance if name == "logits" else 1e-5
        assert (gradient.double() - exact[name]).norm() < limit * exact[name].norm(), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_add_up(size: int) -> None:
    objective = small()
    targets, logits_BLP = prepared(objective), random_logits()
    loss_B, found = loss_and_gradients(objective, logits_BLP, targets)
    pieces = []
    for start in range(0, L, size):
        cut = {key: value[:, start : start + size] if value.dim() > 1 else value for key, value in targets.items()}
        pieces.append(loss_and_gradients(objective, logits_BLP[:, start : start + size], cut))
    torch.testing.assert_close(sum(p[0] for p in pieces), loss_B, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat([p[1]["logits"] for p in pieces], 1), found["logits"], rtol=1e-12, atol=1e-14)
    for name in ("g", "dg", "embedding", "gamma_0", "gamma_1"):
        torch.testing.assert_close(sum(p[1][name] for p in pieces), found[name], rtol=1e-11, atol=1e-12)


def test_the_first_pass_commutes_with_slicing() -> None:
    objective = small()
    targets, logits_BLP = prepared(objective), random_logits()
    whole_BLE = objective.preliminary_result(logits_BLP, targets, VOCAB)
    cut = {key: value[:, 1:3] if value.dim() > 1 else value for key, value in targets.items()}
    torch.testing.assert_close(objective.preliminary_result(logits_BLP[:, 1:3], cut, VOCAB), whole_BLE[:, 1:3], rtol=1e-13, atol=1e-13)
    assert not whole_BLE.requires_grad and whole_BLE.shape == (8, L, objective.preliminary_width())


def test_padding_and_forbidden_columns_contribute_exactly_nothing() -> None:
    """A cut sequence, an empty one, padding ids that cannot be predicted, the mask and the padded vocabulary; even where logits are huge."""
    objective = small()
    targets, logits_BLP = prepared(objective), random_logits()
    text_BL = targets["text"]
    assert (~text_BL).sum() == 2 + L and (targets["ids"][~text_BL] == WORDS.mask_id).all()
    loss_B, found = loss_and_gradients(objective, logits_BLP, targets)
    assert (found["logits"][~text_BL] == 0).all() and (found["logits"][..., V:] == 0).all() and (found["embedding"][V:] == 0).all()
    assert loss_B[5] == 0 and found["g"][5] == 0 and found["dg"][5] == 0
    assert torch.isfinite(loss_B).all() and all(torch.isfinite(gradient).all() for gradient in found.values())
    shouting_BLP = logits_BLP.clone()
    shouting_BLP[..., V:] = 1e4
    shouting_BLP[~text_BL] = 1e4
    again_B, again = loss_and_gradients(objective, shouting_BLP, targets)
    torch.testing.assert_close(again_B, loss_B, rtol=0, atol=0)
    for name, gradient in again.items():
        torch.testing.assert_close(gradient, found[name], rtol=0, atol=0)
    objective.finish(targets, loss_B)  # and no nan in what follows from it
    assert torch.isfinite(objective.statistics(targets, loss_B)).all() and objective.statistics(targets, loss_B)[:, 0].tolist() == [4, 3]


@pytest.mark.parametrize("gammas", [(-3.0, 6.0), (-15.0, 15.0)])
def test_extreme_logits_of_a_large_vocabulary(gammas: tuple[float, float]) -> None:
    """131072 ids, bf16, t = 0, 1e-3 and 1: logits that are confidently right, confidently wrong, and flat; finite losses and gradients."""
    words = Vocabulary(tokenizer_size=131071, model_size=131072, padded_size=131072, mask_id=3, eos_id=2)
    objective = small(words, gamma_0=gammas[0], gamma_1=gammas[1], latent=16)
    objective.embedding.float()
    vocab, ids_L = VocabShard.whole(words), np.array([5, 70000, 131071])
    samples = [objective.corrupt(ids_L, np.zeros(3, np.int32), Noise(1, i, i, 3, part=int(i > 0), share=0.5), evaluation=True) for i in range(3)]
    inputs, targets = (
        {key: torch.from_numpy(np.stack([getattr(s, group)[key] for s in samples])) for key in getattr(samples[0], group)}
        for group in ("inputs", "targets")
    )
    inputs["u"] = torch.tensor([0.5, 1 - 1e-3, 0.0], dtype=torch.float64)
    targets = objective.prepare(inputs, targets, evaluation=True)[1]
    torch.testing.assert_close(targets["t"], torch.tensor([0, 1e-3, 1], dtype=torch.float64), rtol=0, atol=1e-12)
    logits_BLP = torch.zeros(3, 3, 131072)
    logits_BLP[:, 0, 5], logits_BLP[:, 1, 9] = 3e4, 3e4
    leaf_BLP = logits_BLP.bfloat16().requires_grad_()
    nats_BL = objective.token_nelbo(leaf_BLP, targets, vocab)
    nats_BL.sum().backward()
    assert leaf_BLP.grad is not None and torch.isfinite(nats_BL).all() and (nats_BL > 0).all() and torch.isfinite(leaf_BLP.grad.float()).all()
    if gammas[0] == -3:  # in wide ranges the evidence of z_0 outweighs even these logits
        assert nats_BL[0, 1].item() == pytest.approx(2 * 3e4, rel=0.01) and nats_BL[0, 0] < 1


def test_network_input() -> None:
    """Latents of mean square 1 at every noise, the estimate at length sqrt(E), gamma as conditioning; text alone is noised."""
    objective = small()
    inputs, _ = objective.prepare(*batch(objective), evaluation=False)
    network = objective.network_input(inputs, VOCAB)
    assert network.latents_BLE is not None and network.estimate_BLE is not None and (network.estimate_BLE == 0).all()
    gamma_B = objective.schedule.gamma(inputs["g"])
    torch.testing.assert_close(network.conditioning_B, gamma_B)
    alpha2, sigma2 = torch.sigmoid(-gamma_B)[:, None, None], torch.sigmoid(gamma_B)[:, None, None]
    table = objective.embedding.weight / objective.embedding.weight.norm(dim=1, keepdim=True)
    z_BLE = alpha2.sqrt() * table[inputs["ids"]] + sigma2.sqrt() * inputs["normals"]
    torch.testing.assert_close(network.latents_BLE, z_BLE / (alpha2 / 3 + sigma2).sqrt(), rtol=1e-7, atol=1e-7)
    assert (inputs["normals"][5] == 0).all() and (inputs["normals"][2, 3:] == 0).all() and (inputs["normals"][2, :3] != 0).all()
    fed = objective.network_input(inputs | {"estimate": table[inputs["ids"]]}, VOCAB).estimate_BLE
    assert fed is not None
    torch.testing.assert_close(fed.norm(dim=-1), torch.full((8, L), 3**0.5, dtype=torch.float64))
    never = small(self_conditioning=0.0).network_input(inputs, VOCAB).estimate_BLE
    assert never is not None and (never == 0).all()
    wide = RePlaid(WORDS, ObjectiveConfig(name="replaid"))
    scaled = wide.network_input(wide.prepare(*batch(wide, 64, length=64), evaluation=False)[0], VOCAB)
    assert scaled.latents_BLE is not None and scaled.latents_BLE.dtype == scaled.conditioning_B.dtype == torch.float32
    assert scaled.latents_BLE[6:].square().mean().item() == pytest.approx(1, abs=0.02)


# ---- two tensor-parallel ranks ------------------------------------------------------------------------------------------------------


def everything(vocab: VocabShard, columns: slice) -> dict[str, Tensor]:
    """Loss, estimate, and the gradients of a loss that meets both the first stage and the last."""
    objective = small()
    prepared_batch: Batch = objective.prepare(*batch(objective), evaluation=False)
    inputs, targets = prepared_batch
    network = objective.network_input(inputs, vocab)
    assert network.latents_BLE is not None
    leaf_BLv = random_logits()[..., columns].requires_grad_()
    loss_B = objective.token_loss(leaf_BLv, targets, vocab).loss_B
    value = loss_B.sum() + (network.latents_BLE.sin().sum((1, 2)) * network.conditioning_B).sum()
    found = gradients_of(objective, value, targets, leaf_BLv)
    return found | {"loss": loss_B.detach(), "estimate": objective.preliminary_result(leaf_BLv.detach(), targets, vocab)}


def one_of_two() -> dict[str, Tensor]:
    columns = slice(6, 12) if dist.get_rank() else slice(0, 6)
    return everything(VocabShard(WORDS, start=columns.start, end=columns.stop, group=dist.group.WORLD), columns)


def test_two_ranks_equal_one() -> None:
    whole = everything(VOCAB, slice(0, P))
    first, second = run_distributed(one_of_two, 2)
    for name, expected in whole.items():
        if name == "logits":
            found = [torch.cat((first[name], second[name]), -1)]
        elif name == "embedding":  # partial_over_tensor: the optimizer adds the ranks' parts
            found = [first[name] + second[name]]
        else:
            found = [first[name], second[name]]
        for value in found:
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12, msg=name)
