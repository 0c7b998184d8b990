"""AdamW with declared decay groups, the objective's own fp32 optimizer, and an average of the weights."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.engine.config import OptimizerConfig
from pretrain.parallel.groups import Groups
from pretrain.parallel.sharding import ParameterSpec


def parameter_groups(named: list[tuple[str, nn.Parameter]], table: dict[str, ParameterSpec], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups with their weight decay. Every pipeline stage gets the same groups, none empty: the gradient norm takes one collective per group."""
    if config.decay == "all":
        return [{"params": [p for _, p in named], "weight_decay": config.weight_decay, "name": "all"}]
    decayed = [p for name, p in named if table[name].matrix]
    rest = [p for name, p in named if not table[name].matrix]
    assert decayed and rest, "a pipeline stage without matrices or without norms would hang the gradient norm of the others"
    return [
        {"params": decayed, "weight_decay": config.weight_decay, "name": "matrices"},
        {"params": rest, "weight_decay": 0.0, "name": "vectors and embeddings"},
    ]


def adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer that DeepSpeed shards; its learning rate is set before every step."""
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


class ObjectiveOptimizer:
    """AdamW over an objective's own parameters, in fp32 outside DeepSpeed (whose bf16 engine would cast them).

    Each parameter's gradient is a sum over data-parallel replicas and pipeline stages, and over tensor-parallel ranks where the parameter
    is marked `partial_over_tensor`. Its learning rate is the run's; where the parameter has a `learning_rate` of its own, that takes the place
    of the schedule's peak, and warms up and decays with it (as Plaid's one scheduler does with all its groups).

    Parameters marked `clip_apart` minimise something else than the run's loss (RePlaid's schedule: a variance). Their gradients are in other
    units, so they are clipped among themselves, and do not count in the model's gradient norm.
    """

    def __init__(self, modules: nn.ModuleDict, config: OptimizerConfig, groups: Groups) -> None:
        self.parameters = [p for p in modules.parameters() if p.requires_grad]
        self._groups = groups
        self._optimizer: torch.optim.AdamW | None = None
        if self.parameters:
            each = [{"params": [p], "weight_decay": getattr(p, "weight_decay", 0.0)} for p in self.parameters]
            self._optimizer = torch.optim.AdamW(each, lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps)

    def reduce(self) -> tuple[float, float]:
        """Sum gradients over the ranks that contribute; the squared norms of the result: of what belongs to the model, and of what is apart."""
        squared = torch.zeros(2, dtype=torch.float64)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            axes = [self._groups.pipeline, self._groups.data]
            if getattr(parameter, "partial_over_tensor", False):
                axes.append(self._groups.tensor)
            for axis in axes:
                if axis.size > 1:
                    dist.all_reduce(parameter.grad, group=axis.group)
            squared[int(_apart(parameter))] += parameter.grad.double().square().sum().cpu()
        return float(squared[0]), float(squared[1])

    def step(self, lr: float, gradient_scale: float, apart_scale: float, *, peak: float) -> None:
        """Scale gradients (by the clips and the loss convention), update, clear. `peak` is the schedule's highest rate."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            own = getattr(group["params"][0], "learning_rate", None)
            group["lr"] = lr if own is None else own * lr / peak
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(apart_scale if _apart(parameter) else gradient_scale)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def discard(self) -> None:
        """Clear gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict() if self._optimizer else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._optimizer:
            self._optimizer.load_state_dict(state)


def _apart(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "clip_apart", False))


def update_average(optimizer: torch.optim.Optimizer, flat_partitions: list[Tensor], decay: float) -> None:
    """EMA of this rank's fp32 weights, kept as optimizer state (so that checkpoints carry and reshape it like a moment)."""
    for flat in flat_partitions:
        state = optimizer.state[flat]
        if "ema" not in state:
            state["ema"] = flat.detach().clone()
        else:
            state["ema"].lerp_(flat.detach(), 1 - decay)
