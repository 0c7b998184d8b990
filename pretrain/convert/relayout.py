"""Checkpoints from one layout to another on one CPU process, and their weights alone: universal, zero and weights of launchers/convert.py.

`universal` and `zero` make run directories with one checkpoint, complete with state, manifest and marker: training continues from either
(name= and root= of the output), in any layout from the first and without any conversion from the second in the layout that it names.
One tensor is in memory at a time. An output appears under its name only when it is whole.
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from pretrain.checkpoint.changes import read_config
from pretrain.checkpoint.consolidate import stream
from pretrain.checkpoint.files import remedy, size, sync_file, sync_folder
from pretrain.checkpoint.layout import CONFIG, MEANT, PARTIAL, Layout, TrainState
from pretrain.checkpoint.logical import is_imported, open_weights
from pretrain.checkpoint.manager import Checkpoint, CheckpointManager
from pretrain.checkpoint.peers import disk_trouble
from pretrain.checkpoint.reshape import LOGICAL, LogicalFolder, write_index, write_tensor
from pretrain.checkpoint.zero_reader import MASTER, ZeroCheckpoint
from pretrain.checkpoint.zero_writer import Target, write_zero
from pretrain.compose import typed
from pretrain.convert.config import UniversalConfig, WeightsConfig, ZeroConfig
from pretrain.convert.plain_network import find_step
from pretrain.convert.progress import shown
from pretrain.convert.shards import Planned, plan_shards, write_shards
from pretrain.engine.safe_files import read_safely
from pretrain.engine.zero import OBJECTIVE_FILE
from pretrain.errors import UserError
from pretrain.outputs import require_writable
from pretrain.rules import validate
from pretrain.run_config import RunConfig

EMA = "ema"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SCRATCH = "logical.scratch"


def to_universal(config: UniversalConfig) -> Path:
    """ZeRO files of any layout -> logical tensors, with everything that training needs to go on. The checkpoint's folder."""
    found = find_step(Path(config.checkpoint), config.step)
    if is_imported(found.folder):
        raise UserError(f"{found.folder} holds logical tensors already; use it as it is")

    def write(folder: Path) -> None:
        _write_logical(found.folder, folder / LOGICAL)
        _copy_objective(found.folder, folder)

    text = (found.folder / CONFIG).read_text(encoding="utf-8")
    return _publish(Path(config.output), lambda staging: _saved(staging, found.state, text, write))


def to_zero(config: ZeroConfig) -> Path:
    """A checkpoint of logical tensors, or of any layout -> ZeRO files of the layout that the configuration names. The checkpoint's folder.

    Raises UserError for a layout in which the run could not train.
    """
    found = find_step(Path(config.source), config.step)
    run, tree = _laid(found, config)
    layout = Layout.of(config.parallel, config.data_ranks)
    target = Target(
        layout=layout, table=found.state.table(), optimizer=run.optimizer, dtype=_working_dtype(found, run), lr=found.state.lr,
        micro_sequences=run.batch.micro_sequences, global_sequences=run.batch.global_sequences,
    )  # fmt: skip

    def write(folder: Path) -> None:
        scratch = folder / _SCRATCH
        if not is_imported(found.folder):
            _write_logical(found.folder, scratch)
        logical = LogicalFolder.open(found.folder / LOGICAL if is_imported(found.folder) else scratch)
        if not logical.order:
            raise UserError(
                f"{found.folder} was not trained, so the order of its parameters in ZeRO files is not known; start a run from it with init_from="
            )
        cuts = [config.parallel.tensor if spec.axis is None else 1 for spec in target.table.values()]
        elements = sum(spec.size * cut for spec, cut in zip(target.table.values(), cuts, strict=True))
        for _ in shown("ZeRO files", 4 * elements * len(logical.keys), write_zero(logical, folder, target)):
            pass
        shutil.rmtree(scratch, ignore_errors=True)
        _copy_objective(found.folder, folder)

    state = dataclasses.replace(found.state, layout=layout)
    return _publish(Path(config.output), lambda staging: _saved(staging, state, yaml.safe_dump(tree, sort_keys=False), write))


