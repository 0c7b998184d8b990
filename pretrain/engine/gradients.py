"""Gradients of parameters that several ranks hold: which sums make them whole."""

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from pretrain.parallel.groups import Groups


def partial_over_tensor(parameter: nn.Parameter) -> bool:
    """Whether each tensor-parallel rank computes only a part of a replicated parameter's gradient: it sees its part of the sequence
    (sequence parallelism) or its own heads (query and key norms)."""
    sequence_parallel = getattr(parameter, "sequence_parallel", False) and not getattr(parameter, "tensor_model_parallel", False)
    return bool(sequence_parallel or getattr(parameter, "partial_over_tensor", False))


def sum_replicated(named: Iterator[tuple[str, nn.Parameter]], groups: Groups) -> None:
    """After the schedule's backward passes: sum partial gradients over tensor-parallel ranks, and the time embedding's over stages.

    Without sequence parallelism the gradients of replicated parameters are already equal on all tensor-parallel ranks and are left alone.
    """
    for name, parameter in named:
        gradient = accumulated_gradient(parameter)
        if gradient is None:
            continue
        if groups.tensor.size > 1 and partial_over_tensor(parameter):
            dist.all_reduce(gradient, group=groups.tensor.group)
        if groups.pipeline.size > 1 and name.startswith("time."):
            dist.all_reduce(gradient, group=groups.pipeline.group)


def accumulated_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Where the gradient of a step gathers: DeepSpeed's fp32 buffer under bf16, else .grad."""
    buffer = getattr(parameter, "_hp_grad", None)
    return parameter.grad if buffer is None else buffer


def sum_in_backward(parameters: Iterator[nn.Parameter], groups: Groups) -> None:
    """For ZeRO 2 and 3, whose hooks reduce each gradient as soon as it exists: sum partial gradients before those hooks see them."""
    if groups.tensor.size == 1:
        return

    def summed(gradient: Tensor) -> Tensor:
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=groups.tensor.group)
        return whole

    for parameter in parameters:
        if partial_over_tensor(parameter):
            parameter.register_hook(summed)
