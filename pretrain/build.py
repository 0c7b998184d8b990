"""Names in the configuration -> objects: the only place that knows every class."""

import importlib.util
from collections.abc import Callable
from functools import partial

import torch

from pretrain.backbones.megatron import Stage, build_stage
from pretrain.data.corpus import WHOLE, open_corpora
from pretrain.data.samples import Corrupt, TrainingSamples, ValidationSamples
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine.zero import Engine
from pretrain.errors import UserError
from pretrain.objectives.ar import AR
from pretrain.objectives.base import Objective
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.duo import Duo
from pretrain.objectives.esolm import EsoLM
from pretrain.objectives.mdlm import MDLM
from pretrain.objectives.mdm_prime import MDMPrime
from pretrain.objectives.replaid import RePlaid
from pretrain.parallel import platform
from pretrain.parallel.groups import Groups
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.run_config import RunConfig

OBJECTIVES: dict[str, Callable[[Vocabulary, ObjectiveConfig], Objective]] = {
    "ar": AR,
    "mdlm": MDLM,
    "duo": Duo,
    "esolm": EsoLM,
    "replaid": RePlaid,
    "mdm_prime": MDMPrime,
}


def build_objective(config: ObjectiveConfig, vocabulary: Vocabulary) -> Objective:
    """The objective named in the configuration."""
    return OBJECTIVES[config.name](vocabulary, config)


def compute_dtype(config: RunConfig) -> torch.dtype:
    """fp32 or bf16; auto takes bf16 where matrix units run it."""
    choice = config.precision.compute
    if choice == "auto":
        return torch.bfloat16 if platform.bf16_is_fast() else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[choice]


def use_transformer_engine(config: RunConfig) -> bool:
    """Transformer Engine's layers on CUDA wherever the library is installed; FP8 needs them."""
    if config.precision.fp8 and not torch.cuda.is_available():
        raise UserError("precision.fp8=true needs CUDA, and this machine has none; set precision.fp8=false")
    return config.precision.fp8 or (torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None)


def build_network(config: RunConfig, objective: Objective, groups: Groups, device: torch.device) -> Stage:
    """This rank's stage of the network, initialised from (seed, parameter name)."""
    stage = build_stage(
        config.backbone, config.parallel, groups, rows=objective.vocabulary.padded_size, attention=objective.attention, dtype=compute_dtype(config),
        device=device, fp32_residual=config.precision.fp32_residual, fp8=config.precision.fp8, transformer_engine=use_transformer_engine(config),
        variable_lengths=objective.two_stream,
    )  # fmt: skip
    if device.type != "meta":
        stage.initialize(config.seed)
    return stage


def build_engine(config: RunConfig, objective: Objective, groups: Groups, device: torch.device) -> Engine:
    """Network, optimizer and DeepSpeed for this rank."""
    micro_batches = config.batch.global_sequences // (config.batch.micro_sequences * groups.data.size)
    return Engine(
        build_network(config, objective, groups, device), objective, groups, optimizer=config.optimizer, zero_stage=config.parallel.zero_stage,
        dtype=compute_dtype(config), device=device, micro_sequences=config.batch.micro_sequences, micro_batches=micro_batches,
        length=config.batch.length, loss_chunk=config.precision.loss_chunk, peak_lr=config.schedule.peak,
    )  # fmt: skip


def build_training_samples(
    config: RunConfig, objective: Objective, tokenizer: Tokenizer, corrupt: Corrupt | None = None, share: tuple[int, int] = WHOLE
) -> TrainingSamples:
    """The training stream over opened and verified corpora; `corrupt` noises in the objective's place. Raises UserError naming what is wrong."""
    return TrainingSamples(
        config.data,
        open_corpora(config.data.train, tokenizer, share),
        config.batch,
        corrupt=corrupt or partial(objective.corrupt, evaluation=False),
        lookahead=objective.lookahead,
        random_length=objective.random_length,
        seed=config.seed,
        parts=objective.parts,
    )


def build_samples(
    config: RunConfig, objective: Objective, tokenizer: Tokenizer, share: tuple[int, int] = WHOLE
) -> tuple[TrainingSamples, ValidationSamples | None]:
    """Corpora opened and (this share of their shards) verified: the training stream, and the held-out set where there is one.

    Raises UserError naming what is wrong.
    """
    training = build_training_samples(config, objective, tokenizer, share=share)
    if not config.data.validation:
        return training, None
    held_out = ValidationSamples(
        config.data,
        open_corpora(config.data.validation, tokenizer, share),
        config.batch,
        corrupt=partial(objective.corrupt, evaluation=True),
        lookahead=objective.lookahead,
        draws=config.validation.draws * objective.importance,
        seed=config.seed,
        parts=objective.evaluation_parts,
    )
    return training, held_out
