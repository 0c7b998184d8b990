"""From a checkpoint to what sampling asks for: the plain network, and the constants of its objective."""

from pathlib import Path

import torch

from pretrain.convert.plain_network import TrainedModel, open_trained
from pretrain.hf_model.digits import DigitCode
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.sampling_methods import Constants
from pretrain.hf_model.sampling_replaid import LatentSpace
from pretrain.objectives.replaid import RePlaid
from pretrain.sampling.model import SampledModel


def open_sampled(path: Path, step: int | None = None) -> SampledModel:
    """The checkpoint that `open_trained` finds, with its errors; weights are read by `load`."""
    trained = open_trained(path, step)

    def load(device: torch.device, dtype: torch.dtype) -> tuple[DiT | Llama, Constants]:
        return trained.network(device=device, dtype=dtype), constants_of(trained, device)

    return SampledModel(
        objective=trained.run.objective.name,
        vocabulary=trained.vocabulary,
        codec=trained.tokenizer,
        trained_length=trained.run.batch.length,
        home=trained.run_directory,
        origin={"step": trained.step},
        load=load,
    )


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
        objective.embedding, objective.schedule, trained.vocabulary.model_size, evidence=evidence, self_conditioning=config.self_conditioning > 0
    )
