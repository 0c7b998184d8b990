"""From one layout to any other: ZeRO files -> a folder of logical tensors -> any engine.

    logical/
      index.json                    format, AdamW's step, keys, shape and tensor-parallel cut of every parameter; written last
      layers.0.mlp.linear_fc1.weight/
        fp32.safetensors            the master weights, one full tensor called "tensor"
        exp_avg.safetensors         and AdamW's moments (and ema), if there are any
        exp_avg_sq.safetensors

This is DeepSpeed's universal directory (zero/NAME/KEY.pt), in safetensors, so that a rank reads only its slice and nothing is unpickled.
Resume in another layout, fine-tuning from a checkpoint and import from Hugging Face all fill engines through it: DeepSpeed's own
`load_universal` does not go from ZeRO 1 to 3 or back, nor to ZeRO 3 under tensor parallelism.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pretrain.checkpoint.files import remedy, replace_durably
from pretrain.checkpoint.layout import FORMAT_VERSION, PARTIAL
from pretrain.checkpoint.peers import DiskError, Peers
from pretrain.checkpoint.zero_reader import MASTER, ZeroCheckpoint
from pretrain.errors import UserError
from pretrain.parallel.groups import Groups
from pretrain.parallel.sharding import ParameterSpec

LOGICAL = "logical"
"""In a checkpoint that holds logical tensors in place of ZeRO files."""
_INDEX = "index.json"
_ENTRY = "tensor"


class FillableEngine(Protocol):
    """What of pretrain.engine.zero.Engine is filled: DeepSpeed's optimizer (ZeRO 1, 2, 3 or BF16_Optimizer) over `module`'s logical names."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def groups(self) -> Groups: ...


# ---- the folder -------------------------------------------------------------------------------------------------------------------


def write_tensor(folder: Path, name: str, key: str, tensor: Tensor) -> None:
    """Add one full tensor to a folder of logical tensors."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    save_file({_ENTRY: tensor.contiguous()}, folder / name / f"{key}.safetensors")


def write_index(folder: Path, table: Mapping[str, ParameterSpec], keys: list[str], step: int, order: list[str] | None = None) -> None:
    """Complete a folder of logical tensors.

    keys   what every parameter has: at least fp32. Without moments an engine starts with zero moments.
    step   AdamW's step count.
    order  names as the network that was trained registers them, which is how ZeRO's flat tensors are joined; None: not known.
    """
    parameters = {name: {"shape": spec.shape, "axis": spec.axis, "sections": spec.sections} for name, spec in table.items()}
    index = {"format": FORMAT_VERSION, "step": step, "keys": keys, "order": order or [], "parameters": parameters}
    replace_durably(folder / _INDEX, json.dumps(index, indent=1) + "\n")


def write_logical(checkpoint: Path, folder: Path, peers: Peers | None = None, *, only: tuple[str, ...] = ()) -> None:
    """Convert a checkpoint of any layout to a folder of logical tensors; the ranks share the parameters out.

    only  keys to convert, as far as the checkpoint has them; all of them where none is named.

    Peak memory per rank is about twice the largest tensor, besides file cache. Raises UserError for an unreadable checkpoint or a full disk.
    """
    peers = peers or Peers.alone()

    def share() -> ZeroCheckpoint:
        source = ZeroCheckpoint(checkpoint)
        for name in list(source.table)[peers.rank :: peers.size]:
            for key in _chosen(source.keys, only):
                write_tensor(folder, name, key, source.tensor(name, key))
        return source

    try:
        peers.writer(lambda: folder.mkdir(parents=True, exist_ok=True))
        sources: list[ZeroCheckpoint] = []
        peers.everyone(lambda: sources.append(share()))
        peers.writer(lambda: _write_index_of(folder, sources[0], only))
    except DiskError as error:
        raise UserError(
            f"{checkpoint} could not be converted to another layout: {error}; {remedy(str(error), folder)}, then start again"
        ) from None


def _write_index_of(folder: Path, source: ZeroCheckpoint, only: tuple[str, ...]) -> None:
    """Weights without moments are those of an optimizer that has not stepped."""
    keys = _chosen(source.keys, only)
    write_index(folder, source.table, keys, source.step if len(keys) > 1 else 0, source.order())


def _chosen(keys: list[str], only: tuple[str, ...]) -> list[str]:
    return [key for key in keys if not only or key in only]


@dataclass(frozen=True)
class LogicalFolder:
    """A complete folder of logical tensors. `LogicalFolder.open` raises UserError if it is not one."""

    folder: Path
    step: int
    keys: list[str]
    table: dict[str, ParameterSpec]
    order: list[str]
    """Names as a trained network registers them; empty where the weights came from elsewhere."""

    @staticmethod
    def open(folder: Path) -> "LogicalFolder":
        try:
            index = json.loads((folder / _INDEX).read_text())
            table = {n: ParameterSpec(shape=tuple(p["shape"]), axis=p["axis"], sections=p["sections"]) for n, p in index["parameters"].items()}
            return LogicalFolder(folder, index["step"], index["keys"], table, index.get("order", []))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} is not a complete folder of logical tensors ({error}); convert the checkpoint again") from None

    def shard(self, name: str, key: str, ranks: int, rank: int) -> Tensor:
        """Tensor-parallel `rank`'s piece of one tensor; only that is read."""
        spec, path = self.table[name], self.folder / name / f"{key}.safetensors"
        try:
            with safe_open(path, "pt") as file:
                tensor = file.get_slice(_ENTRY)
                if spec.axis is None or ranks == 1:
                    return tensor[:]
                block = spec.shape[spec.axis] // spec.sections
                width = block // ranks
                starts = [section * block + rank * width for section in range(spec.sections)]
                before = (slice(None),) * spec.axis
                return torch.cat([tensor[(*before, slice(start, start + width))] for start in starts], spec.axis)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}); convert the checkpoint again") from None


