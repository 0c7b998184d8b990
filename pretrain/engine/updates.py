"""What follows the backward passes of a step: the gradient norm first, and then either the update or nothing at all.

DeepSpeed's optimizers compute their norm inside `step`. Here it is computed before, and handed to `step` in place of a second computation; and
a step that is not to be taken goes the way that DeepSpeed keeps for overflows, which clears gradients and touches nothing else.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pretrain.engine.optimizer import ObjectiveOptimizer
from pretrain.parallel.groups import Groups


class Updates:
    """The two optimizers of an engine: DeepSpeed's over the network, and the objective's own.

    clip     global gradient norm of both; 0: none.
    peak_lr  the schedule's highest rate.
    """

    def __init__(self, deepspeed: Any, objective: ObjectiveOptimizer, groups: Groups, *, zero_stage: int, clip: float, peak_lr: float) -> None:
        self._deepspeed, self._optimizer, self._objective = deepspeed, deepspeed.optimizer, objective
        self._stage, self._clip, self._peak_lr = zero_stage, clip, peak_lr
        self._undo = 1.0 / groups.data.size  # what DeepSpeed's average does for the network
        self._norms: Any = None
        self._network = self._joint = self._apart = 0.0

    def measure(self) -> float:
        """The gradient norm of the whole model, nan if it is not finite on any rank; the same on every rank. Collective."""
        norm = self._network_norm()
        self._network = norm if norm >= 0 and math.isfinite(norm) else math.nan  # DeepSpeed answers -1
        self._joint, self._apart = self._network, 0.0
        if self._objective.parameters:
            own, self._apart = (squared**0.5 * self._undo for squared in self._objective.reduce())
            self._joint = (own**2 + self._network**2) ** 0.5
        return self._joint if math.isfinite(self._joint) and math.isfinite(self._apart) else math.nan

    def apply(self, lr: float) -> None:
        """Clip both by their joint norm, and update. Call it after `measure`."""
        if self._objective.parameters:
            # DeepSpeed is given the threshold that makes its own clip the joint one.
            if self._clip:
                self._optimizer.clip_grad = self._clip * self._network / max(self._joint, 1e-30)
            factor, apart = (min(1.0, self._clip / (norm + 1e-6)) if self._clip else 1.0 for norm in (self._joint, self._apart))
            self._objective.step(lr, self._undo * factor, self._undo * apart, peak=self._peak_lr)
        with self._norm_in_place(self._norms):
            self._step()

    def discard(self) -> None:
        """Clear every gradient of the step, and leave weights, moments and counts as they are."""
        self._objective.discard()
        kind = self._optimizer
        if self._stage == 1 and hasattr(kind, "get_grads_for_norm"):
            kind.zero_grad()
            return
        invalid = torch.tensor(-1.0)  # DeepSpeed's sign for a norm that is not finite
        with self._norm_in_place([invalid] if self._stage == 3 else invalid, checked=True):
            self._step()

    def _step(self) -> None:
        if self._stage > 1:  # its engine counts micro-batches
            self._deepspeed.step()
        else:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _network_norm(self) -> float:
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        optimizer = self._optimizer
        if hasattr(optimizer, "get_grads_for_norm"):
            gradients, _ = optimizer.get_grads_for_norm()
            self._norms = get_global_norm_of_tensors(gradients, mpu=self._deepspeed.mpu)
            return float(self._norms)
        if self._stage == 3:
            self._norms = optimizer._get_norm_groups()
            groups = torch.stack([norm.float() for norm in self._norms])
            return -1.0 if bool((groups < 0).any()) else float(torch.linalg.vector_norm(groups))
        self._norms = optimizer.scaled_global_norm()
        return float(self._norms)

    @contextmanager
    def _norm_in_place(self, norms: Tensor | list[Tensor] | float, checked: bool = False) -> Iterator[None]:
        """Let DeepSpeed's next `step` find these norms instead of computing them; `checked`: and heed one that is invalid."""
        optimizer = self._optimizer
        if hasattr(optimizer, "get_grads_for_norm"):  # bf16: a function of its module
            import deepspeed.runtime.bf16_optimizer as owner

            changes: list[tuple[Any, str, Any]] = [(owner, "get_global_norm_of_tensors", lambda *_, **__: norms)]
        elif self._stage == 3:
            changes = [(optimizer, "_get_norm_groups", lambda: norms)]
        else:
            changes = [(optimizer, "scaled_global_norm", lambda *_, **__: norms), (optimizer, "check_grad_overflow", checked)]
            changes += [(optimizer, "check_overflow", lambda *_, **__: None)]
        before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in changes]
        for owner, name, value in changes:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                if value is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


_MISSING = object()
