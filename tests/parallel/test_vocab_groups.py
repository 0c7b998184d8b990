"""Sums over groups of ids: plain float64 against the product, two ranks against one, and what must not change a bit.

Shape suffixes: B sequences, L positions, P padded vocabulary, v columns of one rank, G groups.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests.distributed import run_distributed

B, L, G, P = 2, 5, 7, 16
BARRED = [False, True]
LAYOUTS = {
    "padding on the second rank": (13, None),
    "mask on the first rank": (13, 3),
    "the second rank holds padding only": (8, None),
    "the second rank holds one id": (9, None),
}


def words(layout: str) -> Vocabulary:
    model, mask = LAYOUTS[layout]
    return Vocabulary(tokenizer_size=min(model, 12), model_size=model, padded_size=P, mask_id=mask, eos_id=0)


def arguments(layout: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random overlapping groups, the last of them empty; the padding belongs to groups too and is very likely."""
    generator = torch.Generator().manual_seed(3)
    model, mask = LAYOUTS[layout]
    logits_BLP = 2 * torch.randn(B, L, P, dtype=torch.float64, generator=generator)
    logits_BLP[..., model:] = 50.0
    members_PG = (torch.rand(P, G, generator=generator) < 0.4).float()
    members_PG[:, -1] = 0
    index_BL = torch.randint(model, (B, L), generator=generator)
    index_BL[index_BL == mask] = 0
    # An index may not be barred: bar only groups that it does not belong to.
    barred_BLG = (torch.rand(B, L, G, generator=generator) < 0.3) & (members_PG[index_BL] == 0)
    return logits_BLP.to(dtype), members_PG, index_BL, barred_BLG


def some_loss(logs_BLG: Tensor, found_BL: Tensor) -> Tensor:
    """A smooth function of both results that gives each its own gradient, and none to a group that is empty or all barred."""
    weight = torch.linspace(0.5, 1.5, logs_BLG.numel(), dtype=torch.float64).view_as(logs_BLG).to(logs_BLG.dtype)
    return -(weight * torch.nn.functional.logsigmoid(found_BL.unsqueeze(-1) - logs_BLG)).sum() + found_BL.square().sum()


def product(layout: str, barred: bool, columns: slice, group: dist.ProcessGroup | None) -> list[Tensor]:
    """[logs, value at the index, gradient of this rank's columns]."""
    logits_BLP, members_PG, index_BL, barred_BLG = arguments(layout)
    vocab = VocabShard(words(layout), start=columns.start, end=columns.stop, group=group)
    leaf_BLv = logits_BLP[..., columns].clone().requires_grad_()
    logs_BLG, found_BL = vocab.log_group_sums(leaf_BLv, members_PG[columns], index_BL, barred_BLG if barred else None)
    (gradient_BLv,) = torch.autograd.grad(some_loss(logs_BLG, found_BL), leaf_BLv)
    return [logs_BLG.detach(), found_BL.detach(), gradient_BLv]


def plain(layout: str, barred: bool) -> list[Tensor]:
    """The definition: log-sum-exp over each group's members that exist, are not the index and are not barred."""
    logits_BLP, members_PG, index_BL, barred_BLG = arguments(layout)
    model, mask = LAYOUTS[layout]
    leaf_BLP = logits_BLP.clone().requires_grad_()
    exists_P = (torch.arange(P) < model) & (torch.arange(P) != (-1 if mask is None else mask))
    counts_BLP = exists_P & (torch.arange(P) != index_BL.unsqueeze(-1))
    if barred:
        counts_BLP = counts_BLP & ~(barred_BLG.unsqueeze(2) & (members_PG == 1)).any(-1)
    sums_BLG = (leaf_BLP.exp().where(counts_BLP, 0.0).unsqueeze(-1) * members_PG).sum(2)
    logs_BLG = torch.where(sums_BLG > 0, sums_BLG.clamp_min(1e-300).log(), -1e32)
    found_BL = leaf_BLP.gather(-1, index_BL.unsqueeze(-1)).squeeze(-1)
    (gradient_BLP,) = torch.autograd.grad(some_loss(logs_BLG, found_BL), leaf_BLP)
    return [logs_BLG.detach(), found_BL.detach(), gradient_BLP]