# ---- into an engine ---------------------------------------------------------------------------------------------------------------


def fill_engine(engine: FillableEngine, folder: Path) -> None:
    """Set an engine's weights, fp32 masters, AdamW moments and step, and the average of the weights if there is one, in any layout.

    A folder without moments leaves AdamW as before its first step. Every rank calls it. Raises UserError if the folder describes another
    network.
    """
    logical, optimizer = LogicalFolder.open(folder), engine.optimizer
    stage3 = hasattr(optimizer, "fp16_partitioned_groups_flat")
    if stage3:
        optimizer.checkpoint_event_prologue()  # small parameters that DeepSpeed keeps whole are partitioned …
    _prepare_states(optimizer, logical, stage3)
    named = dict(engine.module.named_parameters())
    tensor, data = engine.groups.tensor, engine.groups.data
    for name, parameter in named.items():
        _check_shape(logical, name, parameter, tensor.size)
        if not stage3 and parameter._hp_mapping is None:  # type: ignore[attr-defined]
            continue  # this rank's partition holds nothing of it
        for key in logical.keys:
            shard = logical.shard(name, key, tensor.size, tensor.rank)
            _set(parameter, key, shard, data.rank if stage3 else None)
    if stage3:
        _refresh_stage3(optimizer)
        optimizer.checkpoint_event_epilogue()  # … and gathered again
    else:
        optimizer.update_lp_params()


def _prepare_states(optimizer: Any, logical: LogicalFolder, stage3: bool) -> None:
    """AdamW's state for every flat partition, as after `step` steps: DeepSpeed makes it in the first step only."""
    base = optimizer.optimizer
    for flat, group in _flat_partitions(optimizer, stage3):
        on_device = group.get("fused") or group.get("capturable")
        state = {key: torch.zeros_like(flat) for key in ("exp_avg", "exp_avg_sq", *logical.keys) if key != MASTER}
        state["step"] = torch.tensor(float(logical.step), device=flat.device if on_device else "cpu")
        base.state[flat].clear()
        base.state[flat].update(state)
    if not stage3:
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _flat_partitions(optimizer: Any, stage3: bool) -> list[tuple[Tensor, dict[str, Any]]]:
    """This rank's flat fp32 tensors, each with its parameter group."""
    groups = optimizer.optimizer.param_groups
    if stage3:
        return [(flat, groups[optimizer.sub_group_to_group_id[i]]) for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat)]
    bf16 = hasattr(optimizer, "fp32_groups_flat_partition")
    flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    return list(zip(flats, groups, strict=True))


def _set(parameter: nn.Parameter, key: str, shard: Tensor, data_rank: int | None) -> None:
    """Hand one tensor-parallel shard to DeepSpeed, which keeps this data-parallel rank's part. data_rank: set for ZeRO 3 only."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state, safe_set_local_fp32_param, safe_set_local_optimizer_state

    if data_rank is None:
        value = shard.to(parameter.device)
        safe_set_full_fp32_param(parameter, value) if key == MASTER else safe_set_full_optimizer_state(parameter, value, key)
        return
    size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
    part = shard.reshape(-1)[size * data_rank : size * (data_rank + 1)]
    value = F.pad(part, (0, size - part.numel())).to(parameter.ds_tensor.device)  # type: ignore[attr-defined]
    safe_set_local_fp32_param(parameter, value) if key == MASTER else safe_set_local_optimizer_state(parameter, value, key)


def _refresh_stage3(optimizer: Any) -> None:
    """Working weights from masters, as DeepSpeed's own loading does."""
    for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        working = optimizer.fp16_partitioned_groups_flat[i]
        working.data.copy_(flat.data)
        partitioned = optimizer.fp16_partitioned_groups[i]
        for parameter, updated in zip(partitioned, optimizer.unflatten(working, partitioned), strict=True):
            parameter.data = updated.data


def _check_shape(logical: LogicalFolder, name: str, parameter: nn.Parameter, ranks: int) -> None:
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    spec = logical.table.get(name)
    if spec is None:
        raise UserError(f"the checkpoint has no {name}: it is of another network; use the configuration that it was trained with")
    if spec.local_shape(ranks) != shape:
        raise UserError(
            f"{name} has shape {spec.shape} in the checkpoint, which does not give {shape} at TP={ranks}; use the configuration that wrote it"
        )


def load_any_layout(engine: FillableEngine, checkpoint: Path, peers: Peers | None = None) -> None:
    """Fill an engine from a checkpoint of any layout, through a folder of logical tensors beside it that is deleted afterwards, or from the
    logical tensors that the checkpoint itself holds."""
    peers = peers or Peers.alone()
    if (checkpoint / LOGICAL).is_dir():
        fill_engine(engine, checkpoint / LOGICAL)
        return
    folder = checkpoint.with_name(f"{checkpoint.name}.logical{PARTIAL}")
    peers.writer(lambda: shutil.rmtree(folder, ignore_errors=True))
    write_logical(checkpoint, folder, peers)
    fill_engine(engine, folder)
    peers.exchange(None)  # nobody reads any more
    peers.writer(lambda: shutil.rmtree(folder, ignore_errors=True))
