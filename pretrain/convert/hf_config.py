"""A run's network and objective as fields of config.json: one table, read in both directions and compared field by field.

No torch here: what a run starts from is looked at before anything heavy is imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pretrain.backbones.config import BackboneConfig
from pretrain.errors import UserError, spelled
from pretrain.objectives.config import MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.run_config import RunConfig

MODEL_TYPE = "pretrain_language_model"
ROPE_LAYOUT = "half_split"


@dataclass(frozen=True)
class Field:
    """One field of config.json: its name, the key of the run that it states, and its value in a run. `of`: the objectives that have it."""

    name: str
    key: str
    value: Callable[[RunConfig, Vocabulary], Any]
    of: tuple[str, ...] = ()

    def applies(self, objective: str) -> bool:
        """Whether runs of this objective have the field."""
        return not self.of or objective in self.of


FIELDS = (
    Field("objective", "objective.name", lambda run, _: run.objective.name),
    Field("backbone", "backbone.kind", lambda run, _: run.backbone.kind),
    Field("vocab_size", "classes of the model", lambda _, vocabulary: vocabulary.model_size),
    Field("tokenizer_size", "ids of the tokenizer", lambda _, vocabulary: vocabulary.tokenizer_size),
    Field("mask_token_id", "objective.mask_id", lambda _, vocabulary: vocabulary.mask_id),
    Field("eos_token_id", "the tokenizer's end-of-document id", lambda _, vocabulary: vocabulary.eos_id),
    Field("hidden_size", "backbone.hidden", lambda run, _: run.backbone.hidden),
    Field("num_hidden_layers", "backbone.layers", lambda run, _: run.backbone.layers),
    Field("num_attention_heads", "backbone.heads", lambda run, _: run.backbone.heads),
    Field("num_key_value_heads", "backbone.kv_heads", lambda run, _: run.backbone.kv_groups),
    Field("intermediate_size", "backbone.ffn", lambda run, _: run.backbone.ffn_width),
    Field("max_position_embeddings", "batch.length", lambda run, _: run.batch.length),
    Field("qk_norm", "backbone.qk_norm", lambda run, _: run.backbone.qk_norm),
    Field("cond_dim", "backbone.cond_dim", lambda run, _: run.backbone.cond_dim),
    Field("rope_base", "backbone.rope_base", lambda run, _: run.backbone.rope_base),
    Field("rope_layout", "the layout of rotary pairs", lambda *_: ROPE_LAYOUT),
    Field("norm_eps", "backbone.norm_eps", lambda run, _: run.backbone.norm_eps),
    Field("fp32_residual", "precision.fp32_residual", lambda run, _: run.precision.fp32_residual),
    Field("schedule_eps", "objective.schedule_eps", lambda run, _: run.objective.schedule_eps, ("mdlm", "duo", "esolm", "mdm_prime")),
    Field("low_variance", "objective.low_variance", lambda run, _: run.objective.trains_low_variance, ("mdlm", "esolm")),
    Field("alpha_0", "objective.esolm.alpha_0", lambda run, _: run.objective.esolm.alpha_0, ("esolm",)),
    Field("clean_order", "objective.esolm.clean_order", lambda run, _: run.objective.esolm.clean_order, ("esolm",)),
    Field("latent", "objective.replaid.latent", lambda run, _: run.objective.replaid.latent, ("replaid",)),
    Field("schedule_hidden", "objective.replaid.schedule_hidden", lambda run, _: run.objective.replaid.schedule_hidden, ("replaid",)),
    Field("self_conditioning", "objective.replaid.self_conditioning", lambda run, _: run.objective.replaid.self_conditioning > 0, ("replaid",)),
    Field("prompt_table", "objective.replaid.prompt_embedding", lambda run, _: run.objective.replaid.prompt_embedding, ("replaid",)),
    Field("prompt_format", "sft.format", lambda run, _: None if run.sft is None else asdict(run.sft.format)),
    Field("digits", "objective.mdm_prime.digits", lambda run, _: run.objective.mdm_prime.digits, ("mdm_prime",)),
    Field("digit_base", "objective.mdm_prime.base", lambda run, _: run.objective.mdm_prime.base, ("mdm_prime",)),
    Field("digit_join", "objective.mdm_prime.join", lambda run, _: run.objective.mdm_prime.join, ("mdm_prime",)),
    Field("carry_over", "objective.mdm_prime.carry_over", lambda run, _: run.objective.mdm_prime.carry_over, ("mdm_prime",)),
    Field("shuffle_seed", "objective.mdm_prime.shuffle_seed", lambda run, _: run.objective.mdm_prime.shuffle_seed, ("mdm_prime",)),
)


def fields_of(run: RunConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Every field of config.json that follows from a run's configuration."""
    return {field.name: field.value(run, vocabulary) for field in FIELDS if field.applies(run.objective.name)}


