"""The other side of the gate: the training backbone on one process, filled from the checkpoint, and driven by the same samplers.

Shape suffixes: B sequences, L positions, Q positions of a window, V model vocabulary, P padded vocabulary.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pretrain.backbones.megatron import Stage, build_stage
from pretrain.checkpoint.logical import WeightSource
from pretrain.convert.plain_network import TrainedModel
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.hf_model.sampling_replaid import LatentSpace
from pretrain.objectives.base import Objective
from pretrain.objectives.mdm_prime import MDMPrime
from pretrain.objectives.replaid import RePlaid
from pretrain.parallel import groups as parallel_groups
from pretrain.parallel import platform
from pretrain.parallel.config import ParallelConfig

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Reference:
    """The training backbone as a function of network inputs, and as the model that samplers are given."""

    def __init__(self, stage: Stage, trained: TrainedModel, objective: Objective) -> None:
        self._stage, self._size = stage, trained.vocabulary.model_size
        self.device = next(stage.parameters()).device
        run, vocabulary = trained.run, trained.vocabulary
        joint_above = run.objective.mdm_prime.joint_mask_above if run.objective.name == "mdm_prime" else None
        self.config = SimpleNamespace(
            objective=run.objective.name, vocab_size=vocabulary.model_size, mask_token_id=vocabulary.mask_id, eos_token_id=vocabulary.eos_id,
            schedule_eps=run.objective.schedule_eps, alpha_0=run.objective.esolm.alpha_0,
            sampling={} if joint_above is None else {"joint_above": joint_above},
        )  # fmt: skip
        self.network = _SamplersNetwork(self)
        self._objective = objective

    @torch.no_grad()
    def padded_logits(self, inputs: NetworkInput) -> Tensor:
        """logits_BLP, fp32."""
        return self._stage(inputs).transpose(0, 1).float()

    def logits(self, inputs: NetworkInput) -> Tensor:
        """logits_BLV, fp32."""
        return self.padded_logits(inputs)[..., : self._size]

    @property
    def code(self) -> Any:
        """MDM-Prime-v2's digits."""
        assert isinstance(self._objective, MDMPrime)
        return self._objective.code

    def latent_space(self) -> LatentSpace:
        """RePlaid's embeddings and schedule, as the objective has them."""
        objective = self._objective
        assert isinstance(objective, RePlaid)
        grown = float(objective.running.ramp(objective.config.prior_ramp_steps)) if objective.config.output_prior else 0.0
        return LatentSpace.of(
            objective.embedding, objective.schedule, self._size, evidence=grown,
            self_conditioning=objective.config.self_conditioning > 0, prompt_table=objective.config.prompt_embedding,
        )  # fmt: skip


@contextmanager
def reference_backbone(
    trained: TrainedModel, objective: Objective, source: WeightSource, *, key: str, dtype: torch.dtype
) -> Iterator[Reference]:
    """The backbone with the checkpoint's weights, rounded to `dtype` and computed in fp32; process groups of one rank exist meanwhile."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    groups = parallel_groups.initialize(ParallelConfig(), seed=1)
    try:
        stage = build_stage(
            replace(trained.run.backbone, recompute="none"), ParallelConfig(), groups, rows=trained.vocabulary.padded_size,
            attention=objective.attention, dtype=torch.float32, device=platform.device(), fp32_residual=trained.run.precision.fp32_residual,
            variable_lengths=objective.two_stream,
        )  # fmt: skip
        with torch.no_grad():
            for name, parameter in stage.named_parameters():
                parameter.copy_(source.tensor(name, key).to(dtype))
        stage.requires_grad_(False).eval()
        yield Reference(stage, trained, objective)
    finally:
        parallel_groups.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class _Read:
    """What a causal network has read of each sequence: no keys and values, only ids and positions, to be read again."""

    ids_BL: Tensor
    positions_BL: Tensor
    length_B: Tensor

    def rewind(self, length_B: Tensor) -> None:
        self.length_B = length_B.clone()


class _SamplersNetwork:
    """What samplers ask of a network, without a cache: the features are the logits."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def features(self, inputs: NetworkInput, cache: _Read | None = None) -> Tensor:
        """[B, L, V]."""
        return self._reference.logits(inputs) if cache is None else self._after(inputs, cache)

    def logits(self, features: Tensor) -> Tensor:
        """The same."""
        return features

    def new_cache(self, batch: int, capacity: int) -> _Read:
        """Nothing read yet."""
        zeros_BL = torch.zeros(batch, capacity, dtype=torch.long, device=self._reference.device)
        return _Read(zeros_BL, zeros_BL.clone(), torch.zeros(batch, dtype=torch.long))

    def _after(self, inputs: NetworkInput, cache: _Read) -> Tensor:
        assert inputs.ids_BL is not None
        width, rows = inputs.positions_BL.shape[1], []
        for b, start in enumerate(cache.length_B[: len(inputs.positions_BL)].tolist()):
            cache.ids_BL[b, start : start + width] = inputs.ids_BL[b]
            cache.positions_BL[b, start : start + width] = inputs.positions_BL[b]
            whole = NetworkInput(
                ids_BL=cache.ids_BL[b : b + 1, : start + width], positions_BL=cache.positions_BL[b : b + 1, : start + width],
                conditioning_B=inputs.conditioning_B[b : b + 1], attention=Attention.CAUSAL,
            )  # fmt: skip
            rows.append(self._reference.logits(whole)[0, start:])
        cache.length_B = cache.length_B + width
        return torch.stack(rows)
