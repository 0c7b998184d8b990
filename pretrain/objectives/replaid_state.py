"""RePlaid's beginnings and running state: first values that no layout can change, and what is remembered from step to step."""

import torch
from torch import Tensor, nn

from pretrain.hf_model.gaussian_diffusion import UnitEmbedding
from pretrain.hf_model.monotone_schedule import LearnedSchedule
from pretrain.objectives.config import RePlaidConfig
from pretrain.parallel.initialization import initial_tensor
from pretrain.parallel.sharding import ParameterSpec

_DECAY = 0.997
"""Of the running moments, as in Plaid."""


@torch.no_grad()
def initialize(embedding: UnitEmbedding, schedule: LearnedSchedule, config: RePlaidConfig) -> None:
    """Standard normal values drawn by name, the embedding's rows scaled to length 1, and what the optimizer should know of each parameter."""
    network = schedule.interior
    named = {"embedding": embedding.weight, "slope": network.slope, "shift": network.shift, "height": network.height}
    for name, parameter in named.items():
        spec = ParameterSpec(shape=tuple(parameter.shape), init="normal", scale=1.0)
        parameter.copy_(initial_tensor(f"replaid.{name}", spec, seed=0))
    embedding.weight.copy_(embedding(0, embedding.weight.shape[0]))
    for parameter in (*named.values(), schedule.gamma_0, schedule.gamma_1):
        endpoint = parameter is schedule.gamma_0 or parameter is schedule.gamma_1
        marks = {
            "learning_rate": config.learning_rate,
            "weight_decay": config.endpoint_decay if endpoint else 0.0,
            "partial_over_tensor": parameter is embedding.weight,
            "clip_apart": parameter is not embedding.weight and not endpoint,  # the interior minimises E[loss^2], in nats squared
        }
        for mark, value in marks.items():
            setattr(parameter, mark, value)


class RunningState(nn.Module):
    """Buffers, so that checkpoints keep them. Rows: reconstruction, diffusion; columns: first and second moment of the loss per token.

    Each row is a moving average, divided by its own mass (1 - decay^n after n updates) when it is read.
    """

    moments: Tensor
    mass: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moments", torch.zeros(2, 2, dtype=torch.float64))
        self.register_buffer("mass", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def advance(self, sums: Tensor | None) -> None:
        """A step is over; sums [2, 3] are its entries, and their sums of the loss and its square. A row without entries stays as it is."""
        self.steps += 1
        if sums is None:
            return
        count_2, mean_22 = sums[:, 0], sums[:, 1:] / sums[:, :1].clamp(min=1)
        gain_2 = (1 - _DECAY) * (count_2 > 0).to(self.mass)
        self.moments.lerp_(mean_22, gain_2.unsqueeze(-1))
        self.mass.lerp_(torch.ones_like(self.mass), gain_2)

    def reconstruction_share(self) -> Tensor:
        """std of reconstruction / (sum of both stds): the split of a batch that estimates their sum with least variance; ½ until both are known."""
        known = (self.mass > 0).all()
        first_2, second_2 = (self.moments / self.mass.clamp(min=1 - _DECAY).unsqueeze(-1)).unbind(-1)
        deviation_2 = (second_2 - first_2.square()).clamp(min=0).sqrt()
        total = deviation_2.sum()
        return torch.where(known & (total > 0), deviation_2[0] / total.clamp(min=1e-300), 0.5)

    def ramp(self, steps: int) -> Tensor:
        """Share of the output prior in the step that is running: from 0 at the first to 1 after `steps` of them; 1 where there is no ramp."""
        return (self.steps.double() / steps).clamp(max=1.0) if steps else torch.ones_like(self.mass[0])
