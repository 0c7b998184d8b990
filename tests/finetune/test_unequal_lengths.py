"""Examples of unequal lengths in one padded batch are what each is alone: logits, losses and gradients, for every objective.

The network is the plain one with random weights; that training's backbone is the same function is for tests/backbones.

Shape suffixes: B examples, L positions, V classes.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from finetune.sft_data import SFTExamples
from pretrain.build import OBJECTIVES
from pretrain.convert.param_map import network_config
from pretrain.data.arrays import stack, to_micro_batch
from pretrain.data.batch import MicroBatch
from pretrain.data.samples import NumberedSample
from pretrain.data.sft_format import SFTFormat
from pretrain.data.tokenizer import Tokenizer
from pretrain.hf_model.modeling_dit import DiT
from pretrain.objectives.base import Corrupted, Objective
from pretrain.objectives.config import EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.run_config import input_config
from tests.small_run import small_config, word_problems

METHODS = {
    "ar": ObjectiveConfig(name="ar"),
    "mdlm": ObjectiveConfig(name="mdlm"),
    "duo": ObjectiveConfig(name="duo"),
    "esolm diffusion": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "esolm sequential": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.0)),
    "replaid": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=4, schedule_hidden=8)),
    "replaid table": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=4, schedule_hidden=8, prompt_embedding=True)),
    "prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=9)),
}


def network_of(objective: Objective, config: ObjectiveConfig) -> nn.Module:
    from pretrain.backbones.config import BackboneConfig

    backbone = BackboneConfig(kind="dit", hidden=16, layers=2, heads=2, cond_dim=8, inputs=input_config(config))
    torch.manual_seed(0)
    network = DiT(network_config(backbone, objective.vocabulary.model_size)).double()
    for parameter in network.parameters():  # zero heads and gates would hide everything
        nn.init.normal_(parameter, std=0.3)
    return network


def cut(sample: Corrupted, length: int, whole: int) -> Corrupted:
    """The sample without the padding after `length` positions; a pair of streams loses it in both."""

    def shorter(array: np.ndarray) -> np.ndarray:
        if array.ndim == 0 or len(array) not in (whole, 2 * whole):
            return array
        return np.concatenate([part[:length] for part in np.split(array, len(array) // whole)])

    return Corrupted({k: shorter(v) for k, v in sample.inputs.items()}, {k: shorter(v) for k, v in sample.targets.items()}, sample.count, sample.t)


def outcome(objective: Objective, network: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, losses [B], and the gradient of their sum."""
    network.zero_grad()
    vocab = VocabShard.whole(objective.vocabulary)
    inputs, targets = objective.prepare(batch.inputs, batch.targets, evaluation=False)
    logits_BLV = network(objective.network_input(inputs, vocab))
    padding = objective.vocabulary.padded_size - logits_BLV.shape[-1]
    loss_B = objective.token_loss(nn.functional.pad(logits_BLV, (0, padding)), targets, vocab).loss_B
    loss_B.sum().backward()
    return logits_BLV.detach(), loss_B.detach(), {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("method", METHODS)
def test_a_padded_batch_is_its_examples_alone(tmp_path: Any, method: str) -> None:
    config, run = METHODS[method], small_config(tmp_path, METHODS[method])
    tokenizer = Tokenizer(run.tokenizer)
    mask, size, eos = config.has_mask, tokenizer.size, tokenizer.eos_id
    words = Vocabulary(tokenizer_size=size, model_size=size + mask, padded_size=size + mask + 3, mask_id=size if mask else None, eos_id=eos)
    objective = OBJECTIVES[config.name](words, config)
    context = 40
    examples = SFTExamples(word_problems(0, 4), tokenizer, SFTFormat(context=context, padding="unscored"))
    lengths = [sum(map(len, examples.ids(n))) for n in range(4)]
    assert len(set(lengths)) > 1 and max(lengths) < context
    rows = [examples.row(n, objective.lookahead) for n in range(4)]
    samples = [
        objective.corrupt(row.tokens_L, row.documents_L, Noise(5, n, n, 4), evaluation=False, prompt=row.prompt_L) for n, row in enumerate(rows)
    ]
    network = network_of(objective, config)
    together = outcome(objective, network, to_micro_batch(stack(NumberedSample(n, sample) for n, sample in enumerate(samples)), pin=False))
    gradients: dict[str, Tensor] = {}
    for n, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        # The last token of an autoregressive example is a target only.
        alone = outcome(objective, network, to_micro_batch(stack([NumberedSample(n, cut(sample, length, context))]), pin=False))
        torch.testing.assert_close(alone[1][0], together[1][n], rtol=1e-5, atol=1e-5)
        # Eso-LM leaves out of the noisy stream what is clean in the whole batch: the positions that both hold are compared.
        first = max(length - alone[0].shape[1], context - together[0].shape[1])
        ours = alone[0][0, first - length + alone[0].shape[1] :]
        theirs = together[0][n, first - context + together[0].shape[1] : length - context + together[0].shape[1]]
        assert len(ours) == length - first > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
        for name, gradient in alone[2].items():
            gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + gradient
    for name, gradient in together[2].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=2e-5)


