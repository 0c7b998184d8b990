"""A finished run on disk, without the minutes of training it: random weights in a real checkpoint, a tokenizer of a few words."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Words
from torch import Tensor

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import parameter_table
from pretrain.build import build_objective
from pretrain.checkpoint.layout import Layout, TrainState
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.data.config import DataConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.objectives.config import ObjectiveConfig
from pretrain.rules import run_vocabulary
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig

WORDS = ["the", "queen", "and", "king", "of", "a", "play", "sing", "loud"]
ROWS = 16


def write_run(
    folder: Path, objective: str | ObjectiveConfig, steps: tuple[int, ...] = (7,), *, ema: bool = False, words: Sequence[str] = WORDS, **backbone: Any
) -> tuple[Path, dict[str, Tensor]]:
    """A run directory with one checkpoint per step, and the logical weights of the last. ema: with an average, twice the weights."""
    objective = ObjectiveConfig(name=objective) if isinstance(objective, str) else objective  # type: ignore[arg-type]
    config = RunConfig(
        name="tiny",
        root=str(folder),
        tokenizer=str(folder / "tokenizer.json"),
        objective=objective,
        backbone=BackboneConfig(**{"kind": "dit", "hidden": 16, "layers": 2, "heads": 2, "cond_dim": 8, "vocab_multiple": ROWS, **backbone}),
        data=DataConfig(),
        batch=BatchConfig(global_sequences=2, micro_sequences=2, length=12),
        duration=DurationConfig(steps=7),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer.json", words)
    rows = run_vocabulary(config, Tokenizer(config.tokenizer)).padded_size
    config.directory.mkdir(parents=True)
    text = yaml.safe_dump(dataclasses.asdict(config))
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        table = parameter_table(config.backbone, rows)
        weights = {name: torch.randn(spec.shape, generator=generator) * 0.4 for name, spec in table.items()}
        state = TrainState(
            step=step, tokens=0, samples=0, lr=0.0, next_batch="", seed=1, backbone=dataclasses.asdict(config.backbone), rows=rows,
            layout=Layout(tensor=1, pipeline=1, virtual_pipeline=1, data=1, zero_stage=3),
        )  # fmt: skip
        manager = CheckpointManager(config.directory, keep=0, say=lambda _: None)
        manager.save(step, lambda target, w=weights: _write(target, w, config, ema=ema), state, text)
    return config.directory, weights


def write_tokenizer(path: Path, words: Sequence[str] = WORDS) -> None:
    model = Words(models.WordLevel({word: i for i, word in enumerate([*words, "<unk>", "</s>"])}, unk_token="<unk>"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(prefix="##")
    model.add_special_tokens([AddedToken("</s>", special=True)])
    model.save(str(path))


def _write(target: Path, weights: dict[str, Tensor], config: RunConfig, *, ema: bool) -> None:
    _write_zero(target / "zero", weights, ema=ema)
    vocabulary = run_vocabulary(config, Tokenizer(config.tokenizer))
    modules = build_objective(config.objective, vocabulary).modules()
    if list(modules.parameters()):
        torch.save({"modules": modules.state_dict(), "optimizer": {}}, target / "objective.pt")


def _write_zero(folder: Path, weights: dict[str, Tensor], *, ema: bool) -> None:
    """DeepSpeed's ZeRO-3 files of a single rank: the one form that holds no class of DeepSpeed's."""
    folder.mkdir()
    flat = torch.cat([value.flatten() for value in weights.values()])
    state = {"step": torch.tensor(7.0), **({"ema": 2 * flat} if ema else {})}
    optimizer = {"fp32_flat_groups": [flat], "optimizer_state_dict": {"state": {0: state}}}
    torch.save({"optimizer_state_dict": optimizer}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"param_shapes": [{name: value.shape for name, value in weights.items()}]}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
