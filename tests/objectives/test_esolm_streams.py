"""A noisy stream that holds the end of the order only: the same losses and gradients as the whole stream, through both backbones' patterns."""

import numpy as np
import pytest
import torch

from pretrain.backbones.attention import dense_mask
from pretrain.backbones.flops import forward_flops_per_token, training_flops_per_token
from pretrain.hf_model.attention_patterns import attention_pattern
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.objectives.config import EsoLMConfig, ObjectiveConfig
from pretrain.objectives.esolm import EsoLM
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests.test_rules import BASE

WORDS = Vocabulary(tokenizer_size=20, model_size=21, padded_size=21, mask_id=20, eos_id=0)
VOCAB = VocabShard.whole(WORDS)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", ["dit", "llama"])
def test_the_cut_changes_nothing(kind: str, documents: bool) -> None:
    objective = EsoLM(WORDS, ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.8)))
    length, samples = 32, []
    for index in range(3):
        tokens = np.random.default_rng(index).integers(0, 20, length)
        numbers = np.where(np.arange(length) < 20, 0, 1 if index else -1).astype(np.int32) if documents else np.zeros(length, np.int32)
        samples.append(objective.corrupt(tokens, numbers, Noise(3, index, index, 3, part=1, share=0.5), evaluation=False))
    inputs, targets = (
        {key: torch.from_numpy(np.stack([getattr(sample, part)[key] for sample in samples])) for key in getattr(samples[0], part)}
        for part in ("inputs", "targets")
    )
    torch.manual_seed(0)
    network = build_network(NetworkConfig(kind=kind, vocab_size=21, hidden=16, layers=2, heads=2, kv_heads=2, ffn=32, cond_dim=8)).double()  # type: ignore[arg-type]
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)

    def answers(inputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        logits_BLV = network(objective.network_input(inputs, VOCAB))
        loss_B = objective.token_loss(logits_BLV, targets, VOCAB).loss_B
        return loss_B.detach(), list(torch.autograd.grad(loss_B.sum(), list(network.parameters()))), logits_BLV.shape[1]

    whole, cut = answers(inputs, targets), answers(*objective.prepare(inputs, targets, evaluation=False))
    assert whole[2] == length and cut[2] < length and cut[2] % 8 == 0
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-6, atol=1e-6)
    for got, want in zip(cut[1], whole[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("noisy", [1, 3, 5])
def test_patterns_against_a_loop(noisy: int) -> None:
    clean, documents_BL = 5, torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1]])
    documents_BL = torch.cat((documents_BL[:, 5 - noisy : 5], documents_BL[:, 5:]), 1)
    positions_BL = torch.zeros_like(documents_BL)
    inputs = NetworkInput(
        positions_BL=positions_BL, conditioning_B=torch.zeros(1), attention=Attention.TWO_STREAM, documents_BL=documents_BL, noisy=noisy
    )
    pattern = attention_pattern(inputs).allowed_B1LS
    mask = dense_mask(Attention.TWO_STREAM, documents_BL, noisy)
    assert pattern is not None and torch.equal(pattern, mask)
    for q in range(noisy + clean):
        for k in range(noisy + clean):
            order_q, order_k = (i - noisy if i >= noisy else clean - noisy + i for i in (q, k))
            clean_key = k >= noisy
            want = (k == q or (clean_key and order_k < order_q)) if q < noisy else (clean_key and order_k <= order_q)
            assert bool(mask[0, 0, q, k]) == (want and documents_BL[0, q] == documents_BL[0, k]), (q, k)


def test_micro_batches_without_a_scored_position_keep_a_stream() -> None:
    objective = EsoLM(WORDS, ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)))
    padding = objective.corrupt(np.zeros(32, np.int64), np.full(32, -1, np.int32), Noise(1, 0, 0, 1, part=1, share=0.5), evaluation=True)
    inputs, targets = (
        {key: torch.from_numpy(np.stack([value])) for key, value in arrays.items()} for arrays in (padding.inputs, padding.targets)
    )
    cut, kept = objective.prepare(inputs, targets, evaluation=True)
    assert cut["noisy"].shape == kept["masked"].shape == (1, 8) and cut["ids"].shape == (1, 40)


def test_operations_of_two_streams() -> None:
    """A noisy stream of half the length: 1.5 times the positions in the layers, half of them in the head."""
    backbone, length = BASE.backbone, 2048
    plain = training_flops_per_token(backbone, 32001, length, attention=False)
    head = 3 * 2 * 32001 * backbone.hidden
    assert training_flops_per_token(backbone, 32001, length, attention=False, two_stream=1.0, noisy=0.5) == pytest.approx(
        1.5 * (plain - head) + 0.5 * head
    )
    scores = 4.0 * backbone.layers * backbone.hidden * length
    assert forward_flops_per_token(backbone, 32001, length, attention=True) - plain / 3 == pytest.approx(scores)
    both = training_flops_per_token(backbone, 32001, length, two_stream=1.0, noisy=1.0)
    assert both == pytest.approx(2 * (plain - head) + head + 3 * 4 * scores)
