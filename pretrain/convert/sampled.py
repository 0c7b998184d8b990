"""From a checkpoint or an exported folder to what sampling asks for: the plain network, and the constants of its objective."""

import json
from pathlib import Path
from typing import Any

import torch

from pretrain.convert.hf_config import MODEL_TYPE
from pretrain.convert.plain_network import TrainedModel, open_trained
from pretrain.convert.tokenizer_files import tokenizer_file
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.hf_model.digits import DigitCode
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.sampling_methods import Constants
from pretrain.hf_model.sampling_replaid import LatentSpace
from pretrain.objectives.replaid import RePlaid
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.sampling.model import SampledModel

CONFIG = "config.json"


def open_sampled(path: Path, step: int | None = None) -> SampledModel:
    """An exported folder (with a config.json), or the checkpoint that `open_trained` finds, with its errors; weights are read by `load`."""
    if (path / CONFIG).is_file():
        if step is not None:
            raise UserError(f"{path} is an exported model, which has no steps; leave step={step} out, or name the run directory")
        return open_exported(path)
    trained = open_trained(path, step)

    def load(device: torch.device, dtype: torch.dtype) -> tuple[DiT | Llama, Constants]:
        return trained.network(device=device, dtype=dtype), constants_of(trained, device)

    return SampledModel(
        objective=trained.run.objective.name,
        vocabulary=trained.vocabulary,
        codec=trained.tokenizer,
        trained_length=trained.run.batch.length,
        home=trained.run_directory,
        folder=trained.folder,
        origin={"step": trained.step},
        load=load,
    )


def open_exported(folder: Path) -> SampledModel:
    """The model that `convert.py hf` has written to a folder. Its own copy of the code is not run.

    Raises UserError for a folder of another program, and for the stock format, which `transformers` itself samples.
    """
    found = read_json(folder / CONFIG)
    if found.get("model_type") != MODEL_TYPE:
        kind = found.get("model_type")
        raise UserError(f"{folder} holds a model of type {kind}, which this command does not sample: use generate() of transformers, or name a run")
    from pretrain.hf_model.configuration_language_model import LanguageModelConfig  # transformers takes a second
    from pretrain.hf_model.modeling_language_model import LanguageModel
    from pretrain.hf_model.sampling_model import constants_of as exported_constants

    config = LanguageModelConfig.from_pretrained(folder)
    tokenizer = Tokenizer(tokenizer_file(folder))
    if tokenizer.size != config.tokenizer_size:
        raise UserError(f"{tokenizer.path} has {tokenizer.size} ids and the model was trained with {config.tokenizer_size}; put its tokenizer back")

    def load(device: torch.device, dtype: torch.dtype) -> tuple[DiT | Llama, Constants]:
        try:
            model = LanguageModel.from_pretrained(folder, config=config).eval().requires_grad_(False)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"the weights in {folder} cannot be used ({' '.join(str(error).split())[:200]}); export the model again") from error
        model.network.to(dtype)
        model.to(device)
        return model.network, exported_constants(model)

    return SampledModel(
        objective=config.objective,
        vocabulary=Vocabulary(
            tokenizer_size=config.tokenizer_size, model_size=config.vocab_size, padded_size=config.vocab_size,
            mask_id=config.mask_token_id, eos_id=tokenizer.eos_id,
        ),
        codec=tokenizer,
        trained_length=config.max_position_embeddings,
        home=folder, folder=folder,
        origin={"exported": str(folder), "step": config.provenance.get("step")},
        load=load,
    )  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises UserError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no object; copy it again")
    return found


def constants_of(trained: TrainedModel, device: torch.device) -> Constants:
    """What the objective of a run fixed, and what it learned itself. Raises UserError where that is missing from the checkpoint."""
    config, prime = trained.run.objective, trained.run.objective.mdm_prime
    size = trained.vocabulary.model_size
    digits = config.name == "mdm_prime"
    return Constants(
        objective=config.name,
        schedule_eps=config.schedule_eps,
        alpha_0=config.esolm.alpha_0,
        code=DigitCode(size, base=prime.base, digits=prime.digits, shuffle_seed=prime.shuffle_seed) if digits else None,
        joint_above=prime.joint_mask_above if digits else None,
        space=_latent_space(trained, device) if config.name == "replaid" else None,
    )


def _latent_space(trained: TrainedModel, device: torch.device) -> LatentSpace:
    from pretrain.convert.held_out import load_objective  # with the whole engine behind it, which takes seconds

    objective, config = RePlaid(trained.vocabulary, trained.run.objective), trained.run.objective.replaid
    load_objective(objective, trained.folder)
    objective.modules().to(device).requires_grad_(False)
    evidence = float(objective.running.ramp(config.prior_ramp_steps)) if config.output_prior else 0.0
    return LatentSpace.of(
        objective.embedding, objective.schedule, trained.vocabulary.model_size, evidence=evidence,
        self_conditioning=config.self_conditioning > 0, prompt_table=config.prompt_embedding,
    )  # fmt: skip
