"""A folder that `transformers` loads as a checkpoint that runs of any layout start from: logical tensors, streamed one at a time."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import parameter_table
from pretrain.build import build_objective
from pretrain.checkpoint.layout import Layout, TrainState
from pretrain.checkpoint.logical import IMPORTED
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.reshape import LOGICAL, write_index, write_tensor
from pretrain.checkpoint.resume import versions
from pretrain.checkpoint.zero_reader import MASTER
from pretrain.convert.config import ImportConfig
from pretrain.convert.hub_folder import HubFolder
from pretrain.convert.objective_parts import DIGIT_CODE, EMBEDDING, SCHEDULE_BITS, fill_objective
from pretrain.convert.param_map import ParameterMap
from pretrain.convert.progress import shown
from pretrain.convert.tokenizer_files import tokenizer_file
from pretrain.data.config import DataConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine.zero import OBJECTIVE_FILE
from pretrain.errors import UserError
from pretrain.objectives.base import Objective
from pretrain.outputs import cannot_write, require_writable
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.rules import run_vocabulary
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig

_LONGEST = 2048
"""Sequence length of an imported run's configuration at most; the runs to come choose their own."""


def import_from_hub(config: ImportConfig) -> None:
    """The whole command. Raises UserError, leaving nothing behind, where something does not hold."""
    source, output = Path(config.source), Path(config.output)
    if output.exists():
        raise UserError(f"output {output} exists; name a run directory that does not")
    require_writable(output, folder=True)
    hub = HubFolder.open(source)
    try:
        output.mkdir(parents=True)
        tokenizer_path = Path(shutil.copyfile(tokenizer_file(source), output / tokenizer_file(source).name))
        _copy_roles(source, output)
        run, vocabulary = imported_run(hub, tokenizer_path, config)
        folder = _save(hub, run, vocabulary, output)
    except OSError as error:
        shutil.rmtree(output, ignore_errors=True)
        raise cannot_write(output, error) from error
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise
    print(f"{folder}: {run.objective.name}, {run.backbone.kind}, {vocabulary.model_size:,} classes in {vocabulary.padded_size:,} rows; start from it "
          f"with init_from={output}")  # fmt: skip


def imported_run(hub: HubFolder, tokenizer_path: Path, config: ImportConfig) -> tuple[RunConfig, Vocabulary]:
    """The configuration that stands for an imported checkpoint, and its vocabulary. Raises UserError for a tokenizer of another size."""
    output = Path(config.output)
    backbone = dataclasses.replace(hub.backbone, vocab_multiple=config.vocab_multiple)
    length = min(int(hub.found.get("max_position_embeddings", _LONGEST)), int(_LONGEST) if not hub.own else 2**31)
    run = RunConfig(
        name=output.name, root=str(output.parent), tokenizer=str(tokenizer_path), objective=hub.objective, backbone=backbone, data=DataConfig(),
        batch=BatchConfig(global_sequences=1, micro_sequences=1, length=length), duration=DurationConfig(steps=1),
    )  # fmt: skip
    vocabulary = run_vocabulary(run, Tokenizer(tokenizer_path))
    if hub.own:
        require_same_size(hub, vocabulary)
    elif vocabulary.model_size > hub.model_size:
        raise UserError(f"{tokenizer_path.name} has {vocabulary.model_size} ids, and the model {hub.model_size} classes; put back its own tokenizer")
    return run, vocabulary


def require_same_size(hub: HubFolder, vocabulary: Vocabulary) -> None:
    """Raises UserError unless the tokenizer makes the model's classes."""
    if vocabulary.model_size != hub.model_size:
        raise UserError(
            f"{hub.folder} has {hub.model_size} classes, and its tokenizer makes {vocabulary.model_size}; put back the tokenizer of that model"
        )


def write_hub_logical(hub: HubFolder, backbone: BackboneConfig, vocabulary: Vocabulary, folder: Path) -> None:
    """The network's weights as a folder of logical tensors with the rows of `vocabulary`; one tensor in memory at a time.

    Published models pad their vocabularies: rows that no id has are left out.
    """
    mapping = ParameterMap(backbone, vocabulary.model_size)
    folder.mkdir(parents=True, exist_ok=True)
    table = parameter_table(backbone, vocabulary.padded_size)

    def fetch(name: str) -> torch.Tensor:
        tensor = hub.plain(name)
        return tensor[: vocabulary.model_size] if mapping.has_vocabulary(name) else tensor

    joined = ((name, _joined(hub, mapping, name, fetch)) for name in table)
    for name, tensor in shown("weights", 4 * sum(spec.size for spec in table.values()), joined):
        write_tensor(folder, name, MASTER, tensor)
    write_index(folder, table, [MASTER], 0)


def _joined(hub: HubFolder, mapping: ParameterMap, name: str, fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
    try:
        return mapping.join(name, fetch)
    except ValueError as error:
        raise UserError(f"{hub.folder} does not hold the network of its config.json: {error}") from None


def hub_objective(hub: HubFolder, objective: Objective) -> Objective:
    """A fresh objective with what the export says that it has learned. Raises UserError for values that do not fit."""
    names = [name for name in (DIGIT_CODE, SCHEDULE_BITS, EMBEDDING) if hub.own and _has(hub, objective, name)]
    try:
        fill_objective(objective, {name: hub.tensor(name) for name in names}, output_prior=float(hub.found.get("output_prior", 0.0)))
    except ValueError as error:
        raise UserError(f"{hub.folder}: {error}; export the model again") from None
    return objective


def _has(hub: HubFolder, objective: Objective, name: str) -> bool:
    return (objective.name == "mdm_prime") if name == DIGIT_CODE else objective.name == "replaid"


def _save(hub: HubFolder, run: RunConfig, vocabulary: Vocabulary, output: Path) -> Path:
    """The checkpoint, complete or not at all."""
    origin = hub.found.get("provenance", {})
    state = TrainState(
        step=int(origin.get("step", 0)), tokens=int(origin.get("tokens", 0)), samples=0, lr=0.0, next_batch="", seed=run.seed,
        layout=Layout(tensor=1, pipeline=1, virtual_pipeline=1, data=1, zero_stage=1), backbone=dataclasses.asdict(run.backbone),
        rows=vocabulary.padded_size, versions=versions(), extras={IMPORTED: str(hub.folder.name)},
    )  # fmt: skip
    objective = hub_objective(hub, build_objective(run.objective, vocabulary))

    def write(folder: Path) -> None:
        write_hub_logical(hub, run.backbone, vocabulary, folder / LOGICAL)
        if list(objective.modules().parameters()):
            torch.save({"modules": objective.modules().state_dict(), "optimizer": {}}, folder / OBJECTIVE_FILE)

    manager = CheckpointManager(output, keep=0, say=lambda _: None)
    return manager.save(state.step, write, state, yaml.safe_dump(dataclasses.asdict(run), sort_keys=False))


def _copy_roles(source: Path, output: Path) -> None:
    """tokenizer_config.json says which token ends documents, where tokenizer.json does not."""
    if (source / "tokenizer_config.json").is_file():
        shutil.copyfile(source / "tokenizer_config.json", output / "tokenizer_config.json")
