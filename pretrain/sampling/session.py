"""One sampling command: prompt in, texts on the screen and in a file."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from pretrain.errors import UserError
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.outputs import require_writable
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.generate import generate, sampler_name, tokens_to_draw
from pretrain.sampling.memory import require_memory
from pretrain.sampling.output import SamplingDisplay, summary, text_of, write_samples


class Codec(Protocol):
    """What sampling asks of a tokenizer."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Text of each list of ids."""


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises UserError for a device that this machine does not have, or that holds no numbers."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        usable = torch.ones(1, device=device).add(1).item() == 2
    except (RuntimeError, AssertionError):  # torch asserts that it was compiled with CUDA
        usable = False
    if not usable:
        here = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise UserError(f"device={name} cannot be used here; use device={' or '.join(here)}, or device=auto")
    return device


def choose_dtype(name: str) -> torch.dtype:
    """fp32 or bf16."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def run_sampling(
    network: DiT | Llama,
    codec: Codec,
    config: SamplingConfig,
    *,
    vocabulary: Vocabulary,
    trained_length: int,
    step: int,
    output: Path,
    host_memory: Callable[[], float],
) -> None:
    """Draw, print and write the samples that `config` asks for.

    host_memory  bytes that this process could still take, where it samples without CUDA.

    Raises UserError, before anything is drawn, for what does not fit the model or the memory, and for an unwritable file.
    """
    require_writable(output)
    prompt = codec.encode([config.prompt])[0] if config.prompt else []
    length = config.length or trained_length
    sampler = sampler_name(config, vocabulary)
    total = config.count * tokens_to_draw(config, prompt, length)
    require_memory(network, config, length, host_memory, autoregressive=sampler == "ar")
    if length > trained_length:
        print(f"note: length={length} is beyond the {trained_length} tokens that the model was trained on; expect worse text", file=sys.stderr)
    with SamplingDisplay(total, sys.stderr) as display:
        samples = list(generate(network, config, vocabulary=vocabulary, prompt=prompt, length=length, progress=display.advance))
        speed = display.tokens_per_second
    texts = [text_of(sample.ids, codec.decode, vocabulary.eos_id) for sample in samples]
    write_samples(output, samples, texts, config, sampler=sampler, step=step)
    for sample, text in zip(samples, texts, strict=True):
        print(f"--- sample {sample.sequence + 1}\n{text}\n")
    print(summary(samples, speed, output))