def differences(found: Mapping[str, Any], run: RunConfig, vocabulary: Vocabulary) -> list[str]:
    """Fields of a config.json that are not the run's, in words."""
    wanted = fields_of(run, vocabulary)
    return [
        f"{field.name} is {spelled(found.get(field.name))} in config.json, and {field.key} of the run is {spelled(wanted[field.name])}"
        for field in FIELDS
        if field.name in wanted and found.get(field.name) != wanted[field.name]
    ]


def backbone_from(found: Mapping[str, Any]) -> BackboneConfig:
    """The training backbone of a config.json of this program. Raises UserError for a field that is missing or another RoPE."""
    if found.get("rope_layout") != ROPE_LAYOUT:
        raise UserError(f"rope_layout is {spelled(found.get('rope_layout'))}, and this program's networks rotate {ROPE_LAYOUT}: convert the weights")
    dit = found["backbone"] == "dit"
    heads, groups = found["num_attention_heads"], found["num_key_value_heads"]
    return BackboneConfig(
        kind=found["backbone"], hidden=found["hidden_size"], layers=found["num_hidden_layers"], heads=heads,
        kv_heads=None if dit or heads == groups else groups, ffn=found["intermediate_size"], qk_norm=found["qk_norm"],
        cond_dim=found["cond_dim"] if dit else 128, rope_base=float(found["rope_base"]), norm_eps=float(found["norm_eps"]),
    )  # fmt: skip


def objective_from(found: Mapping[str, Any]) -> ObjectiveConfig:
    """The objective of a config.json of this program; what only training reads has its default."""
    name = found["objective"]
    masked = found["mask_token_id"] is not None and found["mask_token_id"] < found["tokenizer_size"]
    config = ObjectiveConfig(name=name, mask_id=found["mask_token_id"] if masked else None)
    if "schedule_eps" in found and name in ("mdlm", "duo", "esolm", "mdm_prime"):
        config = replace(config, schedule_eps=found["schedule_eps"])
    if name == "esolm":
        config = replace(config, esolm=replace(config.esolm, alpha_0=found["alpha_0"], clean_order=found.get("clean_order", "shuffled")))
    if config.has_low_variance and not found["low_variance"]:
        config = replace(config, low_variance=False)
    if name == "replaid":
        share = RePlaidConfig().self_conditioning if found["self_conditioning"] else 0.0
        parts = {"self_conditioning": share, "output_prior": found["output_prior"] > 0, "prompt_embedding": bool(found.get("prompt_table", False))}
        config = replace(config, replaid=RePlaidConfig(latent=found["latent"], schedule_hidden=found["schedule_hidden"], **parts))
    if name == "mdm_prime":
        prime = MDMPrimeConfig(
            base=found["digit_base"], digits=found["digits"], join=found["digit_join"], carry_over=found["carry_over"],
            shuffle_seed=found["shuffle_seed"],
        )  # fmt: skip
        config = replace(config, mdm_prime=prime)
    return config
