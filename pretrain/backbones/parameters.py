"""Every parameter of a backbone by its logical name: the one table behind building, counting, initialising, planning, saving and converting.

Names carry global layer numbers and full shapes, so they do not depend on tensor, pipeline or data parallelism. The fused query-key-value
matrix has megatron-core's row order: for each key/value group its query heads, then its key head, then its value head.
"""

import math

from pretrain.backbones.config import GAMMA_FEATURES, BackboneConfig
from pretrain.parallel.sharding import Initializer, ParameterSpec

TIME_FREQUENCIES = 256
"""Width of the sinusoid that embeds sigma (scaling-dllms, models/dit.py)."""


PROMPT_TABLE = "embedding.prompt.weight"
"""RePlaid's own rows for the tokens of prompts."""


def parameter_table(config: BackboneConfig, rows: int) -> dict[str, ParameterSpec]:
    """Logical name -> specification, for a vocabulary of `rows` rows (the padded size; the model size when counting as papers do)."""
    return _dit_parameters(config, rows) if config.kind == "dit" else _llama_parameters(config, rows)


def count_parameters(config: BackboneConfig, model_size: int) -> int:
    """Parameters without vocabulary padding (the DiT's reproduce the configurations of scaling-dllms)."""
    return sum(spec.size for spec in parameter_table(config, model_size).values())


def _input_parameters(config: BackboneConfig, rows: int, *, init: Initializer, scale: float) -> dict[str, ParameterSpec]:
    """What turns the input into the residual stream. Only a vocabulary's table is large enough to be cut over tensor-parallel ranks."""
    d, inputs = config.hidden, config.inputs
    if inputs.kind == "tokens":
        return {"embedding.weight": ParameterSpec(shape=(rows, d), axis=0, stage="first", init=init, scale=scale)}
    if inputs.kind == "digits":
        return {"embedding.weight": ParameterSpec(shape=inputs.digit_table(d), stage="first", init=init, scale=scale)}
    latent = 1 / math.sqrt(inputs.latent)
    prompt = {PROMPT_TABLE: ParameterSpec(shape=(rows, d), axis=0, stage="first", init=init, scale=scale)} if inputs.prompt else {}
    return prompt | {
        "embedding.latent.weight": ParameterSpec(shape=(d, inputs.latent), stage="first", scale=latent, matrix=True),
        "embedding.estimate.weight": ParameterSpec(shape=(d, inputs.latent), stage="first", init="zeros", matrix=True),
        "embedding.gamma.weight": ParameterSpec(shape=(d, GAMMA_FEATURES), stage="first", init="zeros", matrix=True),
    }


def _dit_parameters(config: BackboneConfig, rows: int) -> dict[str, ParameterSpec]:
    """scaling-dllms, models/dit.py: PyTorch's default initialisation for linears, zeros for modulation and head."""
    d, f, c = config.hidden, config.ffn_width, config.cond_dim
    fan_d, fan_f = 1 / math.sqrt(d), 1 / math.sqrt(f)
    table = _input_parameters(config, rows, init="uniform", scale=fan_d)
    for name, fan_in in (("time.input", TIME_FREQUENCIES), ("time.output", c)):
        scale = 1 / math.sqrt(fan_in)
        table[f"{name}.weight"] = ParameterSpec(shape=(c, fan_in), stage="all", scale=scale, matrix=True)
        table[f"{name}.bias"] = ParameterSpec(shape=(c,), stage="all", scale=scale)
    for i in range(config.layers):
        layer = f"layers.{i}"
        table |= {
            f"{layer}.modulation.weight": ParameterSpec(shape=(6 * d, c), layer=i, init="zeros", matrix=True),
            f"{layer}.modulation.bias": ParameterSpec(shape=(6 * d,), layer=i, init="zeros"),
            f"{layer}.input_layernorm.weight": ParameterSpec(shape=(d,), layer=i, init="ones"),
            f"{layer}.self_attention.linear_qkv.weight": ParameterSpec(shape=(3 * d, d), axis=0, layer=i, scale=fan_d, matrix=True),
            f"{layer}.self_attention.linear_proj.weight": ParameterSpec(shape=(d, d), axis=1, layer=i, scale=fan_d, matrix=True),
            f"{layer}.pre_mlp_layernorm.weight": ParameterSpec(shape=(d,), layer=i, init="ones"),
            f"{layer}.mlp.linear_fc1.weight": ParameterSpec(shape=(f, d), axis=0, layer=i, scale=fan_d, matrix=True),
            f"{layer}.mlp.linear_fc1.bias": ParameterSpec(shape=(f,), axis=0, layer=i, scale=fan_d),
            f"{layer}.mlp.linear_fc2.weight": ParameterSpec(shape=(d, f), axis=1, layer=i, scale=fan_f, matrix=True),
            f"{layer}.mlp.linear_fc2.bias": ParameterSpec(shape=(d,), layer=i, scale=fan_f),
        }
    return table | {
        "final_layernorm.weight": ParameterSpec(shape=(d,), stage="last", init="ones"),
        "final_modulation.weight": ParameterSpec(shape=(2 * d, c), stage="last", init="zeros", matrix=True),
        "final_modulation.bias": ParameterSpec(shape=(2 * d,), stage="last", init="zeros"),
        "head.weight": ParameterSpec(shape=(rows, d), axis=0, stage="last", init="zeros"),
        "head.bias": ParameterSpec(shape=(rows,), axis=0, stage="last", init="zeros"),
    }


def _llama_parameters(config: BackboneConfig, rows: int) -> dict[str, ParameterSpec]:
    """No biases; initialisation of SMDM's lit_gpt: sd sqrt(2/5/d), and 1/(sqrt(d) layers) for the matrices that write to the residual stream."""
    d, f, head = config.hidden, config.ffn_width, config.hidden // config.heads
    sd, sd_out = math.sqrt(2 / 5 / d), 1 / (math.sqrt(d) * config.layers)
    qkv_rows = (config.heads + 2 * config.kv_groups) * head
    table = _input_parameters(config, rows, init="normal", scale=sd)
    for i in range(config.layers):
        layer = f"layers.{i}"
        table |= {
            f"{layer}.input_layernorm.weight": ParameterSpec(shape=(d,), layer=i, init="ones"),
            f"{layer}.self_attention.linear_qkv.weight": ParameterSpec(shape=(qkv_rows, d), axis=0, layer=i, init="normal", scale=sd, matrix=True),
            f"{layer}.self_attention.linear_proj.weight": ParameterSpec(shape=(d, d), axis=1, layer=i, init="normal", scale=sd_out, matrix=True),
            f"{layer}.pre_mlp_layernorm.weight": ParameterSpec(shape=(d,), layer=i, init="ones"),
            f"{layer}.mlp.linear_fc1.weight": ParameterSpec(shape=(2 * f, d), axis=0, sections=2, layer=i, init="normal", scale=sd, matrix=True),
            f"{layer}.mlp.linear_fc2.weight": ParameterSpec(shape=(d, f), axis=1, layer=i, init="normal", scale=sd_out, matrix=True),
        }
        if config.qk_norm:
            for norm in ("q_layernorm", "k_layernorm"):
                table[f"{layer}.self_attention.{norm}.weight"] = ParameterSpec(shape=(head,), layer=i, init="ones")
    return table | {
        "final_layernorm.weight": ParameterSpec(shape=(d,), stage="last", init="ones"),
        "head.weight": ParameterSpec(shape=(rows, d), axis=0, stage="last", init="normal", scale=sd),
    }
