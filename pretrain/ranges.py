"""The range of every field of a run: what is nonsense whatever the other fields say. No torch here."""

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pretrain.errors import UserError
from pretrain.objectives.rules import OBJECTIVE_RANGES, Range
from pretrain.run_config import RunConfig

_COUNT: Range = (lambda n: n >= 1, "be at least 1; use 1 or more")
_POSITIVE: Range = (lambda x: x > 0, "be above 0")
_NOT_NEGATIVE: Range = (lambda x: x >= 0, "not be negative; use 0 or more")
_DECAY: Range = (lambda x: 0 <= x < 1, "lie in [0, 1); use for example 0.9")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOLDER_NAME: Range = (
    lambda s: _NAME.fullmatch(s) is not None,
    "start with a letter or digit and hold only letters, digits, dots, dashes and underscores, since it names a folder",
)
_TEXT: Range = (lambda s: bool(s.strip()), "not be empty")

RANGES: dict[str, Range] = {
    "name": _FOLDER_NAME,
    "root": _TEXT,
    "seed": (lambda n: 0 <= n < 2**63, "lie in [0, 2^63); use for example 1"),
    "tokenizer": (lambda s: s.endswith((".model", ".json")), "name a sentencepiece .model or a Hugging Face tokenizer.json"),
    "backbone.hidden": _COUNT,
    "backbone.layers": _COUNT,
    "backbone.heads": _COUNT,
    "backbone.kv_heads": _COUNT,
    "backbone.ffn": _COUNT,
    "backbone.cond_dim": _COUNT,
    "backbone.rope_base": (lambda x: x > 1, "be above 1; use 10000"),
    "backbone.norm_eps": (lambda x: 0 < x < 1, "lie strictly between 0 and 1; use 1e-5"),
    "backbone.vocab_multiple": _COUNT,
    **OBJECTIVE_RANGES,
    "data.random_length_probability": (lambda x: 0 <= x <= 1, "be a probability; use a value in [0, 1]"),
    "data.prefetch": _COUNT,
    "batch.global_sequences": _COUNT,
    "batch.micro_sequences": _COUNT,
    "batch.length": _COUNT,
    "duration.steps": _COUNT,
    "duration.tokens": _POSITIVE,
    "duration.flops": _POSITIVE,
    "duration.stop_after": _COUNT,
    "optimizer.beta1": _DECAY,
    "optimizer.beta2": _DECAY,
    "optimizer.eps": _POSITIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.clip": _NOT_NEGATIVE,
    "optimizer.ema": (lambda x: 0 <= x < 1, "lie in [0, 1); use 0.9999, or 0 for none"),
    "schedule.peak": _POSITIVE,
    "schedule.final": _NOT_NEGATIVE,
    "schedule.warmup_steps": _NOT_NEGATIVE,
    "schedule.decay_fraction": (lambda x: 0 < x <= 1, "lie in (0, 1]; use for example 0.1"),
    "precision.loss_chunk": _COUNT,
    "parallel.tensor": _COUNT,
    "parallel.pipeline": _COUNT,
    "parallel.virtual_pipeline": _COUNT,
    "parallel.zero_stage": (lambda n: n in (1, 2, 3), "be 1, 2 or 3"),
    "validation.every": _NOT_NEGATIVE,
    "validation.draws": _COUNT,
    "checkpoint.every": _COUNT,
    "checkpoint.keep": _NOT_NEGATIVE,
    "telemetry.log_every": _COUNT,
    "telemetry.wandb_project": _TEXT,
    "telemetry.peak_tflops": _POSITIVE,
}
"""Every number and free text of a RunConfig but the sources of data.train and data.validation, which have rules of their own."""


def check_ranges(config: RunConfig) -> None:
    """Raises UserError for the first value that is out of range. None is legal wherever the type allows it."""
    for key, value in leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value} must be a finite number")
        if value is None or key not in RANGES:
            continue
        legal, rule = RANGES[key]
        if not legal(value):
            raise UserError(f"{key}={value!r} must {rule}")
    if not config.data.train:
        raise UserError("data.train names no source: choose one with data=…, or add one with +data.train.NAME.path=FOLDER")
    for part in ("train", "validation"):
        for name, source in getattr(config.data, part).items():
            key = f"data.{part}.{name}"
            if not _FOLDER_NAME[0](name):
                raise UserError(f"{key}: the name of a source must {_FOLDER_NAME[1]}")
            if not source.path.strip():
                raise UserError(f"{key}.path is empty: give the folder that launchers/prepare_data.py wrote")
            if not (math.isfinite(source.weight) and source.weight > 0):
                raise UserError(f"{key}.weight={source.weight} must be above 0; to leave the source out, remove it with ~{key}")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every field of a tree of dataclasses; mappings of sources are left out."""
    for item in fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from leaves(value, f"{key}.")
        elif not isinstance(value, dict):
            yield key, value
