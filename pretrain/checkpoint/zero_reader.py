"""The logical tensors in a checkpoint's ZeRO files, one at a time, on one process, in any layout.

DeepSpeed's own converter (deepspeed.checkpoint.ds_to_universal) loads whole rank files and writes every fragment as a pickle of its own,
needs patterns for each kind of tensor-parallel cut, and cannot merge ZeRO-3 under tensor parallelism with fused matrices. The files say
where each parameter's fragment lies, so this reads them memory-mapped and joins the fragments with the parameter table: peak memory is
twice one tensor. Files are read with `weights_only`: only tensors and plain values, and stand-ins for DeepSpeed's three small classes,
so that DeepSpeed need not be installed.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.layout import ZERO, TrainState
from pretrain.engine.safe_files import read_safely
from pretrain.errors import UserError
from pretrain.parallel.sharding import ParameterSpec

MASTER = "fp32"
"""Key of the fp32 master weights; the other keys are the optimizer's (exp_avg, exp_avg_sq, ema)."""
REPLICA_TOLERANCE = 1e-4
"""Relative difference at which copies that should be equal are refused: ranks may sum gradients in another order, and no more than that."""

_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class _Fragment:
    """Stands in for DeepSpeed's fragment_address: start and numel in the rank's flat partition."""

    start: int
    numel: int


class _Ignored:
    """Stands in for DeepSpeed's LossScaler."""


_STAND_INS: list[Any] = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class _Piece:
    """Consecutive elements of one tensor-parallel shard, by key, as DeepSpeed's rank holds them."""

    flat: dict[str, Tensor]
    start: int
    numel: int


