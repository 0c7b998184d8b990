"""The vocabulary view: two ranks against one, padded against unpadded, and columns that must not exist.

Shape suffixes: B sequences, L positions, P padded vocabulary, v columns of one rank, E width of a table.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocab_terms import Log1pTerms
from pretrain.parallel.vocabulary import Vocabulary

B, L, E = 2, 5, 3
LOG_SCALE_B = torch.tensor([-1.0, 6.0], dtype=torch.float64)


def words(model: int = 13, padded: int = 16, mask: int | None = 12) -> Vocabulary:
    return Vocabulary(tokenizer_size=min(model, 12), model_size=model, padded_size=padded, mask_id=mask, eos_id=0)


LAYOUTS = {
    "padding and mask on the second rank": words(),
    "mask on the first rank": words(mask=3),
    "no mask": words(mask=None),
    "the second rank holds padding only": words(model=8, mask=7),
    "the second rank holds padding and the mask only": words(model=9, mask=8),
}


def everything(vocab: VocabShard, logits_BLv: Tensor, table_vE: Tensor, z_BLE: Tensor, index_BL: Tensor) -> dict[str, Tensor]:
    """One loss per use that an objective makes of the view; scalars, each with gradients."""
    values_BLv = vocab.allowed(logits_BLv)
    logp_BLv = vocab.log_softmax(values_BLv)
    p_BLv = logp_BLv.exp()
    # A diffusion prior adds z E^T to the logits: replicated z meets this rank's rows.
    prior_BLv = vocab.allowed(logits_BLv + vocab.spread(z_BLE) @ table_vE.T)
    weight_BL = torch.linspace(0.5, 1.5, B * L, dtype=logits_BLv.dtype).reshape(B, L)
    first_BL, second_BL, log1p_BL = vocab.log1p_terms(logits_BLv, LOG_SCALE_B, index_BL, index_BL.flip(-1))
    return {
        "logsumexp": (weight_BL * vocab.logsumexp(values_BLv)).sum(),
        "at": (weight_BL * vocab.at(values_BLv, index_BL)).sum(),
        "cross_entropy": (weight_BL * vocab.cross_entropy(logits_BLv, index_BL)).sum(),
        "log_probability": (weight_BL * vocab.at(logp_BLv, index_BL)).sum(),
        "sum of log1p, as in a uniform-state bound": (weight_BL * vocab.sum(torch.log1p(40 * p_BLv)) * vocab.at(p_BLv, index_BL)).sum(),
        "log1p terms": (weight_BL * first_BL + second_BL.exp() + weight_BL * log1p_BL * first_BL).sum(),
        "expectation": (vocab.expectation(p_BLv, table_vE) - z_BLE).square().sum(),
        "output prior": (weight_BL * vocab.cross_entropy(logits_BLv + vocab.spread(z_BLE) @ table_vE.T, index_BL)).sum()
        + vocab.expectation(vocab.log_softmax(prior_BLv).exp(), table_vE).pow(3).sum(),
    }


def arguments(vocabulary: Vocabulary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits_BLP = 2 * torch.randn(B, L, 16, dtype=torch.float64, generator=generator)
    logits_BLP[..., vocabulary.model_size :] = 50.0
    allowed = [i for i in range(vocabulary.model_size) if i != vocabulary.mask_id]
    index_BL = torch.tensor(allowed)[torch.randint(len(allowed), (B, L), generator=generator)]
    table_PE, z_BLE = (torch.randn(*shape, E, dtype=torch.float64, generator=generator) for shape in ((16,), (B, L)))
    return logits_BLP, table_PE, z_BLE, index_BL


def values_and_gradients(vocab: VocabShard, columns: slice) -> dict[str, list[Tensor]]:
    """name -> [value, gradients of logits and table (this rank's columns), gradient of z]."""
    logits_BLP, table_PE, z_BLE, index_BL = arguments(vocab.vocabulary)
    leaves = [x.clone().requires_grad_() for x in (logits_BLP[..., columns], table_PE[columns], z_BLE)]
    out = {}
    for name, value in everything(vocab, *leaves, index_BL).items():
        gradients = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        out[name] = [value.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))]
    return out


