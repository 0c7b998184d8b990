"""Whether an engine is worth saving: a checkpoint of weights that are no numbers would push the good ones out."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from pretrain.errors import UserError


class SavableEngine(Protocol):
    """What of pretrain.engine.zero.Engine is looked at."""

    @property
    def base_optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def objective_optimizer(self) -> Any: ...
    def flat_partitions(self) -> list[Tensor]: ...


def require_finite(engine: SavableEngine, step: int) -> None:
    """Raises UserError if this rank's master weights, their moments or average, or the objective's parameters hold a value that is not finite.

    No collective: call it through Peers.everyone. It reads each tensor once and allocates nothing of its size.
    """
    masters = engine.flat_partitions()
    states = [value for flat in masters for value in engine.base_optimizer.state[flat].values() if isinstance(value, Tensor)]
    for what, tensors in (
        ("weights", masters),
        ("optimizer's moments", states),
        ("objective's parameters", engine.objective_optimizer.parameters),
    ):
        if not _finite(tensors):
            raise UserError(
                f"step {step} was not saved, since the {what} after it are not finite: the run diverged and stops here, with its earlier "
                "checkpoints intact; lower schedule.peak, and start again with resume=changed"
            )


@torch.no_grad()
def _finite(tensors: Iterable[Tensor]) -> bool:
    # The extremes of a tensor with a nan are nan.
    extremes = [torch.stack(torch.aminmax(tensor)).float() for tensor in tensors if tensor.numel()]
    return all(bool(torch.isfinite(pair).all()) for pair in extremes)