class ZeroCheckpoint:
    """A checkpoint folder, opened for reading.

    state   its TrainState.
    table   logical name -> specification.
    keys    what there is of each parameter: fp32, and the optimizer's tensors.
    step    AdamW's step count.

    Raises UserError if a file is missing, unreadable, or does not belong to the layout that the state names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, TrainState.read(folder)
        self.table = self.state.table()
        self.keys: list[str] = []
        self.step = 0
        # name -> pipeline stage -> tensor rank -> pieces in data-parallel order
        self._pieces: dict[str, dict[int, dict[int, list[_Piece]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        layout = self.state.layout
        paths = self._paths(layout.data, layout.tensor * layout.pipeline)
        for (data_rank, model_rank), path in sorted(paths.items()):
            stage, tensor_rank = divmod(model_rank, layout.tensor)
            for name, piece in self._read(path, data_rank, model_rank):
                self._pieces[name][stage][tensor_rank].append(piece)
        self._check_names()

    def tensor(self, name: str, key: str = MASTER) -> Tensor:
        """The full tensor, fp32, of its logical shape. Raises UserError if fragments are missing or copies differ."""
        spec, ranks = self.table[name], self.state.layout.tensor
        stages = self._pieces[name]
        shards = [self._shard(name, key, stages[min(stages)][rank], spec) for rank in range(ranks if spec.axis is not None else 1)]
        full = spec.unshard(shards).view(spec.shape)
        if key == MASTER:
            self._check_copies(name, full, spec)
        return full

    def order(self) -> list[str]:
        """The names of all parameters as the stages' networks register them, the first stage's first."""
        layout = self.state.layout
        names: dict[str, None] = {}
        for stage in range(layout.pipeline):
            shared = "zero_pp_rank_0_" if layout.zero_stage == 3 else ""
            path = self.folder / ZERO / f"{shared}mp_rank_{stage * layout.tensor:02d}_model_states.pt"
            try:
                names |= dict.fromkeys(_load(path).get("module", ()))
            except (AttributeError, TypeError) as error:
                raise UserError(f"{path} is not a DeepSpeed model file of this program ({error!r}); use another checkpoint") from None
        return list(names)

    def _shard(self, name: str, key: str, pieces: list[_Piece], spec: ParameterSpec) -> Tensor:
        shape = spec.local_shape(self.state.layout.tensor)
        found = sum(piece.numel for piece in pieces)
        if found != math.prod(shape):
            raise UserError(f"{self.folder / ZERO} holds {found:,} of {math.prod(shape):,} elements of {name}; use another checkpoint")
        shard = torch.empty(math.prod(shape))
        offset = 0
        for piece in pieces:
            shard[offset : offset + piece.numel] = piece.flat[key][piece.start : piece.start + piece.numel]
            offset += piece.numel
        return shard.view(shape)

    def _check_copies(self, name: str, full: Tensor, spec: ParameterSpec) -> None:
        """Copies on other tensor ranks and stages must be the same."""
        if spec.axis is not None:
            return
        norm = full.norm().item()
        for stage, by_rank in self._pieces[name].items():
            for rank, pieces in by_rank.items():
                difference = self._shard(name, MASTER, pieces, spec).sub_(full).norm().item()
                if not difference <= REPLICA_TOLERANCE * norm:
                    raise UserError(
                        f"{name} differs between ranks that must hold the same (tensor rank {rank}, stage {stage}: by "
                        f"{difference / max(norm, 1e-30):.1e} of its norm) in {self.folder}; the run diverged silently: use an earlier checkpoint"
                    )

    # ---- files --------------------------------------------------------------------------------------------------------------------

    def _paths(self, data_ranks: int, model_ranks: int) -> dict[tuple[int, int], Path]:
        found = {}
        folder = self.folder / ZERO
        for path in folder.iterdir() if folder.is_dir() else ():
            if match := _FILE.fullmatch(path.name):
                found[int(match[1]), int(match[2])] = path
        expected = {(d, m) for d in range(data_ranks) for m in range(model_ranks)}
        if set(found) != expected:
            odd = sorted(expected.symmetric_difference(found))[0]
            verb = "lacks" if odd in expected else "has an unexpected"
            raise UserError(f"{folder} {verb} optimizer file of data-parallel rank {odd[0]}, model rank {odd[1]}; use another checkpoint")
        return found

    def _read(self, path: Path, data_rank: int, model_rank: int) -> list[tuple[str, _Piece]]:
        """The pieces in one rank's file."""
        try:
            optimizer = _load(path)["optimizer_state_dict"]
            stage3 = "fp32_flat_groups" in optimizer
            base = optimizer["optimizer_state_dict" if stage3 else "base_optimizer_state"]["state"]
            masters = optimizer["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"]
            flats = [self._flat(masters[i], base.get(i, {})) for i in range(len(masters))]
            if stage3:
                shapes = _load(path.with_name(f"zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_model_states.pt"))["param_shapes"]
                return [pair for flat, group in zip(flats, shapes, strict=True) for pair in self._partitioned(flat, group, data_rank)]
            mappings = optimizer["param_slice_mappings"]
            return [(name, _Piece(flat, part.start, part.numel)) for flat, group in zip(flats, mappings, strict=True) for name, part in group.items()]
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a DeepSpeed optimizer file of this program ({error!r}); use another checkpoint") from None

    def _flat(self, master: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
        """One flat partition by key; padding at its end is never referred to."""
        moments = {key: value.detach() for key, value in state.items() if isinstance(value, Tensor) and value.dim() == 1}
        if "step" in state:
            self.step = int(state["step"])
        if not self.keys:
            self.keys = [MASTER, *moments]
        return {MASTER: master.detach(), **moments}

    def _partitioned(self, flat: dict[str, Tensor], shapes: dict[str, torch.Size], data_rank: int) -> list[tuple[str, _Piece]]:
        """ZeRO-3: each parameter is cut into equal parts, the last padded; parts of consecutive parameters follow each other."""
        pieces, offset = [], 0
        for name, shape in shapes.items():
            part = -(-shape.numel() // self.state.layout.data)
            own = max(0, min(part, shape.numel() - data_rank * part))
            pieces.append((name, _Piece(flat, offset, own)))
            offset += part
        return pieces

    def _check_names(self) -> None:
        missing = sorted(self.table.keys() - self._pieces.keys())
        unknown = sorted(self._pieces.keys() - self.table.keys())
        if missing or unknown:
            what = f"lacks {missing[0]}" if missing else f"holds {unknown[0]}, which the network does not have"
            raise UserError(f"{self.folder / ZERO} {what}: its train_state.json describes another network; use another checkpoint")


def _load(path: Path) -> dict[str, Any]:
    """Open one file memory-mapped, executing nothing in it."""
    return read_safely(path, allowed=_STAND_INS, mmap=True)