def two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    columns = slice(8 * rank, 8 * rank + 8)
    results = {
        name: values_and_gradients(VocabShard(layout, start=columns.start, end=columns.stop, group=dist.group.WORLD), columns)
        for name, layout in LAYOUTS.items()
    }
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, list[Tensor]]]]:
    folder: Path = tmp_path_factory.mktemp("vocab")
    mp.spawn(two_ranks, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one(layout: str, by_rank: list[dict[str, dict[str, list[Tensor]]]]) -> None:
    whole = values_and_gradients(VocabShard.whole(LAYOUTS[layout]), slice(0, 16))
    for name, (value, logits_BLP, table_PE, z_BLE) in whole.items():
        first, second = (results[layout][name] for results in by_rank)
        for rank in (first, second):
            torch.testing.assert_close(rank[0], value, rtol=1e-12, atol=1e-12, msg=f"{name}: value")
            torch.testing.assert_close(rank[3], z_BLE, rtol=1e-12, atol=1e-12, msg=f"{name}: gradient of a replicated tensor")
        torch.testing.assert_close(torch.cat((first[1], second[1]), -1), logits_BLP, rtol=1e-12, atol=1e-12, msg=f"{name}: logits")
        torch.testing.assert_close(torch.cat((first[2], second[2])), table_PE, rtol=1e-12, atol=1e-12, msg=f"{name}: table")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_equals_plain_torch_without_the_forbidden_columns(layout: str) -> None:
    """Values and gradients of every use are those of a vocabulary in which padding and mask were never there."""
    vocabulary = LAYOUTS[layout]
    allowed = [i for i in range(vocabulary.model_size) if i != vocabulary.mask_id]
    forbidden = [i for i in range(16) if i not in allowed]
    logits_BLP, _, _, index_BL = arguments(vocabulary)
    leaf_BLP = logits_BLP.clone().requires_grad_()
    logp_BLV = leaf_BLP[..., allowed].log_softmax(-1)
    logp_BL, second_BL = (
        logp_BLV.gather(-1, torch.searchsorted(torch.tensor(allowed), ids_BL).unsqueeze(-1)).squeeze(-1) for ids_BL in (index_BL, index_BL.flip(-1))
    )
    weight_BL = torch.linspace(0.5, 1.5, B * L, dtype=torch.float64).reshape(B, L)
    log1p_BL = torch.log1p(LOG_SCALE_B.exp()[:, None, None] * logp_BLV.exp()).sum(-1)
    plain = {
        "log1p terms": (weight_BL * logp_BL + second_BL.exp() + weight_BL * log1p_BL * logp_BL).sum(),
        "logsumexp": (weight_BL * leaf_BLP[..., allowed].logsumexp(-1)).sum(),
        "cross_entropy": -(weight_BL * logp_BL).sum(),
        "log_probability": (weight_BL * logp_BL).sum(),
        "sum of log1p, as in a uniform-state bound": (weight_BL * torch.log1p(40 * logp_BLV.exp()).sum(-1) * logp_BL.exp()).sum(),
    }
    for name, results in values_and_gradients(VocabShard.whole(vocabulary), slice(0, 16)).items():
        assert all(torch.isfinite(x).all() for x in results), name
        assert (results[1][..., forbidden] == 0).all(), name
        if name in plain:
            torch.testing.assert_close(results[0], plain[name].detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(results[1], torch.autograd.grad(plain[name], leaf_BLP, retain_graph=True)[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("padded", [13, 14, 128])
def test_padding_changes_no_bit(padded: int) -> None:
    """A vocabulary padded for another layout gives identical losses and gradients, whatever the padding holds, NaN included."""
    logits_BLP, _, _, index_BL = arguments(words())
    reference = logits_BLP[..., :13].clone().requires_grad_()
    wide = torch.cat((logits_BLP[..., :13], torch.full((B, L, padded - 13), torch.nan, dtype=torch.float64)), -1).requires_grad_()
    for leaf, size in ((reference, 13), (wide, padded)):
        VocabShard.whole(words(padded=size)).cross_entropy(leaf, index_BL).sum().backward()
    assert reference.grad is not None and wide.grad is not None
    torch.testing.assert_close(wide.grad[..., :13], reference.grad, rtol=1e-15, atol=1e-16)
    assert (wide.grad[..., 13:] == 0).all()


def test_forbidden_ids_have_probability_zero_and_infinite_cross_entropy() -> None:
    vocab = VocabShard.whole(words())
    p_BLP = vocab.log_softmax(vocab.allowed(torch.full((1, 1, 16), 3.0))).exp()
    assert (p_BLP[..., 12:] == 0).all() and p_BLP.sum().item() == pytest.approx(1)
    assert vocab.cross_entropy(torch.zeros(1, 1, 16), torch.tensor([[12]])).isinf().all()


def test_numbers_come_out_in_fp32_and_gradients_in_the_type_of_the_logits() -> None:
    vocab = VocabShard.whole(words())
    logits = torch.randn(B, L, 16).bfloat16().requires_grad_()
    index_BL = torch.ones(B, L, dtype=torch.long)
    assert vocab.allowed(logits).dtype == vocab.cross_entropy(logits, index_BL).dtype == torch.float32
    before = logits.detach().clone()
    vocab.cross_entropy(logits, index_BL).sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("use", ["cross_entropy", "log1p_terms"])
def test_fused_reductions_keep_only_the_logits_they_were_given(use: str) -> None:
    """What autograd holds between forward and backward: the bf16 logits and tensors [B, L], no fp32 [B, L, V]; and it leaves the logits alone."""
    saved: list[Tensor] = []
    logits, index_BL = torch.randn(B, L, 16).bfloat16().requires_grad_(), torch.ones(B, L, dtype=torch.long)
    before, vocab = logits.detach().clone(), VocabShard.whole(words())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        if use == "cross_entropy":
            total_BL = vocab.cross_entropy(logits, index_BL)
        else:
            total_BL = Log1pTerms.apply(logits, LOG_SCALE_B, torch.stack((index_BL, index_BL)), vocab).sum(0)
    assert sum(x.shape[-1] == 16 for x in saved) == 1 and all(x.numel() <= 2 * B * L for x in saved if x.shape[-1] != 16)
    assert all(x.dtype == torch.bfloat16 for x in saved if x.shape[-1] == 16)
    total_BL.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)


def test_forbidden_ids_add_nothing_to_the_log1p_terms() -> None:
    vocab, index_BL = VocabShard.whole(words()), torch.tensor([[12, 3]])
    first_BL, second_BL, total_BL = vocab.log1p_terms(torch.full((1, 2, 16), 3.0), torch.tensor([2.0]), index_BL, index_BL.flip(-1))
    assert first_BL[0, 0] == second_BL[0, 1] == -torch.inf and first_BL[0, 1].item() == pytest.approx(-np.log(12))
    np.testing.assert_allclose(total_BL, 12 * np.log1p(np.exp(2) / 12), rtol=1e-6)


def test_columns_outside_the_vocabulary_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match="not within the padded vocabulary of 16"):
        VocabShard(words(), start=8, end=17, group=None)
