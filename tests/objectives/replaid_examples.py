"""A small RePlaid with a small network, in float64, and the pass that an engine makes over a micro-batch.

Shape suffixes: B sequences, L positions, E width of an embedding, H hidden units, V vocabulary that can win, P padded vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pretrain.hf_model.network_input import NetworkInput
from pretrain.objectives.config import ObjectiveConfig, RePlaidConfig
from pretrain.objectives.replaid import RePlaid
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary

WORDS = Vocabulary(tokenizer_size=9, model_size=10, padded_size=12, mask_id=9, eos_id=0)
VOCAB = VocabShard.whole(WORDS)
V, P, E, L = 9, 12, 3, 5

Batch = tuple[dict[str, Tensor], dict[str, Tensor]]


def small(vocabulary: Vocabulary = WORDS, **constants: object) -> RePlaid:
    """A float64 objective in the middle of its ramp."""
    settings = RePlaidConfig(**({"latent": E, "schedule_hidden": 16, "prior_ramp_steps": 10} | constants))  # type: ignore[arg-type]
    objective = RePlaid(vocabulary, ObjectiveConfig(name="replaid", replaid=settings))
    objective.modules().double()
    objective.running.steps.fill_(6)
    return objective


def batch(objective: RePlaid, size: int = 8, *, length: int = L, step: int = 3, evaluation: bool = False) -> Batch:
    """Global batch of a step. The third sample is cut short and the sixth is empty; padding ids are ones no model could predict."""
    samples = []
    for place in range(size):
        text_L = np.arange(length) < {2: length - 2, 5: 0}.get(place, length)
        tokens_L = np.where(text_L, np.random.default_rng(place).integers(0, V, length), WORDS.mask_id)
        noise = Noise(seed=5, index=step * size + place, position=place, batch=size, step=step)
        samples.append(objective.corrupt(tokens_L, np.where(text_L, 0, -1).astype(np.int32), noise, evaluation=evaluation))
    return tuple(  # type: ignore[return-value]
        {key: torch.from_numpy(np.stack([arrays[key] for arrays in group])) for key in group[0]}
        for group in ([s.inputs for s in samples], [s.targets for s in samples])
    )


@dataclass
class SmallNetwork:
    """logits = W tanh(A z + C estimate + gamma d), all float64 leaves."""

    inner_EH: Tensor
    estimate_EH: Tensor
    gamma_H: Tensor
    outer_HP: Tensor

    @classmethod
    def random(cls) -> "SmallNetwork":
        generator = torch.Generator().manual_seed(2)
        shapes = ((E, 8), (E, 8), (8,), (8, P))
        return cls(*(torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes))

    def parameters(self) -> list[Tensor]:
        return [self.inner_EH, self.estimate_EH, self.gamma_H, self.outer_HP]

    def __call__(self, z_BLE: Tensor, estimate_BLE: Tensor, gamma_B: Tensor) -> Tensor:
        return torch.tanh(z_BLE @ self.inner_EH + estimate_BLE @ self.estimate_EH + gamma_B[:, None, None] * self.gamma_H) @ self.outer_HP

    def forward(self, inputs: NetworkInput) -> Tensor:
        """[B, L, P]."""
        assert inputs.latents_BLE is not None and inputs.estimate_BLE is not None
        return self(inputs.latents_BLE, inputs.estimate_BLE, inputs.conditioning_B)


def with_estimate(objective: RePlaid, network: SmallNetwork, prepared: Batch, *, evaluation: bool = False) -> dict[str, Tensor]:
    """The inputs after the first pass over the sequences that want one."""
    inputs, targets = prepared
    rows_B = objective.preliminary_rows(inputs, evaluation=evaluation)
    assert rows_B is not None
    packed_inputs, packed_targets = ({key: value[rows_B] for key, value in group.items()} for group in prepared)
    with torch.no_grad():
        logits_BLP = network.forward(objective.network_input(packed_inputs, VOCAB))
    estimate_BLE = torch.zeros(*inputs["ids"].shape, objective.preliminary_width(), dtype=torch.float64)
    estimate_BLE[rows_B] = objective.preliminary_result(logits_BLP, packed_targets, VOCAB)
    return inputs | {"estimate": estimate_BLE}


def training_pass(objective: RePlaid, network: SmallNetwork, prepared: Batch, *, scale: float) -> tuple[Tensor, Tensor]:
    """Both passes, backward and `finish`. loss_B, and the estimate that was fed."""
    inputs, targets = with_estimate(objective, network, prepared), prepared[1]
    loss_B = objective.token_loss(network.forward(objective.network_input(inputs, VOCAB)), targets, VOCAB).loss_B
    (loss_B.sum() * scale).backward()
    objective.finish(targets, loss_B.detach())
    return loss_B.detach(), inputs["estimate"]