def same(got: list[Tensor], expected: list[Tensor]) -> None:
    empty_BLG = expected[0] < -1e29
    assert ((got[0] < -1e29) == empty_BLG).all()
    for a, b in zip([got[0][~empty_BLG], *got[1:]], [expected[0][~empty_BLG], *expected[1:]], strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("barred", BARRED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_equals_the_definition(layout: str, barred: bool) -> None:
    expected = plain(layout, barred)
    assert (expected[0][..., -1] < -1e29).all()
    same(product(layout, barred, slice(0, P), None), expected)


def on_two_ranks() -> dict[tuple[str, bool], list[Tensor]]:
    first = P // 2 * dist.get_rank()
    columns = slice(first, first + P // 2)
    return {(layout, barred): product(layout, barred, columns, dist.group.WORLD) for layout in LAYOUTS for barred in BARRED}


def test_two_ranks_equal_one() -> None:
    ranks = run_distributed(on_two_ranks, 2)
    for key in ranks[0]:
        parts = [rank[key] for rank in ranks]
        gradient_BLP = torch.cat([part[2] for part in parts], -1)
        for part in parts:
            same([part[0], part[1], gradient_BLP], product(*key, slice(0, P), None))


@pytest.mark.parametrize("gap", [10.0, 80.0, 140.0])
def test_fp32_reaches_140_nats_below_the_largest_value(gap: float) -> None:
    """Group 0 lies `gap` below group 1; the index lies above both by as much. In plain fp32 exp ends at 87."""
    vocab = VocabShard.whole(Vocabulary(tokenizer_size=6, model_size=6, padded_size=6, mask_id=None, eos_id=0))
    members_PG = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1], [1, 0], [1, 0]])
    logits_BLP = torch.tensor([[[-gap, -gap - 1, 0, 0.5, gap, -gap - 2]]])
    leaf_BLP = logits_BLP.clone().requires_grad_()
    logs_BLG, found_BL = vocab.log_group_sums(leaf_BLP, members_PG, torch.tensor([[4]]))
    low, high = logits_BLP[0, 0, [0, 1, 5]].double(), logits_BLP[0, 0, 2:4].double()
    expected = torch.stack([low.logsumexp(0), high.logsumexp(0)])
    torch.testing.assert_close(logs_BLG[0, 0].double(), expected, rtol=1e-6, atol=1e-6)
    assert found_BL.item() == gap
    if gap < 128:
        logs_BLG.sum().backward()
        assert leaf_BLP.grad is not None
        torch.testing.assert_close(leaf_BLP.grad[0, 0, [0, 1, 5]].double(), low.softmax(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(leaf_BLP.grad[0, 0, 2:4].double(), high.softmax(0), rtol=1e-6, atol=1e-6)


def test_padding_may_hold_anything_and_changes_no_bit() -> None:
    logits_BLP, members_PG, index_BL, barred_BLG = arguments("padding on the second rank")
    results = []
    for padding in (0.0, torch.nan, torch.inf):
        wide_BLP = logits_BLP.clone()
        wide_BLP[..., 13:] = padding
        leaf_BLP = wide_BLP.requires_grad_()
        logs_BLG, found_BL = VocabShard.whole(words("padding on the second rank")).log_group_sums(leaf_BLP, members_PG, index_BL, barred_BLG)
        some_loss(logs_BLG, found_BL).backward()
        assert leaf_BLP.grad is not None and (leaf_BLP.grad[..., 13:] == 0).all()
        results.append((logs_BLG.detach(), leaf_BLP.grad))
    for logs_BLG, gradient_BLP in results[1:]:
        torch.testing.assert_close(logs_BLG, results[0][0], rtol=0, atol=0)
        torch.testing.assert_close(gradient_BLP, results[0][1], rtol=0, atol=0)


def test_only_the_given_logits_are_kept_and_the_caller_keeps_its_own() -> None:
    logits_BLP, members_PG, index_BL, barred_BLG = arguments("padding on the second rank", torch.bfloat16)
    before, leaf_BLP, saved = logits_BLP.clone(), logits_BLP.requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        logs_BLG, found_BL = VocabShard.whole(words("padding on the second rank")).log_group_sums(leaf_BLP, members_PG, index_BL, barred_BLG)
    assert [x.dtype for x in saved if x.shape == logits_BLP.shape] == [torch.bfloat16]
    some_loss(logs_BLG, found_BL).backward()
    assert leaf_BLP.grad is not None and leaf_BLP.grad.dtype == torch.bfloat16 and logs_BLG.dtype == torch.float32
    torch.testing.assert_close(leaf_BLP.detach(), before, rtol=0, atol=0)


def test_faster_products_elsewhere_do_not_reach_the_sums() -> None:
    """Autocast would round the sums to bf16, TF32 to ten bits; the process' own choice is left as it was."""
    logits_BLP, members_PG, index_BL, barred_BLG = arguments("padding on the second rank", torch.float32)
    vocab = VocabShard.whole(words("padding on the second rank"))
    gradients = []
    switch, found = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    try:
        for autocast, precision in ((False, found), (True, "tf32")):
            switch.fp32_precision = precision
            leaf_BLP = logits_BLP.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                logs_BLG, found_BL = vocab.log_group_sums(leaf_BLP, members_PG, index_BL, barred_BLG)
                some_loss(logs_BLG, found_BL).backward()
            assert switch.fp32_precision == precision and leaf_BLP.grad is not None
            gradients.append(leaf_BLP.grad)
    finally:
        switch.fp32_precision = found
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
