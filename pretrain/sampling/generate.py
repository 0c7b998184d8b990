"""Batches, prompts and the choice of sampler around the plain network.

Shape suffixes: B sequences of a batch, L positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pretrain.errors import UserError
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.sampling_ar import sample_ar
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_mdlm import sample_first_hitting, sample_mdlm
from pretrain.hf_model.sampling_network import Progress, Request, ignore_progress
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.sampling.config import SamplingConfig

SAMPLED = ("ar", "mdlm")
"""Objectives whose models `generate` draws from."""


@dataclass(frozen=True)
class Sample:
    """One sequence: its number, its token ids (prompt included) and the network evaluations (NFE) that it took."""

    sequence: int
    ids: tuple[int, ...]
    evaluations: int


def require_sampled(objective: str) -> None:
    """UserError for a model whose text another sampler would have to draw: these would return text of another law."""
    if objective not in SAMPLED:
        raise UserError(f"the model was trained with objective={objective}, and this command samples {' and '.join(SAMPLED)}: name a run of these")


def sampler_name(config: SamplingConfig, vocabulary: Vocabulary) -> str:
    """The sampler that `auto` stands for, or the one asked for. Raises UserError when it does not fit the model."""
    autoregressive = vocabulary.mask_id is None
    if config.sampler == "auto":
        return "ar" if autoregressive else "ancestral"
    if autoregressive != (config.sampler == "ar"):
        kind, fitting = ("an autoregressive", "ar") if autoregressive else ("a masked diffusion", "ancestral or first_hitting")
        raise UserError(f"sampler={config.sampler} cannot sample {kind} model; use {fitting}, or auto")
    return config.sampler


def tokens_to_draw(config: SamplingConfig, prompt: list[int], length: int) -> int:
    """Tokens to draw per sequence. Raises UserError when the prompt fills the sequence."""
    if len(prompt) >= length:
        raise UserError(f"the prompt has {len(prompt)} tokens and leaves nothing to draw in length={length}; give a greater length")
    return length - len(prompt)


def generate(
    network: DiT | Llama, config: SamplingConfig, *, vocabulary: Vocabulary, prompt: list[int], length: int, progress: Progress = ignore_progress
) -> Iterator[Sample]:
    """`config.count` samples of `length` tokens that begin with the ids of `prompt`, batch by batch.

    Raises UserError for a sampler that does not fit the model, and for a prompt that fills the sequence.
    """
    sampler = sampler_name(config, vocabulary)
    drawn = tokens_to_draw(config, prompt, length)
    device = network.lm_head.weight.device
    law = TokenLaw(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, mask_id=vocabulary.mask_id)
    for first in range(0, config.count, config.batch):
        sequences_B = torch.arange(first, min(first + config.batch, config.count), device=device)
        request = Request(law=law, vocab_size=vocabulary.model_size, seed=config.seed, sequences_B=sequences_B, progress=progress)
        # A document begins after the end of another, here and in the training stream.
        start = [vocabulary.eos_id, *prompt] if vocabulary.mask_id is None else [*prompt, *[vocabulary.mask_id] * drawn]
        start_BL = torch.tensor(start, device=device).expand(len(sequences_B), -1)
        if sampler == "ar":
            ids_BL, evaluations_B = sample_ar(network, start_BL, drawn, request)
            ids_BL = ids_BL[:, 1:]
        elif sampler == "ancestral":
            ids_BL, evaluations_B = sample_mdlm(network, start_BL, config.steps or drawn, request)
        else:
            ids_BL, evaluations_B = sample_first_hitting(network, start_BL, request)
        for name, ids, evaluations in zip(sequences_B.tolist(), ids_BL.tolist(), evaluations_B.tolist(), strict=True):
            yield Sample(name, tuple(ids), evaluations)
