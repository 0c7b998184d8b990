"""A checkpoint as a folder that `transformers` loads: weights in shards, configuration, the code of the network, tokenizer, model card.

Everything is written beside `output` first; the gate (gate.py) reads it there, and only what passes is renamed into place.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.build import build_objective
from pretrain.checkpoint.consolidate import stream
from pretrain.checkpoint.files import remedy, sync_file, sync_folder
from pretrain.checkpoint.logical import WeightSource, open_weights
from pretrain.checkpoint.peers import disk_trouble
from pretrain.checkpoint.zero_reader import MASTER
from pretrain.convert.config import HubConfig
from pretrain.convert.gate import run_gate
from pretrain.convert.gate_reports import REPORT
from pretrain.convert.held_out import load_objective
from pretrain.convert.hf_config import MODEL_TYPE, fields_of
from pretrain.convert.model_card import write_card
from pretrain.convert.objective_parts import parts_of
from pretrain.convert.param_map import ParameterMap
from pretrain.convert.plain_network import TrainedModel, open_trained
from pretrain.convert.progress import shown
from pretrain.convert.provenance import provenance_of
from pretrain.convert.shards import Planned, plan_shards, write_shards
from pretrain.convert.stock import require_stock, stock_config, stock_name
from pretrain.convert.tokenizer_files import write_tokenizer
from pretrain.errors import UserError
from pretrain.hf_model.sampling_settings import choose_sampler
from pretrain.objectives.base import Objective
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.replaid import RePlaid
from pretrain.outputs import require_writable

CODE = Path(__file__).resolve().parents[1] / "hf_model"
EMA = "ema"
PREFIX = "network."
"""Of the network's tensors in the exported model."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_UNPUBLISHED = "_unpublished"


@dataclass(frozen=True)
class Export:
    """What is exported, and how: the checkpoint opened, its objective with what that learned, the kind of weights."""

    trained: TrainedModel
    objective: Objective
    source: WeightSource
    config: HubConfig
    key: str

    @property
    def dtype(self) -> torch.dtype:
        """Of the network's weights in the files."""
        return _DTYPES[self.config.dtype]

    @property
    def stock(self) -> bool:
        """Whether the files are for a class that `transformers` ships."""
        return self.config.format == "stock"

    def name(self, plain: str) -> str:
        """A tensor of the plain network in the files."""
        return stock_name(plain) if self.stock else PREFIX + plain


def open_export(config: HubConfig) -> Export:
    """Open and check everything that can be checked before a byte is written. Raises UserError."""
    output = Path(config.output)
    if output.exists():
        raise UserError(f"output {output} exists; name a folder that does not, or move this one away")
    require_writable(output, folder=True)
    trained = open_trained(Path(config.checkpoint), config.step)
    if config.format == "stock":
        require_stock(trained.run)
    source = open_weights(trained.folder)
    key = EMA if config.weights == "ema" or (config.weights == "auto" and EMA in source.keys) else MASTER
    if key not in source.keys:
        raise UserError(f"{trained.folder} keeps no average of the weights (optimizer.ema was null); use weights=raw")
    objective = build_objective(trained.run.objective, trained.vocabulary)
    load_objective(objective, trained.folder)
    objective.modules().requires_grad_(False)
    return Export(trained, objective, source, config, key)


def export_to_hub(config: HubConfig) -> None:
    """The whole command. Raises UserError, with nothing under `output`, where something does not hold or the gate finds a difference."""
    export, output = open_export(config), Path(config.output)
    folder = output.with_name(output.name.replace(".", "_") + _UNPUBLISHED)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_folder(export, folder)
        print(f"{folder}: written; comparing it with the training backbone")
        report = run_gate(folder, export.trained, export.objective, export.source, key=export.key, dtype=export.dtype, text=config.text)
        write_card(folder, export.trained, provenance_of(export.trained, export.key), report, stock=export.stock, dtype=config.dtype)
        for path in folder.iterdir():
            sync_file(path)
        sync_folder(folder)
        os.rename(folder, output)
        sync_folder(output.parent)
    except OSError as error:
        trouble = disk_trouble(error) or str(error)
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{output} could not be written: {trouble}; {remedy(trouble, output.parent)}, or choose another output") from None
    print(f"{output}: published; {report.summary()} ({output / REPORT})")


