"""This rank's place on the tensor, pipeline and data axes, and the process groups along them."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pretrain.parallel import platform
from pretrain.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Axis:
    """One axis of the layout: this rank's coordinate, the axis' size, and the group of ranks along it."""

    rank: int
    size: int
    group: dist.ProcessGroup

    @property
    def last(self) -> bool:
        """Whether this rank is the last along the axis."""
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Groups:
    """The three axes. Handed down as an argument; nothing below reads global state."""

    tensor: Axis
    pipeline: Axis
    data: Axis
    world_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """The rank that prints and writes logs."""
        return self.world_rank == 0

    @property
    def reports_loss(self) -> bool:
        """One rank per data-parallel replica: the last stage's first tensor-parallel rank, whose sums stand for the replica."""
        return self.pipeline.last and self.tensor.rank == 0


def initialize(config: ParallelConfig, *, seed: int, timeout_minutes: float = 30) -> Groups:
    """Join the process group that torchrun describes (or make one of size 1) and lay megatron-core's groups over it."""
    from megatron.core import parallel_state as megatron_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    platform.prepare()
    platform.silence_renamed_collectives()
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(key, value)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        single = os.environ["WORLD_SIZE"] == "1" and os.environ["MASTER_PORT"] == "0"
        dist.init_process_group(
            platform.backend(),
            store=dist.HashStore() if single else None,  # type: ignore[attr-defined]
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(minutes=timeout_minutes),
        )
    virtual = config.virtual_pipeline if config.virtual_pipeline > 1 else None
    megatron_state.initialize_model_parallel(config.tensor, config.pipeline, virtual_pipeline_model_parallel_size=virtual)
    model_parallel_cuda_manual_seed(seed)
    return current()


def current() -> Groups:
    """The groups that megatron-core holds now."""
    from megatron.core import parallel_state as ps

    return Groups(
        tensor=Axis(ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_group()),
        pipeline=Axis(ps.get_pipeline_model_parallel_rank(), ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_group()),
        data=Axis(ps.get_data_parallel_rank(), ps.get_data_parallel_world_size(), ps.get_data_parallel_group()),
        world_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )


def shutdown() -> None:
    """Leave the groups, so that the process ends without warnings."""
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class DeepSpeedView:
    """The groups as DeepSpeed's `mpu` wants them; its model-parallel rank runs over tensor ranks first, then stages."""

    def __init__(self, groups: Groups) -> None:
        from megatron.core import parallel_state as ps

        self._groups = groups
        self._model_group = ps.get_model_parallel_group()

    def get_model_parallel_rank(self) -> int:
        return self._groups.pipeline.rank * self._groups.tensor.size + self._groups.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._groups.pipeline.size * self._groups.tensor.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.tensor.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._groups.tensor.size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.tensor.group

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._groups.pipeline.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._groups.pipeline.size

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.pipeline.group

    def get_data_parallel_rank(self) -> int:
        return self._groups.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._groups.data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.data.group