def to_weights(config: WeightsConfig) -> Path:
    """The weights alone, as safetensors in shards with their index, by logical name (padded rows of the vocabulary included). The folder."""
    found = find_step(Path(config.checkpoint), config.step)
    source = open_weights(found.folder)
    key = EMA if config.weights == "ema" or (config.weights == "auto" and EMA in source.keys) else MASTER
    if key not in source.keys:
        raise UserError(f"{found.folder} keeps no average of the weights (optimizer.ema was 0); use weights=raw")
    dtype = _DTYPES[config.dtype]
    shards = plan_shards((Planned(name, spec.shape, dtype) for name, spec in source.table.items()), config.max_shard_bytes)
    total = sum(planned.bytes for shard in shards for planned in shard)

    def write(staging: Path) -> Path:
        staging.mkdir(parents=True)
        write_shards(staging, shards, shown("weights", total, ((name, tensor.to(dtype)) for name, tensor in stream(source, key))))
        if (found.folder / OBJECTIVE_FILE).is_file():
            learned = read_safely(found.folder / OBJECTIVE_FILE)["modules"]
            save_file({name: tensor.contiguous() for name, tensor in learned.items()}, staging / "objective.safetensors")
        about = {"step": found.step, "tokens": found.state.tokens, "weights": "average" if key == EMA else "raw", "dtype": config.dtype,
                 "backbone": found.state.backbone, "versions": found.state.versions}  # fmt: skip
        (staging / "weights.json").write_text(json.dumps(about, indent=1) + "\n")
        for path in staging.iterdir():
            sync_file(path)
        sync_folder(staging)
        return staging

    return _publish(Path(config.output), write)


# ---- parts ------------------------------------------------------------------------------------------------------------------------


def _write_logical(checkpoint: Path, folder: Path) -> None:
    source = ZeroCheckpoint(checkpoint)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in source.table:
            for key in source.keys:
                yield f"{name}/{key}", source.tensor(name, key)

    total = 4 * sum(spec.size for spec in source.table.values()) * len(source.keys)
    for place, tensor in shown("logical tensors", total, tensors()):
        name, _, key = place.rpartition("/")
        write_tensor(folder, name, key, tensor)
    write_index(folder, source.table, source.keys, source.step, source.order())


def _copy_objective(source: Path, target: Path) -> None:
    if (source / OBJECTIVE_FILE).is_file():
        shutil.copyfile(source / OBJECTIVE_FILE, target / OBJECTIVE_FILE)


def _laid(found: Checkpoint, config: ZeroConfig) -> tuple[RunConfig, dict[str, Any]]:
    """The run's configuration in the new layout, typed and as a tree, with micro-batches that fit. Raises UserError for an illegal layout."""
    tree = read_config(found.folder)
    tree["parallel"] = dataclasses.asdict(config.parallel)
    output = Path(config.output)
    tree["name"], tree["root"] = output.name, str(output.parent)
    batch = tree["batch"]
    batch["micro_sequences"] = math.gcd(int(batch["micro_sequences"]), max(int(batch["global_sequences"]) // config.data_ranks, 1))
    run = typed(RunConfig, tree)
    validate(run, world_size=config.parallel.model_ranks * config.data_ranks)
    return run, tree


def _working_dtype(found: Checkpoint, run: RunConfig) -> torch.dtype:
    """Of the weights that the run computes with; `auto` stood for something on the machine that wrote the checkpoint."""
    meant = found.state.extras.get(MEANT, {}).get("precision.compute") or run.precision.compute
    if meant == "auto":
        raise UserError(f"{found.folder} does not say what precision.compute=auto stood for; continue the run once, and convert its next checkpoint")
    return torch.bfloat16 if meant in ("bf16", "bfloat16") else torch.float32


def _saved(staging: Path, state: TrainState, text: str, write: Callable[[Path], None]) -> Path:
    return CheckpointManager(staging, keep=0, say=lambda _: None).save(state.step, write, state, text)


def _publish(output: Path, write: Callable[[Path], Path]) -> Path:
    """Let `write` fill a folder beside the output, then rename it. Raises UserError, leaving nothing behind, where the disk refuses."""
    if output.exists():
        raise UserError(f"output {output} exists; name a folder that does not")
    require_writable(output, folder=True)
    staging = output.with_name(f".{output.name}{PARTIAL}")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        inside = write(staging).relative_to(staging)
        os.rename(staging, output)
        sync_folder(output.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        trouble = disk_trouble(error) if isinstance(error, OSError) else None
        if trouble is None:
            raise
        raise UserError(f"{output} could not be written: {trouble}; {remedy(trouble, output.parent)}, or choose another output") from None
    written = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"{output / inside}: {size(written)}")
    return output / inside
