"""The Llama-style autoregressive network as a model class that `transformers` itself ships: fields of its config.json, and names of its tensors.

LlamaForCausalLM without QK-norm, Qwen3ForCausalLM with it (the same network and RMSNorm on queries and keys, per head). No torch here.
"""

from collections.abc import Mapping
from typing import Any

from pretrain.backbones.config import BackboneConfig
from pretrain.errors import UserError, spelled
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.run_config import RunConfig

CLASSES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""Class -> model_type."""


def require_stock(run: RunConfig) -> str:
    """The class that a run's model fits. Raises UserError where none does."""
    if run.objective.name != "ar":
        raise UserError(f"objective={run.objective.name} has no stock class of transformers, which are autoregressive; use format=own")
    if run.backbone.kind != "llama":
        raise UserError("backbone.kind=dit has no stock class of transformers (AdaLN, LayerNorm without bias, biases in the MLP); use format=own")
    return "Qwen3ForCausalLM" if run.backbone.qk_norm else "LlamaForCausalLM"


def stock_config(run: RunConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """config.json of the stock class, for old and new versions of `transformers` (which moved RoPE's base)."""
    name, backbone = require_stock(run), run.backbone
    return {
        "architectures": [name],
        "model_type": CLASSES[name],
        "vocab_size": vocabulary.model_size,
        "hidden_size": backbone.hidden,
        "intermediate_size": backbone.ffn_width,
        "num_hidden_layers": backbone.layers,
        "num_attention_heads": backbone.heads,
        "num_key_value_heads": backbone.kv_groups,
        "head_dim": backbone.hidden // backbone.heads,
        "hidden_act": "silu",
        "max_position_embeddings": run.batch.length,
        "rms_norm_eps": backbone.norm_eps,
        "rope_theta": backbone.rope_base,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": backbone.rope_base},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": vocabulary.eos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.eos_id,
    }


def stock_name(plain: str) -> str:
    """A tensor of the plain network in the stock class."""
    return plain if plain.startswith("lm_head.") else f"model.{plain}"


def stock_backbone(found: Mapping[str, Any]) -> BackboneConfig:
    """The training backbone of a stock config.json. Raises UserError for what the Llama-style network does not have."""
    name = (found.get("architectures") or ["no class"])[0]
    if name not in CLASSES:
        raise UserError(f"config.json names {name}, and weights are read from {', '.join(CLASSES)} and this program's own exports")
    theta, scaling = _rope(found)
    heads = found["num_attention_heads"]
    refused = {
        "attention_bias": found.get("attention_bias"), "mlp_bias": found.get("mlp_bias"), "RoPE scaling": scaling,
        "sliding-window attention": found.get("use_sliding_window"),
        f"hidden_act={found.get('hidden_act')}": found.get("hidden_act", "silu") != "silu",
        f"head_dim={found.get('head_dim')}": (found.get("head_dim") or found["hidden_size"] // heads) * heads != found["hidden_size"],
    }  # fmt: skip
    for what, there in refused.items():
        if there:
            raise UserError(f"the model has {what}, which this program's Llama-style network has not; choose a model without it")
    groups = found.get("num_key_value_heads") or heads
    return BackboneConfig(
        kind="llama", hidden=found["hidden_size"], layers=found["num_hidden_layers"], heads=heads, kv_heads=None if groups == heads else groups,
        ffn=found["intermediate_size"], qk_norm=name == "Qwen3ForCausalLM", rope_base=theta, norm_eps=float(found.get("rms_norm_eps", 1e-6)),
    )  # fmt: skip


def stock_differences(found: Mapping[str, Any], run: RunConfig, vocabulary: Vocabulary) -> list[str]:
    """Fields of a stock config.json that are not the run's, in words."""
    wanted = stock_config(run, vocabulary)
    return [
        f"{name} is {spelled(found.get(name))} in config.json, and {spelled(value)} follows from the run"
        for name, value in wanted.items()
        if found.get(name) != value
    ]


def _rope(found: Mapping[str, Any]) -> tuple[float, Any]:
    """RoPE's base, and its kind of scaling, None where there is none; from either place."""
    new = found.get("rope_parameters") or {}
    scaling = found.get("rope_scaling") or {}
    theta = new.get("rope_theta", found.get("rope_theta", 10000.0))
    kinds = [part.get("rope_type", part.get("type", "default")) for part in (new, scaling) if part]
    return float(theta), next((kind for kind in kinds if kind != "default"), None)
