"""Batches and the choice of sampler around the plain network.

Shape suffixes: B sequences of a batch, L positions.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pretrain.errors import UserError
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_methods import Constants, Method, fill
from pretrain.hf_model.sampling_network import Progress, Request, SamplingError, Watch, ignore_progress
from pretrain.hf_model.sampling_settings import SettingsError
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.prompts import Canvas


@dataclass(frozen=True)
class Sample:
    """One sequence: its number and its prompt's, its token ids (prompt included) and the network evaluations (NFE) that it took."""

    sequence: int
    prompt: int
    ids: tuple[int, ...]
    evaluations: int


@contextlib.contextmanager
def mistakes_of_users() -> Iterator[None]:
    """What samplers say about settings, as a UserError."""
    try:
        yield
    except (SettingsError, SamplingError) as error:
        raise UserError(str(error)) from error


def choose_method(config: SamplingConfig, objective: str) -> Method:
    """The sampler that is asked for. Raises UserError for one, or for settings, that do not fit the model."""
    with mistakes_of_users():
        return Method.of(objective, config.sampler, config.settings())


def generate(
    network: DiT | Llama,
    constants: Constants,
    config: SamplingConfig,
    method: Method,
    *,
    vocabulary: Vocabulary,
    canvases: list[Canvas],
    progress: Progress = ignore_progress,
    watch: Watch | None = None,
) -> Iterator[Sample]:
    """`config.count` samples of every canvas, batch by batch; canvases of the same form share batches.

    Sample number n of a command belongs to prompt n // count, and is drawn with the noise of (seed, n) alone. Raises UserError for what the
    model turns out to lack.
    """
    law = TokenLaw(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, mask_id=vocabulary.mask_id)
    # A document begins after the end of another, here and in the training stream.
    start = (vocabulary.eos_id,) if constants.objective == "ar" else ()
    device = network.lm_head.weight.device
    for numbers in _batches(config, canvases):
        sequences_B = torch.tensor(numbers, device=device)
        request = Request(law=law, vocab_size=vocabulary.model_size, seed=config.seed, sequences_B=sequences_B, progress=progress, watch=watch)
        canvas_BL = torch.tensor([start + canvases[number // config.count].ids for number in numbers], device=device)
        with mistakes_of_users():
            ids_BL, evaluations_B = fill(network, canvas_BL, request, constants, method)
        for number, ids, evaluations in zip(numbers, ids_BL[:, len(start) :].tolist(), evaluations_B.tolist(), strict=True):
            yield Sample(number, number // config.count, tuple(ids), evaluations)


def _batches(config: SamplingConfig, canvases: list[Canvas]) -> Iterator[list[int]]:
    """Numbers of at most `batch` sequences each, all of one length and with as many blanks; those of the first prompt first."""
    forms: dict[tuple[int, int], list[int]] = {}
    for canvas in canvases:
        forms.setdefault((len(canvas.ids), canvas.blanks), []).append(canvas.number)
    for prompts in forms.values():
        numbers = [prompt * config.count + i for prompt in prompts for i in range(config.count)]
        yield from (numbers[first : first + config.batch] for first in range(0, len(numbers), config.batch))
