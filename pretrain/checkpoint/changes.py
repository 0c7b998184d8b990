"""Which settings a run keeps when it continues: the class of every key, and the comparison with the configuration in a checkpoint.

No torch here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from pretrain.checkpoint.layout import CONFIG
from pretrain.errors import UserError, spelled
from pretrain.run_config import RunConfig


class Freedom(Enum):
    """What a continued run may do with a setting."""

    FIXED = "the network, the objective and the batch: another value is another run"
    COURSE = "what the steps to come depend on: resume=changed says that a change is meant"
    FREE = "how and where it runs, for how long, and what is recorded"


FREEDOM: dict[str, Freedom] = {
    "name": Freedom.FREE,
    "root": Freedom.FREE,
    "seed": Freedom.COURSE,
    "resume": Freedom.FREE,
    "init_from": Freedom.FREE,  # it gave the weights of step 0, which no later start reads
    "init_moments": Freedom.FREE,
    "tokenizer": Freedom.FIXED,  # its content; it may lie elsewhere
    "objective.name": Freedom.FIXED,
    "objective.mask_id": Freedom.FIXED,
    "objective.schedule_eps": Freedom.COURSE,
    "objective.time_eps": Freedom.COURSE,
    "objective.low_variance": Freedom.COURSE,
    "objective.evaluation": Freedom.COURSE,
    "objective.duo.curriculum": Freedom.COURSE,
    "objective.duo.top_k": Freedom.COURSE,
    "objective.duo.log10_tau_start": Freedom.COURSE,
    "objective.duo.log10_tau_end": Freedom.COURSE,
    "objective.duo.curriculum_start": Freedom.COURSE,
    "objective.duo.curriculum_end": Freedom.COURSE,
    "objective.duo.gamma_min": Freedom.COURSE,
    "objective.duo.gamma_max": Freedom.COURSE,
    "objective.esolm.alpha_0": Freedom.COURSE,
    "objective.esolm.batch_split": Freedom.COURSE,
    "objective.esolm.evaluate": Freedom.FREE,
    "objective.esolm.orders": Freedom.FREE,
    "objective.esolm.clean_order": Freedom.COURSE,
    "objective.replaid.latent": Freedom.FIXED,
    "objective.replaid.gamma_0": Freedom.FREE,  # where a learned endpoint started
    "objective.replaid.gamma_1": Freedom.FREE,
    "objective.replaid.schedule_hidden": Freedom.FIXED,
    "objective.replaid.self_conditioning": Freedom.COURSE,
    "objective.replaid.output_prior": Freedom.COURSE,
    "objective.replaid.prior_ramp_steps": Freedom.COURSE,
    "objective.replaid.learning_rate": Freedom.COURSE,
    "objective.replaid.endpoint_decay": Freedom.COURSE,
    "objective.replaid.prompt_embedding": Freedom.FIXED,
    "objective.mdm_prime.base": Freedom.FIXED,
    "objective.mdm_prime.digits": Freedom.FIXED,
    "objective.mdm_prime.shuffle_seed": Freedom.FIXED,
    "objective.mdm_prime.join": Freedom.FIXED,
    "objective.mdm_prime.carry_over": Freedom.COURSE,
    "objective.mdm_prime.loss": Freedom.COURSE,
    "objective.mdm_prime.joint_mask_above": Freedom.COURSE,
    "backbone.kind": Freedom.FIXED,
    "backbone.hidden": Freedom.FIXED,
    "backbone.layers": Freedom.FIXED,
    "backbone.heads": Freedom.FIXED,
    "backbone.kv_heads": Freedom.FIXED,
    "backbone.ffn": Freedom.FIXED,
    "backbone.qk_norm": Freedom.FIXED,
    "backbone.cond_dim": Freedom.FIXED,
    "backbone.rope_base": Freedom.FIXED,
    "backbone.norm_eps": Freedom.FIXED,
    "backbone.vocab_multiple": Freedom.FREE,  # the padded rows that it gives are compared by themselves
    "backbone.recompute": Freedom.FREE,
    "data.train.*.path": Freedom.FREE,  # the text is compared: a corpus may lie elsewhere
    "data.train.*.weight": Freedom.COURSE,
    "data.validation.*.path": Freedom.FREE,
    "data.validation.*.weight": Freedom.FREE,  # every source is read once, whole
    "data.phases": Freedom.COURSE,  # what is to come; what is past is held to the record (checkpoint.history)
    "data.max_epochs": Freedom.FREE,
    "data.document_masks": Freedom.COURSE,
    "data.random_length_probability": Freedom.COURSE,
    "data.loader": Freedom.FREE,
    "data.prefetch": Freedom.FREE,
    "data.workers": Freedom.FREE,
    "batch.global_sequences": Freedom.FIXED,
    "batch.micro_sequences": Freedom.FREE,
    "batch.length": Freedom.FIXED,
    "duration.steps": Freedom.FREE,  # where the schedule depends on them, its learning rates are compared
    "duration.tokens": Freedom.FREE,
    "duration.flops": Freedom.FREE,
    "duration.stop_after": Freedom.FREE,
    "optimizer.beta1": Freedom.COURSE,
    "optimizer.beta2": Freedom.COURSE,
    "optimizer.eps": Freedom.COURSE,
    "optimizer.weight_decay": Freedom.COURSE,
    "optimizer.decay": Freedom.COURSE,
    "optimizer.clip": Freedom.COURSE,
    "optimizer.ema": Freedom.COURSE,
    "schedule.kind": Freedom.COURSE,
    "schedule.peak": Freedom.COURSE,
    "schedule.final": Freedom.COURSE,
    "schedule.warmup_steps": Freedom.COURSE,
    "schedule.decay_fraction": Freedom.COURSE,
    "precision.compute": Freedom.COURSE,
    "precision.fp8": Freedom.COURSE,
    "precision.fp32_residual": Freedom.COURSE,
    "precision.loss_chunk": Freedom.FREE,
    "parallel.tensor": Freedom.FREE,
    "parallel.pipeline": Freedom.FREE,
    "parallel.virtual_pipeline": Freedom.FREE,
    "parallel.sequence": Freedom.FREE,
    "parallel.zero_stage": Freedom.FREE,
    "validation.every": Freedom.FREE,
    "validation.draws": Freedom.FREE,
    "checkpoint.every": Freedom.FREE,
    "checkpoint.keep": Freedom.FREE,
    "checkpoint.milestone_tokens": Freedom.FREE,
    "checkpoint.asynchronous": Freedom.FREE,
    "telemetry.log_every": Freedom.FREE,
    "telemetry.wandb": Freedom.FREE,
    "telemetry.wandb_project": Freedom.FREE,
    "telemetry.peak_tflops": Freedom.FREE,
    "telemetry.hang_seconds": Freedom.FREE,
    "guard.nonfinite": Freedom.FREE,
    "guard.spike": Freedom.FREE,
    "guard.spike_threshold": Freedom.FREE,
    "guard.spike_warmup": Freedom.FREE,
    "guard.max_skips": Freedom.FREE,
    "guard.window": Freedom.FREE,
    "guard.replicas_every": Freedom.FREE,
    "sft.train": Freedom.FREE,  # the examples are compared: the file may lie elsewhere
    "sft.validation": Freedom.FREE,
    "sft.epochs": Freedom.FREE,  # where the schedule depends on them, its learning rates are compared
    "sft.format.examples": Freedom.COURSE,
    "sft.format.question": Freedom.COURSE,
    "sft.format.rationale": Freedom.COURSE,
    "sft.format.answer": Freedom.COURSE,
    "sft.format.annotations": Freedom.COURSE,
    "sft.format.segment_bos": Freedom.COURSE,
    "sft.format.context": Freedom.FIXED,
    "sft.format.padding": Freedom.COURSE,
    "sft.format.score_prompt": Freedom.COURSE,
}
"""Every key of a RunConfig; `*` stands for the name of a source."""

DERIVED = "backbone.inputs."
"""What follows from the objective is not compared twice."""

SOURCES = ("data.train", "data.validation")
"""Mappings whose keys the user chooses."""


@dataclass(frozen=True)
class Change:
    """A setting that the checkpoint was trained with another value of. A source that came or went has a value of `absent`."""

    key: str
    then: Any
    now: Any

    @property
    def freedom(self) -> Freedom:
        """The class of the key."""
        return FREEDOM[pattern(self.key)]

    def __str__(self) -> str:
        return f"{self.key}: {spelled(self.then)} -> {spelled(self.now)}"


class _Absent:
    def __str__(self) -> str:
        return "absent"


ABSENT = _Absent()


def changes(then: Mapping[str, Any], now: Mapping[str, Any], meant_then: Mapping[str, Any], meant_now: Mapping[str, Any]) -> list[Change]:
    """What differs between two configurations as nested mappings, in the order of `now`.

    meant_then, meant_now  key -> what its value stood for on that machine (precision.compute=auto: fp32), compared instead where both are known.

    A key that the older program did not have counts as its default.
    """
    old, new = _defaults(RunConfig) | dict(leaves(then)), dict(leaves(now))
    for key in meant_then.keys() & meant_now.keys():
        old[key], new[key] = meant_then[key], meant_now[key]
    gone = [key for key in old if key not in new and (_is_source(key) or key.startswith("sft."))]
    found = [Change(key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in [*new, *gone]]
    return [change for change in found if change.then != change.now and not change.key.startswith(DERIVED)]


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The configuration that a checkpoint was written with, as nested mappings. Raises UserError if it is missing or unreadable."""
    path = checkpoint / CONFIG
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}, the configuration of the run, cannot be read ({' '.join(str(error).split())}); use another checkpoint") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} does not hold the configuration of a run; use another checkpoint")
    return tree


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings. An empty mapping of sources has none."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def pattern(key: str) -> str:
    """The key's entry in FREEDOM: the names of sources replaced by `*`."""
    for part in SOURCES:
        if key.startswith(f"{part}."):
            return f"{part}.*.{key.rpartition('.')[2]}"
    return key


def _is_source(key: str) -> bool:
    return pattern(key) != key


def _defaults(kind: type, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> default of every field that has one."""
    found: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint = hints[item.name]
        if isinstance(hint, type) and is_dataclass(hint):
            found |= _defaults(hint, f"{prefix}{item.name}.")
        elif item.default is not MISSING:
            found[f"{prefix}{item.name}"] = item.default
        elif item.default_factory is list:
            found[f"{prefix}{item.name}"] = []
    return found
