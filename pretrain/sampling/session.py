"""One sampling command: prompts in, texts on the screen and in a file."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from pretrain.errors import UserError
from pretrain.hf_model.sampling_methods import Method
from pretrain.outputs import require_writable
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.generate import choose_method, generate
from pretrain.sampling.memory import require_memory
from pretrain.sampling.model import SampledModel
from pretrain.sampling.output import SampleWriter, SamplingDisplay, summary, text_of
from pretrain.sampling.prompts import canvases, read_prompts
from pretrain.sampling.view import Viewer, printable


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


def run_sampling(model: SampledModel, config: SamplingConfig, *, device: torch.device, host_memory: Callable[[], float]) -> None:
    """Draw, print and write the samples that `config` asks for.

    host_memory  bytes that this process could still take, where it samples without CUDA.

    Raises UserError, before anything is drawn, for what does not fit the model or the memory, and for an unwritable file.
    """
    output = Path(config.output) if config.output else _free(model.home / "samples.jsonl")
    require_writable(output)
    method = choose_method(config, model.objective)
    prompts = read_prompts(config)
    sequences = canvases(prompts, model.codec, config, trained_length=model.trained_length, continues=model.objective == "ar")
    network, constants = model.load(device, choose_dtype(config.dtype))
    longest = max(len(canvas.ids) for canvas in sequences)
    require_memory(network, model.objective, host_memory, batch=config.batch, count=config.count * len(prompts), length=longest)
    if longest > model.trained_length:
        trained = model.trained_length
        print(f"note: length={longest} is beyond the {trained} tokens that the model was trained on; expect worse text", file=sys.stderr)
    vocabulary = model.vocabulary
    viewer = Viewer(model.codec.decode, end=vocabulary.eos_id, size=vocabulary.tokenizer_size, skip=int(model.objective == "ar"))
    drawn = config.count * sum(canvas.blanks for canvas in sequences)
    tokens = evaluations = 0
    texts: list[tuple[int, str]] = []
    with (
        SampleWriter(output, _record(config, method, model)) as writer,
        SamplingDisplay(drawn, sys.stderr, viewer=viewer if config.view else None) as display,
    ):
        watch = display.watch if config.view else None
        samples = generate(
            network, constants, config, method, vocabulary=vocabulary, canvases=sequences, progress=display.advance, watch=watch
        )  # fmt: skip
        for sample in samples:
            text = text_of(sample.ids, model.codec.decode, vocabulary.eos_id)
            writer.write(sample, prompts[sample.prompt], text)
            texts.append((sample.sequence, text))
            tokens, evaluations = tokens + len(sample.ids), evaluations + sample.evaluations
        speed = display.tokens_per_second
    for number, text in sorted(texts):
        print(f"--- sample {number + 1}\n{printable(text)}\n")
    print(summary(len(texts), tokens, evaluations, speed, output))


def _record(config: SamplingConfig, method: Method, model: SampledModel) -> dict[str, object]:
    """How the samples of a file were made: what was asked for, the settings that it came to, and of which model."""
    asked = {name: value for name, value in dataclasses.asdict(config).items() if name not in config.settings() and value is not None}
    return asked | {"sampler": method.sampler, **method.settings, "objective": model.objective, **model.origin}


def _free(path: Path) -> Path:
    """The path, or one with a number where earlier samples lie."""
    number = 1
    while path.with_stem(path.stem if number == 1 else f"{path.stem}-{number}").exists():
        number += 1
    return path if number == 1 else path.with_stem(f"{path.stem}-{number}")
