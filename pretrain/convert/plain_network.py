"""A training checkpoint, of any layout, as the plain network that samples and evaluates."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pretrain.checkpoint.changes import read_config
from pretrain.checkpoint.consolidate import stream
from pretrain.checkpoint.layout import CHECKPOINTS, step_name
from pretrain.checkpoint.logical import open_weights
from pretrain.checkpoint.manager import Checkpoint, find_checkpoint
from pretrain.checkpoint.zero_reader import MASTER
from pretrain.compose import typed
from pretrain.convert.param_map import ParameterMap, network_config
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.modeling_network import build_network
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.rules import run_vocabulary
from pretrain.run_config import RunConfig


@dataclass(frozen=True)
class TrainedModel:
    """A verified checkpoint with what is needed to use it."""

    folder: Path
    step: int
    run: RunConfig
    tokenizer: Tokenizer
    vocabulary: Vocabulary

    @property
    def run_directory(self) -> Path:
        """Where the run that wrote the checkpoint lives."""
        return self.folder.parent.parent

    def network(self, *, device: torch.device, dtype: torch.dtype) -> DiT | Llama:
        """The plain network with the checkpoint's master weights, in evaluation mode; read one tensor at a time."""
        mapping = ParameterMap(self.run.backbone, self.vocabulary.model_size)
        with torch.device("meta"):
            network = build_network(network_config(self.run.backbone, self.vocabulary.model_size, fp32_residual=self.run.precision.fp32_residual))
        plain: dict[str, Tensor] = {}
        for name, full in stream(open_weights(self.folder), MASTER):
            for part, tensor in mapping.split(name, full).items():
                plain[part] = tensor.to(device=device, dtype=dtype).contiguous()
        network.load_state_dict(plain, assign=True)
        return network.eval().requires_grad_(False)


def find_step(path: Path, step: int | None = None) -> Checkpoint:
    """The newest complete checkpoint of the run directory `path`, or that of `step`, or the one whose folder `path` is; checksums verified.

    Raises UserError when there is none, or it is damaged.
    """
    if step is not None and os.path.isdir(path / CHECKPOINTS):
        folder = path / CHECKPOINTS / step_name(step)
        if not folder.is_dir():
            kept = ", ".join(sorted(entry.name for entry in (path / CHECKPOINTS).iterdir())) or "none"
            raise UserError(f"{path} has no checkpoint of step {step}; it has {kept}")
        path = folder
    checkpoint = find_checkpoint(path)
    if step is not None and checkpoint.step != step:
        raise UserError(f"{path} is the checkpoint of step {checkpoint.step}, not {step}; leave step out, or name the run directory")
    return checkpoint


def open_trained(path: Path, step: int | None = None) -> TrainedModel:
    """The newest complete checkpoint of the run directory `path`, or that of `step`, or the one whose folder `path` is; checksums verified.

    Raises UserError when there is none, when it or its configuration is damaged, and when the tokenizer is not the one it was trained with.
    """
    checkpoint = find_step(path, step)
    run = typed(RunConfig, read_config(checkpoint.folder))
    tokenizer = Tokenizer(run.tokenizer)
    vocabulary = run_vocabulary(run, tokenizer)
    if checkpoint.state.rows != vocabulary.padded_size:
        raise UserError(
            f"{checkpoint.folder} was trained with {checkpoint.state.rows} rows of vocabulary, but {run.tokenizer} makes {vocabulary.padded_size}; "
            "put back the tokenizer of that run"
        )
    return TrainedModel(checkpoint.folder, checkpoint.step, run, tokenizer, vocabulary)
