"""The range of every field of a run: what is nonsense whatever the other fields say. No torch here."""

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pretrain.errors import UserError
from pretrain.objectives.rules import OBJECTIVE_RANGES, Range
from pretrain.run_config import RunConfig


def _up_to(most: int) -> Range:
    """A count. What is beyond `most` is a slip of the finger, and would only be noticed after minutes of planning or building."""
    return (lambda n: 1 <= n <= most, f"lie in [1, {most}]")


_COUNT = _up_to(10**12)
_RANKS = _up_to(2**20)
_POSITIVE: Range = (lambda x: x > 0, "be above 0")
_NOT_NEGATIVE: Range = (lambda x: x >= 0, "not be negative; use 0 or more")
_DECAY: Range = (lambda x: 0 <= x < 1, "lie in [0, 1); use for example 0.9")
NAME_LENGTH = 100
"""File systems take 255 bytes, and suffixes are added."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOLDER_NAME: Range = (
    lambda s: _NAME.fullmatch(s) is not None and len(s) <= NAME_LENGTH,
    f"start with a letter or digit, hold only letters, digits, dots, dashes and underscores, and have at most {NAME_LENGTH} of them, "
    "since it names a folder",
)
_TEXT: Range = (lambda s: bool(str(s).strip()), "not be empty")
FP32_SMALLEST, FP32_LARGEST = 1.2e-38, 3.4e38
"""Where fp32 loses digits towards zero, and where it ends."""
_IN_FP32 = ("backbone.", "objective.", "optimizer.", "schedule.")
"""Sections whose numbers are computed with in fp32."""

RANGES: dict[str, Range] = {
    "name": _FOLDER_NAME,
    "root": _TEXT,
    "init_from": _TEXT,
    "seed": (lambda n: 0 <= n < 2**63, "lie in [0, 2^63); use for example 1"),
    "tokenizer": (lambda s: s.endswith((".model", ".json")), "name a sentencepiece .model or a Hugging Face tokenizer.json"),
    "backbone.hidden": _up_to(2**20),
    "backbone.layers": _up_to(10_000),
    "backbone.heads": _up_to(2**20),
    "backbone.kv_heads": _up_to(2**20),
    "backbone.ffn": _up_to(2**24),
    "backbone.cond_dim": _up_to(2**20),
    "backbone.rope_base": (lambda x: x > 1, "be above 1; use 10000"),
    "backbone.norm_eps": (lambda x: 0 < x < 1, "lie strictly between 0 and 1; use 1e-5"),
    "backbone.vocab_multiple": _up_to(2**20),
    **OBJECTIVE_RANGES,
    "data.random_length_probability": (lambda x: 0 <= x <= 1, "be a probability; use a value in [0, 1]"),
    "data.max_epochs": (lambda x: x > 0, "be above 0; use for example 4, or null for any number"),
    "data.workers": (lambda n: 1 <= n <= 64, "lie in [1, 64], since each is a thread of every rank; use 1"),
    "data.prefetch": (lambda n: 1 <= n <= 64, "lie in [1, 64], since each is a global batch held in memory; use 2"),
    "sft.train": _TEXT,
    "sft.validation": _TEXT,
    "sft.epochs": _up_to(10_000),
    "batch.global_sequences": _up_to(2**24),
    "batch.micro_sequences": _up_to(2**24),
    "batch.length": _up_to(2**24),
    "duration.steps": _COUNT,
    "duration.tokens": (lambda x: 0 < x <= 1e18, "lie in (0, 1e18]"),
    "duration.flops": (lambda x: 0 < x <= 1e36, "lie in (0, 1e36]"),
    "duration.stop_after": _COUNT,
    "optimizer.beta1": _DECAY,
    "optimizer.beta2": _DECAY,
    "optimizer.eps": (lambda x: 0 < x <= 1, "lie in (0, 1]; use 1e-8"),
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.clip": _NOT_NEGATIVE,
    "optimizer.ema": (lambda x: 0 <= x < 1, "lie in [0, 1); use 0.9999, or 0 for none"),
    "schedule.peak": _POSITIVE,
    "schedule.final": _NOT_NEGATIVE,
    "schedule.warmup_steps": _NOT_NEGATIVE,
    "schedule.decay_fraction": (lambda x: 0 < x <= 1, "lie in (0, 1]; use for example 0.1"),
    "precision.loss_chunk": _COUNT,
    "parallel.tensor": _RANKS,
    "parallel.pipeline": _RANKS,
    "parallel.virtual_pipeline": _RANKS,
    "parallel.zero_stage": (lambda n: n in (1, 2, 3), "be 1, 2 or 3"),
    "validation.every": _NOT_NEGATIVE,
    "validation.draws": _up_to(10_000),
    "checkpoint.every": _COUNT,
    "checkpoint.keep": _NOT_NEGATIVE,
    "checkpoint.milestone_tokens": (lambda x: 1 <= x <= 1e18, "lie in [1, 1e18]; use for example 1e11, or null for none"),
    "telemetry.log_every": _COUNT,
    "telemetry.wandb_project": _TEXT,
    "telemetry.peak_tflops": (lambda x: 1e-6 <= x <= 1e9, "lie in [1e-6, 1e9]; leave it out for the device's own"),
    "telemetry.hang_seconds": (lambda x: x == 0 or 1 <= x <= 604_800, "lie in [1, 604800] seconds, or be 0 for no watchdog; use 1800"),
    "guard.spike_threshold": (lambda x: 1 <= x <= 1000, "lie in [1, 1000] deviations; use 6"),
    "guard.spike_warmup": (lambda n: 10 <= n <= 10**6, "lie in [10, 1000000], since a deviation needs observations; use 200"),
    "guard.max_skips": _NOT_NEGATIVE,
    "guard.window": _COUNT,
    "guard.replicas_every": _NOT_NEGATIVE,
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
            raise UserError(f"{key}={_shown(value)} must {rule}")
        if isinstance(value, float) and key.startswith(_IN_FP32) and value and not FP32_SMALLEST <= abs(value) <= FP32_LARGEST:
            becomes = "0" if abs(value) < FP32_SMALLEST else "infinite"
            raise UserError(f"{key}={value:g} must lie between {FP32_SMALLEST} and {FP32_LARGEST}: in fp32, where it is used, it is {becomes}")
    if config.sft is None and not config.data.train:
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


def _shown(value: Any) -> str:
    """A value in a sentence, which a long text would drown."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(str(value))} characters)"


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every field of a tree of dataclasses; mappings of sources are left out."""
    for item in fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from leaves(value, f"{key}.")
        elif not isinstance(value, dict):
            yield key, value