def write_folder(export: Export, folder: Path) -> None:
    """Everything but the gate's report and the model card."""
    shards = plan_shards(_planned(export), export.config.max_shard_bytes)
    write_shards(folder, shards, shown("weights", sum(tensor.bytes for shard in shards for tensor in shard), _tensors(export)))
    write_tokenizer(export.trained.tokenizer, folder, length=export.trained.run.batch.length)
    (folder / "config.json").write_text(json.dumps(_config(export), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    generation = {key: export.trained.vocabulary.eos_id for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if export.trained.run.objective.name == "ar":
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    if not export.stock:
        for path in sorted(CODE.glob("*.py")):
            if path.name != "__init__.py":
                shutil.copyfile(path, folder / path.name)


def _mapping(export: Export) -> ParameterMap:
    return ParameterMap(export.trained.run.backbone, export.trained.vocabulary.model_size)


def _planned(export: Export) -> list[Planned]:
    """Every tensor of the files: the objective's first, whose wider types then begin at multiples of their size."""
    parts = [Planned(name, tuple(tensor.shape), tensor.dtype) for name, tensor in _parts(export).items()]
    mapping = _mapping(export)
    for name, spec in export.source.table.items():
        pieces = mapping.split(name, torch.empty(spec.shape, device="meta"))
        parts += [Planned(export.name(plain), tuple(piece.shape), export.dtype) for plain, piece in pieces.items()]
    return parts


def _tensors(export: Export) -> Iterator[tuple[str, Tensor]]:
    yield from _parts(export).items()
    mapping = _mapping(export)
    for name, full in stream(export.source, export.key):
        for plain, piece in mapping.split(name, full).items():
            yield export.name(plain), piece.to(export.dtype)


def _parts(export: Export) -> dict[str, Tensor]:
    return {} if export.stock else parts_of(export.objective)


def _config(export: Export) -> dict[str, Any]:
    """config.json, for versions of `transformers` that say torch_dtype and for those that say dtype."""
    run, vocabulary = export.trained.run, export.trained.vocabulary
    kind = str(export.dtype).removeprefix("torch.")
    types = {"dtype": kind, "torch_dtype": kind}
    if export.stock:
        return stock_config(run, vocabulary) | types
    autoregressive = run.objective.name == "ar"
    name = f"modeling_language_model.{'Autoregressive' if autoregressive else ''}LanguageModel"
    fields = fields_of(run, vocabulary)
    if isinstance(export.objective, RePlaid):
        grown = float(export.objective.running.ramp(run.objective.replaid.prior_ramp_steps)) if run.objective.replaid.output_prior else 0.0
        fields["output_prior"] = grown
    return {
        "model_type": MODEL_TYPE,
        "architectures": [name.rpartition(".")[2]],
        "auto_map": {
            "AutoConfig": "configuration_language_model.LanguageModelConfig",
            "AutoModel": name,
            ("AutoModelForCausalLM" if autoregressive else "AutoModelForMaskedLM"): name,
        },
        **fields,
        "bos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.eos_id,
        "tie_word_embeddings": False,
        "sampling": sampling_defaults(run.objective),
        "provenance": provenance_of(export.trained, export.key),
        **types,
    }


def sampling_defaults(objective: ObjectiveConfig) -> dict[str, Any]:
    """How `LanguageModel.sample` draws where nothing is said: the sampler of the model's own law, one step per token; digits together where
    training masked them so."""
    joint_above = objective.mdm_prime.joint_mask_above if objective.name == "mdm_prime" else None
    joint = {} if joint_above is None else {"joint_above": joint_above}
    return {"sampler": choose_sampler(objective.name, "auto"), "temperature": 1.0, "top_k": 0, "top_p": 1.0} | joint
