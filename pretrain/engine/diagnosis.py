"""Where a step's numbers went wrong first: its passes once more, with a look at everything that modules give and get.

The order is the network's: an output before any gradient; of outputs the one nearest the input, of gradients the one nearest the loss. Names
are logical (global layer numbers), so they do not depend on the layout.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.data.batch import BatchShard, MicroBatch
from pretrain.engine.loss import SampleSums
from pretrain.engine.statistics import StepStatistics
from pretrain.engine.zero import Engine
from pretrain.parallel.groups import Groups

Kind = Literal["output", "loss", "gradient at the output", "gradient of the parameter"]
_ORDER: dict[Kind, int] = {"output": 0, "loss": 1, "gradient at the output": 2, "gradient of the parameter": 3}


@dataclass(frozen=True)
class Fault:
    """Something that was not finite. order: smaller is earlier."""

    order: tuple[int, int, int, int]
    kind: Kind
    name: str
    rank: int
    stage: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Diagnosis:
    """first: the earliest fault of all ranks; None if the step did not go wrong again. samples: whose loss is not finite, or else the ids of
    the first fault's micro-batch."""

    first: Fault | None
    samples: tuple[int, ...]

    def __str__(self) -> str:
        if self.first is None:
            return "repeating the step gave finite numbers, so a device or a connection is at fault and not the run"
        where = f"rank {self.first.rank}, pipeline stage {self.first.stage}"
        return f"first in the {self.first.kind}{f' of {self.first.name}' if self.first.name else ''} on {where}"


def diagnose(engine: Engine, shard: BatchShard) -> Diagnosis:
    """Repeat the passes of a step whose update was not taken. Collective; the engine is left as it was."""
    search = _Search(engine)
    with search.hooks():
        engine.replay(shard, search.statistics)
    everyone: list[tuple[Fault | None, tuple[int, ...]]] = [(None, ())] * engine.groups.world_size
    dist.all_gather_object(everyone, (search.first, tuple(search.bad_samples)))
    faults = [fault for fault, _ in everyone if fault is not None]
    first = min(faults, key=lambda fault: (fault.order, fault.rank), default=None)
    samples = sorted({number for _, numbers in everyone for number in numbers})
    return Diagnosis(first, tuple(samples) or (first.samples if first else ()))


class _SampleWatch(StepStatistics):
    """Keeps the samples whose loss is not finite, in place of sums."""

    def __init__(self, groups: Groups, device: torch.device, found: Callable[[MicroBatch, list[int]], None]) -> None:
        super().__init__(groups, device)
        self._found = found

    def add(self, batch: MicroBatch, sums: SampleSums) -> None:
        bad_B = ~(torch.isfinite(sums.loss_B) & torch.isfinite(sums.nelbo_B))
        if bool(bad_B.any()):
            self._found(batch, [batch.sample_ids[row] for row in bad_B.nonzero().flatten().tolist()])


class _Search:
    """The hooks of this rank, and the earliest fault that they have seen."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._groups = engine, engine.groups
        self._stage = engine.module
        self._looks = 0  # ranks of one stage look at the same things in the same order
        self.first: Fault | None = None
        self.bad_samples: list[int] = []
        self.statistics = _SampleWatch(engine.groups, engine.device, self._loss)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Look at every module and parameter while this lasts."""
        with ExitStack() as stack:
            for physical, module in self._stage.named_modules():
                if physical:
                    stack.callback(module.register_forward_hook(partial(self._output, logical_name(self._stage, physical))).remove)
            own = {f"objective.{name}": p for name, p in self._engine.objective.modules().named_parameters() if p.requires_grad}
            for name, parameter in [*self._stage.named_parameters(), *own.items()]:
                look: Callable[[Tensor], None] = partial(self._gradient, "gradient of the parameter", name, None)
                stack.callback(parameter.register_hook(look).remove)
            yield

    def _output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        batch = self._engine.in_work
        self._looks += 1
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                if not _finite(tensor):
                    self._add("output", name, batch, layer_of(name))
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(partial(self._gradient, "gradient at the output", name, batch))

    def _loss(self, batch: MicroBatch, numbers: list[int]) -> None:
        self.bad_samples += numbers
        self._add("loss", "", batch, 0)

    def _gradient(self, kind: Kind, name: str, batch: MicroBatch | None, gradient: Tensor) -> None:
        self._looks += 1
        if not _finite(gradient):
            self._add(kind, name, batch or self._engine.in_work, -layer_of(name))

    def _add(self, kind: Kind, name: str, batch: MicroBatch | None, layer: int) -> None:
        fault = Fault(
            (_ORDER[kind], layer, self._looks, self._groups.world_rank), kind, name, self._groups.world_rank, self._groups.pipeline.rank,
            batch.sample_ids if batch else (),
        )  # fmt: skip
        if self.first is None or fault.order < self.first.order:
            self.first = fault


def layer_of(name: str) -> int:
    """A module's place in the network: -1 before the first layer, then the layer's number, a million behind the last."""
    if name.startswith("layers."):
        return int(name.split(".")[1])
    return -1 if name.startswith(("embedding", "time")) else 1_000_000


def logical_name(stage: Any, physical: str) -> str:
    """chunks.1.decoder.layers.0.mlp -> layers.5.mlp; other modules without their chunk."""
    parts = physical.split(".")
    if parts[:1] == ["chunks"] and parts[2:4] == ["decoder", "layers"] and len(parts) > 4:
        return stage._logical(f"{physical}.").removesuffix(".")
    return ".".join(parts[2:] if parts[:1] == ["chunks"] else parts) or "the whole stage"


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
