"""DeepSpeed's ZeRO files of any layout from a folder of logical tensors, on one process and without an engine.

What is written is what the engine of that layout saves after it was filled from the same folder: DeepSpeed joins each group of parameters in
the order in which the network registers them, pads the whole to twice the data-parallel ranks, and gives each rank an equal part (ZeRO 3
cuts every parameter by itself). tests/checkpoint/test_zero_writer.py compares each value of each file with an engine's.

The flat tensors are files mapped into memory, which torch.save reads page by page: one tensor-parallel shard is in memory at a time, and
the files of one model rank are on the disk twice until they are written.
"""

import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.checkpoint.layout import ZERO, Layout
from pretrain.checkpoint.reshape import LogicalFolder
from pretrain.checkpoint.zero_reader import MASTER
from pretrain.engine.config import OptimizerConfig
from pretrain.engine.optimizer import adamw, parameter_groups
from pretrain.engine.snapshot import write_file
from pretrain.engine.zero import deepspeed_settings
from pretrain.parallel.sharding import ParameterSpec

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCRATCH = "zero.scratch"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the files are for.

    table            of the network, with what belongs to which stage and group (TrainState.table).
    dtype            of the working weights: fp32, or bf16 under fp32 masters.
    lr               learning rate of the last step.
    micro_sequences, global_sequences   of the batch; DeepSpeed records what it was configured with.
    """

    layout: Layout
    table: dict[str, ParameterSpec]
    optimizer: OptimizerConfig
    dtype: torch.dtype
    lr: float
    micro_sequences: int
    global_sequences: int


def stage_order(names: list[str], table: dict[str, ParameterSpec], layout: Layout, stage: int) -> list[str]:
    """The parameters of a pipeline stage in the order in which its network registers them; names: the same of a whole network, or of any part
    that has a layer."""
    layers = sum(name.endswith("input_layernorm.weight") for name in table)
    inside = list(dict.fromkeys(name.split(".", 2)[2] for name in names if name.startswith("layers.")))
    chunks = layout.pipeline * layout.virtual_pipeline
    length = layers // chunks
    order = [name for name in names if table[name].stage == "all"]
    for virtual in range(layout.virtual_pipeline):
        chunk = virtual * layout.pipeline + stage
        order += [f"layers.{layer}.{name}" for layer in range(chunk * length, (chunk + 1) * length) for name in inside]
        order += [name for name in names if chunk == 0 and table[name].stage == "first"]
        order += [name for name in names if chunk == chunks - 1 and table[name].stage == "last"]
    return order


def write_zero(logical: LogicalFolder, folder: Path, target: Target) -> Iterator[tuple[str, Tensor]]:
    """Write `folder`/zero; yields each tensor-parallel shard of each key as it is placed. Raises OSError where the disk refuses."""
    scratch, out = folder / _SCRATCH, folder / ZERO
    out.mkdir(parents=True)
    try:
        for stage in range(target.layout.pipeline):
            for tensor_rank in range(target.layout.tensor):
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                yield from _ModelRank(logical, target, stage, tensor_rank, scratch).write(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class _Group:
    """Parameters that DeepSpeed joins: local shapes by name, and for each name where its elements begin.

    part  elements of one data-parallel rank; total: of all, with the padding at the end.
    """

    shapes: "OrderedDict[str, torch.Size]"
    data: int
    stage3: bool

    @cached_property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    @cached_property
    def part(self) -> int:
        if self.stage3:
            return sum(-(-shape.numel() // self.data) for shape in self.shapes.values())
        unit = 2 * self.data  # DeepSpeed aligns what its collectives send to four bytes of half precision
        return -(-self.numel // unit) * unit // self.data

    @cached_property
    def starts(self) -> dict[str, int]:
        """In the rank's part for ZeRO 3, in the whole otherwise."""
        starts, offset = {}, 0
        for name, shape in self.shapes.items():
            starts[name] = offset
            offset += -(-shape.numel() // self.data) if self.stage3 else shape.numel()
        return starts

    def pieces(self, name: str) -> Iterator[tuple[int, int, int, int]]:
        """(data-parallel rank, where in its part, where in the parameter, how many elements)."""
        numel, start = self.shapes[name].numel(), self.starts[name]
        for rank in range(self.data):
            if self.stage3:
                width = -(-numel // self.data)
                first, last, place = rank * width, min((rank + 1) * width, numel), start
            else:
                first, last = max(rank * self.part - start, 0), min((rank + 1) * self.part - start, numel)
                place = start + first - rank * self.part
            if first < last:
                yield rank, place, first, last - first


class _ModelRank:
    """The files of the data-parallel ranks that share a pipeline stage and a tensor rank."""

    def __init__(self, logical: LogicalFolder, target: Target, stage: int, tensor_rank: int, scratch: Path) -> None:
        self._logical, self._target, self._rank, self._scratch = logical, target, tensor_rank, scratch
        self._layout = layout = target.layout
        self._stage3 = layout.zero_stage == 3
        self._model_rank = stage * layout.tensor + tensor_rank
        self._names = stage_order(logical.order, target.table, layout, stage)
        self._shapes = {name: torch.Size(target.table[name].local_shape(layout.tensor)) for name in self._names}
        self._groups, self._param_groups = self._grouped()
        keys = dict.fromkeys((MASTER, *_MOMENTS, *logical.keys))
        self._flats = {
            (key, g, rank): self._mapped(f"{key}.{g}.{rank}", group.part, torch.float32)
            for g, group in enumerate(self._groups) for rank in range(layout.data) for key in keys
        }  # fmt: skip
        self._working = [] if self._stage3 else [self._mapped(f"working.{g}", group.numel, target.dtype) for g, group in enumerate(self._groups)]
        self._keys = [key for key in keys if key != MASTER]

    def write(self, out: Path) -> Iterator[tuple[str, Tensor]]:
        """Fill the flat tensors, then save every rank's files."""
        for g, group in enumerate(self._groups):
            for name in group.shapes:
                for key in self._logical.keys:
                    shard = self._logical.shard(name, key, self._layout.tensor, self._rank)
                    flat = shard.reshape(-1)
                    for rank, place, first, count in group.pieces(name):
                        self._flats[key, g, rank][place : place + count] = flat[first : first + count]
                    if key == MASTER and not self._stage3:
                        self._working[g][group.starts[name] : group.starts[name] + flat.numel()] = flat
                    yield f"{name}/{key}", shard
        prefix = "bf16_" if self._target.dtype is torch.bfloat16 else ""
        model_rank = f"mp_rank_{self._model_rank:02d}"
        for rank in range(self._layout.data):
            write_file(self._optimizer_file(rank), out / f"{prefix}zero_pp_rank_{rank}_{model_rank}_optim_states.pt")
            if self._stage3 or rank == 0:
                write_file(self._model_file(), out / f"{f'zero_pp_rank_{rank}_' if self._stage3 else ''}{model_rank}_model_states.pt")

    # ---- what DeepSpeed saves -----------------------------------------------------------------------------------------------------

    def _optimizer_file(self, rank: int) -> dict[str, Any]:
        return {"optimizer_state_dict": self._optimizer_state(rank), **self._common}

    def _optimizer_state(self, rank: int) -> dict[str, Any]:
        groups, data = self._groups, self._layout.data
        step = float(self._logical.step)
        state = {g: {**{key: self._flats[key, g, rank] for key in self._keys}, "step": torch.tensor(step)} for g in range(len(groups))}
        base = {"state": state, "param_groups": self._param_groups}
        masters = [self._flats[MASTER, g, rank].detach().requires_grad_() for g in range(len(groups))]
        clip = {"clip_grad": self._target.optimizer.clip}
        if self._stage3:
            return {**_scaler(3), "partition_count": data, "optimizer_state_dict": base, "fp32_flat_groups": self._numbered(masters)}
        bf16 = self._target.dtype is torch.bfloat16 and self._layout.zero_stage == 1  # DeepSpeed has an optimizer of its own for it
        padding = [group.part * data - group.numel for group in groups]
        behind = [max(0, (rank + 1) * group.part - group.numel) for group in groups]
        paddings = [min(group.part, extra) for group, extra in zip(groups, behind, strict=True)]
        if bf16:
            paddings = padding if rank == data - 1 else [0] * len(groups)
        else:
            masters = [master[: master.numel() - extra] for master, extra in zip(masters, paddings, strict=True)]
        return {
            **({} if bf16 else _scaler(self._layout.zero_stage) | {"param_alignment_paddings": [[0] * len(group.shapes) for group in groups]}),
            **clip, "base_optimizer_state": base, "single_partition_of_fp32_groups": masters, "group_paddings": paddings,
            "partition_count": [data] * len(groups), "ds_version": self._common["ds_version"],
            "param_slice_mappings": [_mapping(group, rank) for group in groups],
        }  # fmt: skip

    def _model_file(self) -> dict[str, Any]:
        layout, none = self._layout, None if self._layout.zero_stage == 1 else OrderedDict[str, Any]()
        return {
            "module": self._module(), "buffer_names": [], "optimizer": None, "param_shapes": [group.shapes for group in self._groups],
            "frozen_param_shapes": none, "shared_params": {}, "frozen_param_fragments": none, "lr_scheduler": None, "data_sampler": None,
            "random_ltd": None, "skipped_steps": 0, "global_steps": 0, "global_samples": 0,
            "dp_world_size": layout.data, "mp_world_size": layout.tensor * layout.pipeline,
            "checkpoint_parallel_dimensions": {"pp_degree": layout.pipeline, "tp_degree": layout.tensor}, **self._common,
        }  # fmt: skip

    def _module(self) -> dict[str, Tensor]:
        """Working weights: views of the flat tensors; nothing under ZeRO 3, whose masters they are made from."""
        if self._stage3:
            return {name: torch.empty(0, dtype=self._target.dtype) for name in self._names}
        place = {name: (g, group.starts[name]) for g, group in enumerate(self._groups) for name in group.shapes}
        return {
            name: self._working[place[name][0]][place[name][1] : place[name][1] + shape.numel()].view(shape) for name, shape in self._shapes.items()
        }

    @cached_property
    def _common(self) -> dict[str, Any]:
        from deepspeed.git_version_info import version

        batch = self._target
        settings = deepspeed_settings(
            zero_stage=self._layout.zero_stage, dtype=batch.dtype, clip=batch.optimizer.clip, micro_sequences=batch.micro_sequences,
            micro_batches=batch.global_sequences // (batch.micro_sequences * self._layout.data),
            largest=max(math.prod(shape) for shape in self._shapes.values()),
        )  # fmt: skip
        return {"ds_config": settings, "ds_version": version}

    # ---- helpers ------------------------------------------------------------------------------------------------------------------

    def _grouped(self) -> tuple[list[_Group], list[dict[str, Any]]]:
        """The groups of parameters, and AdamW's record of them, by the functions that the engine uses."""
        stand_ins = {name: nn.Parameter(torch.empty(1)) for name in self._names}
        names = {id(parameter): name for name, parameter in stand_ins.items()}
        chosen = parameter_groups(list(stand_ins.items()), self._target.table, self._target.optimizer)
        groups = []
        for group in chosen:
            members = [names[id(parameter)] for parameter in group["params"]]
            groups.append(_Group(OrderedDict((name, self._shapes[name]) for name in members), self._layout.data, self._stage3))
        recorded = adamw(chosen, self._target.optimizer).state_dict()["param_groups"]
        return groups, [record | {"lr": self._target.lr, "params": [g]} for g, record in enumerate(recorded)]

    def _mapped(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in a file. Its blocks are taken now: a write into a mapped file on a full disk would kill the process."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        path = self._scratch / name
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
        return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)

    def _numbered(self, masters: list[Tensor]) -> list[Tensor]:
        """ZeRO 3 names a flat tensor after the first and the last parameter in it."""
        numbers = {name: number for number, name in enumerate(self._names)}
        for master, group in zip(masters, self._groups, strict=True):
            members = list(group.shapes)
            master.ds_id = f"{numbers[members[0]]}_{numbers[members[-1]]}"  # type: ignore[attr-defined]
        return masters


def _scaler(stage: int) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return {"loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False, "zero_stage": ZeroStageEnum(stage)}


def _mapping(group: _Group, rank: int) -> "OrderedDict[str, Any]":
    """Which parameters lie in a rank's part, and where."""
    from deepspeed.utils.tensor_fragment import fragment_address

    found: OrderedDict[str, Any] = OrderedDict()
    for name in group.shapes:
        for owner, place, _, count in group.pieces(name):
            if owner == rank:
                found[name] = fragment_address(numel=count, start=place)
    return found
