"""The first weights of a run from another run, a checkpoint, or a folder that `transformers` loads: any layout to any layout."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import PROMPT_TABLE, parameter_table
from pretrain.checkpoint.layout import PARTIAL
from pretrain.checkpoint.logical import IMPORTED, is_imported
from pretrain.checkpoint.manager import Checkpoint, find_checkpoint
from pretrain.checkpoint.peers import Peers
from pretrain.checkpoint.reshape import LOGICAL, LogicalFolder, fill_engine, write_index, write_logical, write_tensor
from pretrain.checkpoint.zero_reader import MASTER
from pretrain.convert.hub_folder import HubFolder
from pretrain.convert.hub_import import hub_objective, require_same_size, write_hub_logical
from pretrain.convert.origin import Origin, read_origin, require_fitting
from pretrain.engine.safe_files import read_safely
from pretrain.engine.zero import OBJECTIVE_FILE, Engine
from pretrain.errors import UserError
from pretrain.objectives.base import Objective
from pretrain.objectives.replaid import RePlaid
from pretrain.run_config import RunConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


def require_own(checkpoint: Checkpoint | None, config: RunConfig) -> None:
    """Raises UserError where the run directory is an imported checkpoint, which has no data position, moments or schedule to continue."""
    if checkpoint is not None and IMPORTED in checkpoint.state.extras:
        raise UserError(
            f"{config.directory} is an imported model, from which runs start and which is none itself; choose another name= with "
            f"init_from={config.directory}"
        )


def start_from(config: RunConfig, engine: Engine, objective: Objective, peers: Peers) -> str:
    """Fill an engine of step 0 from `config.init_from`; every rank calls it. What to say about it.

    Raises UserError for weights of another network or vocabulary, damaged files, and moments that are not there.
    """
    origin = peers.writer(lambda: _checked(config, objective))
    folder = config.directory.with_name(f".{config.name}.init{PARTIAL}")
    peers.writer(lambda: shutil.rmtree(folder, ignore_errors=True))
    _fill_objective(config, engine, objective, origin)
    filled = folder
    if origin.hub:
        backbone = replace(config.backbone, inputs=origin.backbone.inputs)
        peers.writer(lambda: write_hub_logical(HubFolder.open(origin.folder), backbone, objective.vocabulary, folder))
    elif is_imported(origin.folder):
        filled = origin.folder / LOGICAL
    else:
        write_logical(origin.folder, folder, peers, only=(MASTER, *(_MOMENTS if config.init_moments else ())))
    if config.backbone.inputs.prompt and not origin.backbone.inputs.prompt:
        source, filled = filled, folder
        peers.writer(lambda: add_prompt_table(source, folder, objective, config.backbone))
    fill_engine(engine, filled)
    peers.exchange(None)  # nobody reads any more
    peers.writer(lambda: shutil.rmtree(folder, ignore_errors=True))
    return f"weights{' and moments' if config.init_moments else ''} of {origin.folder}, {'moments go on' if config.init_moments else 'fresh moments'}"


@torch.no_grad()
def add_prompt_table(source: Path, folder: Path, objective: Objective, backbone: BackboneConfig) -> None:
    """Make `folder` what `source` is (they may be one), with a table for prompts that starts where the network reads a clean embedding e whose
    estimate is itself: (W_z + W_e) sqrt(E) e, the limit of its input for little noise, without the noise level's own features."""
    assert isinstance(objective, RePlaid)
    logical = LogicalFolder.open(source)
    if source != folder:
        folder.mkdir(parents=True)
        for name in logical.table:
            (folder / name).symlink_to((source / name).resolve(), target_is_directory=True)
    read_DE = logical.shard("embedding.latent.weight", MASTER, 1, 0) + logical.shard("embedding.estimate.weight", MASTER, 1, 0)
    spec = parameter_table(backbone, objective.vocabulary.padded_size)[PROMPT_TABLE]
    clean_RE = objective.embedding(0, spec.shape[0]).cpu()
    rows_RD = clean_RE * clean_RE.shape[1] ** 0.5 @ read_DE.to(clean_RE).T
    for key in logical.keys:
        write_tensor(folder, PROMPT_TABLE, key, rows_RD.float() if key == MASTER else torch.zeros(spec.shape))
    write_index(folder, {PROMPT_TABLE: spec} | logical.table, logical.keys, logical.step)


def _checked(config: RunConfig, objective: Objective) -> Origin:
    """The origin, its checksums verified; on the writer."""
    assert config.init_from is not None
    origin = read_origin(Path(config.init_from))
    require_fitting(config, origin)
    if origin.hub:
        hub = HubFolder.open(origin.folder)
        if hub.own:
            require_same_size(hub, objective.vocabulary)
        return origin
    checkpoint = find_checkpoint(origin.folder)
    if checkpoint.state.rows != objective.vocabulary.padded_size:
        raise UserError(
            f"init_from={config.init_from} has {checkpoint.state.rows} rows of vocabulary, and this run's tokenizer, mask and "
            f"backbone.vocab_multiple make {objective.vocabulary.padded_size}; use the tokenizer and backbone.vocab_multiple of that run, and an "
            "objective with a mask like it"
        )
    if config.init_moments and is_imported(origin.folder) and not set(_MOMENTS) <= set(LogicalFolder.open(origin.folder / LOGICAL).keys):
        raise UserError(f"init_moments=true, and {origin.folder} is an imported model without moments; leave init_moments out")
    return origin


def _fill_objective(config: RunConfig, engine: Engine, objective: Objective, origin: Origin) -> None:
    """What the objective itself had learned, where it is the same objective; on every rank."""
    if not engine.objective_optimizer.parameters or origin.objective != objective.name:
        return
    if origin.hub:
        hub_objective(HubFolder.open(origin.folder), objective)
        return
    path = origin.folder / OBJECTIVE_FILE
    try:
        state = read_safely(path, map_location=engine.device)
        objective.modules().load_state_dict(state["modules"])
    except (KeyError, TypeError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{path}, what the objective itself learned, cannot be used ({why}); use the objective's constants of that run") from error
    if config.init_moments and state.get("optimizer"):
        engine.objective_optimizer.load_state_dict(state["optimizer"])
