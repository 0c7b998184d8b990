"""Floating-point operations of a backbone: what MFU, budgets in FLOPs and plans count. No torch here.

One multiply-add is two operations. Only matrix products count: norms, rotary embeddings, activations and the embedding look-up are below 0.3%
of a step, and the time conditioning runs once per sequence, not once per token. Attention's score and value products are counted as if
every query saw every key: causal masks halve the work, not the count, so that causal and full networks of one shape compare.
"""

from pretrain.backbones.config import BackboneConfig

BACKWARD_FACTOR = 2
"""The backward pass multiplies once for the inputs' gradient and once for the weights'."""


def layer_weights(config: BackboneConfig) -> int:
    """Elements of one layer's matrices that every token multiplies."""
    head_dim = config.hidden // config.heads
    qkv = config.hidden * (config.heads + 2 * config.kv_groups) * head_dim
    mlp = (2 if config.kind == "dit" else 3) * config.hidden * config.ffn_width
    return qkv + config.hidden**2 + mlp


def forward_flops_per_token(config: BackboneConfig, model_size: int, length: int, *, attention: bool) -> float:
    """Forward operations per token; `model_size` is the vocabulary without padding, `length` the sequence length in tokens.

    Without `attention` this is 2 (12 n d^2 + V d) for a DiT with ffn = 4 d: the count of the scaling study (scaling-dllms), which has the
    output head and leaves out the products of scores and values (15% at 2121M and L = 2048, 49% at 6M, relative to what it counts).
    """
    matrices = 2.0 * (config.layers * layer_weights(config) + model_size * config.hidden)
    scores_and_values = 4.0 * config.layers * length * config.hidden
    return matrices + (scores_and_values if attention else 0.0)


def training_flops_per_token(
    config: BackboneConfig,
    model_size: int,
    length: int,
    *,
    attention: bool = True,
    recompute: bool = False,
    two_stream: float = 0.0,
    noisy: float = 1.0,
    preliminary: float = 0.0,
) -> float:
    """Forward and backward operations per token: 3x the forward pass.

    recompute    add what full activation recomputation executes again (every layer, not the head): hardware rather than model operations.
    two_stream   share of sequences that run as two streams through the layers (Eso-LM): a clean one of their length, and a noisy one of the
                 share `noisy` of it, which alone the head reads.
    preliminary  share of sequences that take one more forward pass, without gradient (RePlaid's self-conditioning).
    """
    forward = forward_flops_per_token(config, model_size, length, attention=attention)
    head = 2.0 * model_size * config.hidden
    streams = 1 + noisy
    longer = streams * (forward_flops_per_token(config, model_size, round(streams * length), attention=attention) - head)
    layers = (1 - two_stream) * (forward - head) + two_stream * longer
    heads = (1 - two_stream) * head + two_stream * noisy * head
    again = layers if recompute else 0.0
    return (1 + BACKWARD_FACTOR) * (layers + heads) + again + preliminary * forward


def steps_for_budget(
    config: BackboneConfig, model_size: int, length: int, global_sequences: int, flops: float, *, two_stream: float = 0.0, noisy: float = 1.0,
    preliminary: float = 0.0,
) -> int:  # fmt: skip
    """Whole optimizer steps that a budget of training operations pays for, counted as the scaling study does (no attention products)."""
    per_token = training_flops_per_token(config, model_size, length, attention=False, two_stream=two_stream, noisy=noisy, preliminary=preliminary)
    return int(flops / (per_token * length * global_sequences))
