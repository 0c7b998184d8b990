"""`VocabShard.cross_entropy_and_mean` against plain float64 autograd, on one rank and on two.

Shape suffixes: B sequences, L positions, E width of the table, P padded vocabulary.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests.distributed import run_distributed

B, L, E, P = 3, 4, 3, 16


def words(model: int = 13, mask: int | None = 12) -> Vocabulary:
    return Vocabulary(tokenizer_size=min(model, 12), model_size=model, padded_size=P, mask_id=mask, eos_id=0)


LAYOUTS = {
    "padding and mask on the second rank": words(),
    "mask on the first rank": words(mask=3),
    "the second rank holds padding only": words(model=8, mask=7),
    "the second rank holds padding and the mask only": words(model=9, mask=8),
}
LEARNS_B = torch.tensor([True, False, True])


def allowed(vocabulary: Vocabulary) -> list[int]:
    return [i for i in range(vocabulary.model_size) if i != vocabulary.mask_id]


def arguments(vocabulary: Vocabulary, shift: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, evidence, table, index; forbidden columns shout. `shift` moves every logit, which changes nothing."""
    generator = torch.Generator().manual_seed(3)
    logits_BLP = 2 * torch.randn(B, L, P, dtype=torch.float64, generator=generator) + shift
    logits_BLP[..., [i for i in range(P) if i not in allowed(vocabulary)]] = 50.0
    evidence_BLE, table_PE = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((B, L, E), (P, E)))
    index_BL = torch.tensor(allowed(vocabulary))[torch.randint(len(allowed(vocabulary)), (B, L), generator=generator)]
    return logits_BLP, evidence_BLE, table_PE, index_BL


def value_of(nats_BL: Tensor, mean_BLE: Tensor) -> Tensor:
    weight_BL = torch.linspace(0.5, 1.5, B * L, dtype=nats_BL.dtype).reshape(B, L)
    return (weight_BL * nats_BL).sum() + mean_BLE.sin().sum() * 2


def product(vocab: VocabShard, *, columns: slice, with_evidence: bool, shift: float = 0.0) -> list[Tensor]:
    """nats, mean, and gradients of logits, table and evidence."""
    logits_BLP, evidence_BLE, table_PE, index_BL = arguments(vocab.vocabulary, shift)
    leaves = [x.clone().requires_grad_() for x in (logits_BLP[..., columns], table_PE[columns], evidence_BLE)]
    nats_BL, mean_BLE = vocab.cross_entropy_and_mean(leaves[0], leaves[2] if with_evidence else None, leaves[1], index_BL, LEARNS_B)
    value_of(nats_BL, mean_BLE).backward()
    return [nats_BL.detach(), mean_BLE.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def plain(vocabulary: Vocabulary, *, with_evidence: bool) -> list[Tensor]:
    """A vocabulary without the forbidden columns, and a table of its own, constant where a sequence does not teach it, for each sequence."""
    logits_BLP, evidence_BLE, table_PE, index_BL = arguments(vocabulary)
    leaves = [x.clone().requires_grad_() for x in (logits_BLP, table_PE, evidence_BLE)]
    keep = allowed(vocabulary)
    tables_BVE = torch.stack([leaves[1][keep] if learns else leaves[1][keep].detach() for learns in LEARNS_B])
    logits_BLV = leaves[0][..., keep] + (leaves[2] @ tables_BVE.transpose(1, 2) if with_evidence else 0.0)
    logp_BLV = logits_BLV.log_softmax(-1)
    nats_BL = -logp_BLV.gather(-1, torch.searchsorted(torch.tensor(keep), index_BL).unsqueeze(-1)).squeeze(-1)
    mean_BLE = logp_BLV.exp() @ tables_BVE
    value_of(nats_BL, mean_BLE).backward()
    return [nats_BL.detach(), mean_BLE.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def two_ranks() -> dict[tuple[str, bool], list[Tensor]]:
    columns = slice(8, 16) if dist.get_rank() else slice(0, 8)
    return {
        (name, evidence): product(
            VocabShard(layout, start=columns.start, end=columns.stop, group=dist.group.WORLD), columns=columns, with_evidence=evidence, shift=-900.0
        )
        for name, layout in LAYOUTS.items()
        for evidence in (True, False)
    }


@pytest.fixture(scope="module")
def by_rank() -> list[dict[tuple[str, bool], list[Tensor]]]:
    return run_distributed(two_ranks, 2)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("with_evidence", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_and_two_equal_plain_torch(layout: str, with_evidence: bool, by_rank: list[dict[tuple[str, bool], list[Tensor]]]) -> None:
    """Values and every gradient; on two ranks with logits moved by -900, so that a rank without an allowed column must not set the scale."""
    expected = plain(LAYOUTS[layout], with_evidence=with_evidence)
    one = product(VocabShard.whole(LAYOUTS[layout]), columns=slice(0, P), with_evidence=with_evidence)
    for a, b in zip(one, expected, strict=True):
        close(a, b)
    first, second = (results[layout, with_evidence] for results in by_rank)
    for rank in (first, second):
        for replicated in (0, 1, 4):
            close(rank[replicated], expected[replicated])
    close(torch.cat((first[2], second[2]), -1), expected[2])
    close(torch.cat((first[3], second[3])), expected[3])
    assert (one[2][..., [i for i in range(P) if i not in allowed(LAYOUTS[layout])]] == 0).all()


def test_bf16_logits_in_any_memory_order_and_what_is_kept() -> None:
    """As the engine hands them out, [L, B, v] transposed: the result in fp32, the gradient in bf16; nothing else of that size is saved."""
    logits_BLP, evidence_BLE, table_PE, index_BL = arguments(words())
    vocab, results = VocabShard.whole(words()), []
    for order in (logits_BLP, logits_BLP.transpose(0, 1).contiguous().transpose(0, 1)):
        leaf_BLP = order.bfloat16().requires_grad_()
        before = leaf_BLP.detach().clone()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # noqa: B023
            nats_BL, mean_BLE = vocab.cross_entropy_and_mean(leaf_BLP, evidence_BLE.float(), table_PE.float(), index_BL, LEARNS_B)
        assert [x.dtype for x in saved if x.numel() >= B * L * P] == [torch.bfloat16]
        value_of(nats_BL, mean_BLE).backward()
        assert nats_BL.dtype == mean_BLE.dtype == torch.float32 and leaf_BLP.grad is not None and leaf_BLP.grad.dtype == torch.bfloat16
        torch.testing.assert_close(leaf_BLP.detach(), before, rtol=0, atol=0)
        results.append([nats_BL, mean_BLE, leaf_BLP.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_autocast_and_fast_products_elsewhere_do_not_reach_it() -> None:
    """bf16 products would change the mean in its third digit: value and gradients are bit for bit those without autocast."""
    logits_BLP, evidence_BLE, table_PE, index_BL = (x.float() if x.is_floating_point() else x for x in arguments(words()))
    results = []
    for autocast in (False, True):
        leaves = [x.clone().requires_grad_() for x in (logits_BLP, evidence_BLE, table_PE)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = VocabShard.whole(words()).cross_entropy_and_mean(*leaves, index_BL, LEARNS_B)
            value_of(*found).backward()
        results.append([*found, *(x.grad for x in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
