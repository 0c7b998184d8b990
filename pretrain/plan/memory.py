"""Memory of one rank, part by part, from the configuration alone. Bytes. No torch here.

What is counted follows the engine: DeepSpeed ZeRO with fp32 master weights and moments, gradients accumulated in fp32, megatron-core's
schedules, activations as the layers save them for the backward pass, and the logits of one micro-batch with one slice of them in fp32.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cache

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import parameter_table
from pretrain.rules import Derived
from pretrain.run_config import RunConfig

FP32 = 4
MOMENTS = 2
"""AdamW's running averages."""
ZERO3_LIVE_PARAMETERS = 10**9
"""DeepSpeed's default stage3_max_live_parameters: how many gathered elements it may keep."""
BUCKET = 50_000_000
"""Elements of the engine's communication buckets."""
WORKSPACE_CUDA = 2.5 * 1024**3
"""CUDA context, cuBLAS and NCCL buffers, fragmentation."""
WORKSPACE_CPU = 0.75 * 1024**3
"""Interpreter and libraries of one process."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank.

    parameters    weights in the compute type (fp32 weights are the master weights at fp32), gathered ones included under ZeRO 3.
    gradients     what accumulates over micro-batches, in fp32.
    optimizer     master weights, AdamW's two moments and the moving average; and all of the objective's own parameters, which nothing cuts.
    buffers       communication buckets and the largest single gradient in the compute type.
    activations   saved for the backward pass by every micro-batch in flight, and one layer's working set.
    logits        of one micro-batch on the last stage, with one slice in fp32.
    snapshot      of a save in the background, where the rank computes in host memory (beside a GPU it takes none of the GPU's: snapshot_bytes).
    workspace     libraries, contexts, fragmentation.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    logits: float
    snapshot: float
    workspace: float

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(getattr(self, item.name) for item in fields(self))


def rank_memory(config: RunConfig, derived: Derived, *, compute_bytes: int, cuda: bool) -> tuple[Memory, int]:
    """Memory of the rank that needs most, and the pipeline stage it is on."""
    # Stages between hold what the first one holds but for the embedding, with fewer micro-batches in flight.
    ends = sorted({0, config.parallel.pipeline - 1})
    stages = {stage: stage_memory(config, derived, stage, compute_bytes=compute_bytes, cuda=cuda) for stage in ends}
    largest = max(ends, key=lambda stage: stages[stage].total)
    return stages[largest], largest


def stage_memory(config: RunConfig, derived: Derived, stage: int, *, compute_bytes: int, cuda: bool) -> Memory:
    """Memory of one rank on pipeline stage `stage`."""
    parallel, shards = config.parallel, derived.data_parallel
    count, largest = _stage_parameters(config, derived, stage)
    bucket = min(max(largest, 1_000_000), BUCKET)
    if parallel.zero_stage == 3:
        parameters = (count / shards + (min(count, ZERO3_LIVE_PARAMETERS) if shards > 1 else 0)) * compute_bytes
    else:
        parameters = count * compute_bytes
    held = count / shards if parallel.zero_stage > 1 else count
    averages = 1 if config.optimizer.ema else 0
    return Memory(
        parameters=float(parameters),
        gradients=float(held * FP32),
        optimizer=FP32 * (1 + MOMENTS + averages) * count / shards + FP32 * (2 + MOMENTS) * objective_elements(config, derived),
        buffers=float(largest * compute_bytes + 2 * bucket * FP32),
        activations=_activations(config, derived, stage, compute_bytes),
        logits=_logits(config, derived, compute_bytes) if stage == parallel.pipeline - 1 else 0.0,
        snapshot=0.0 if cuda else snapshot_bytes(config, derived, stage, compute_bytes=compute_bytes),
        workspace=WORKSPACE_CUDA if cuda else WORKSPACE_CPU,
    )


def snapshot_bytes(config: RunConfig, derived: Derived, stage: int, *, compute_bytes: int) -> float:
    """Host memory in which a rank keeps what a checkpoint holds of it while that is written; 0 for saves at once.

    Weights in the compute type (of one data-parallel rank alone; under ZeRO 3 the masters stand for them), its share of the optimizer, and the
    objective's own parameters.
    """
    if not config.checkpoint.asynchronous:
        return 0.0
    count, _ = _stage_parameters(config, derived, stage)
    share = count / derived.data_parallel
    weights = 0 if config.parallel.zero_stage == 3 else count * compute_bytes
    averages = 1 if config.optimizer.ema else 0
    return float(weights + FP32 * (1 + MOMENTS + averages) * share + FP32 * (1 + MOMENTS) * objective_elements(config, derived))


def objective_elements(config: RunConfig, derived: Derived) -> int:
    """Parameters of the objective itself, which every rank holds whole: RePlaid's embeddings, schedule and endpoints."""
    if config.objective.name != "replaid":
        return 0
    replaid = config.objective.replaid
    return derived.padded_size * replaid.latent + 3 * replaid.schedule_hidden + 2


def layer_activations_per_token(backbone: BackboneConfig, compute_bytes: int) -> tuple[float, float]:
    """(whole, split) bytes that one layer saves per token: `whole` is split only by sequence parallelism, `split` by tensor parallelism.

    whole   inputs and normalised values of the two norms, in fp32; the inputs of the two branches, and, under AdaLN, their outputs, in the
            compute type.
    split   queries, keys and values before and after rotation, the attention's output in both of its layouts, fp32 inputs and normalised
            values of QK-norm, and the MLP's inner activations.
    """
    d, head_dim = backbone.hidden, backbone.hidden // backbone.heads
    kv = backbone.kv_groups * head_dim
    adaln = backbone.kind == "dit"
    whole = 4 * d * FP32 + (4 if adaln else 2) * d * compute_bytes
    attention = (d + 2 * kv) + (d + kv) + 2 * d
    qk_norm = 2 * (d + kv) * FP32 if backbone.qk_norm else 0
    mlp = (2 if adaln else 5) * backbone.ffn_width
    return float(whole), float((attention + mlp) * compute_bytes + qk_norm)


def _activations(config: RunConfig, derived: Derived, stage: int, compute_bytes: int) -> float:
    parallel, backbone = config.parallel, config.backbone
    tokens = config.batch.micro_sequences * config.batch.length * (2 if config.objective.two_stream_share else 1)
    sequence_split = parallel.tensor if parallel.sequence else 1
    whole, split = layer_activations_per_token(backbone, compute_bytes)
    layer = tokens * (whole / sequence_split + split / parallel.tensor)
    residual = tokens * backbone.hidden * FP32 / sequence_split
    chunk_layers = backbone.layers // (parallel.pipeline * parallel.virtual_pipeline)
    in_flight = chunks_in_flight(parallel.pipeline, parallel.virtual_pipeline, stage, derived.micro_batches)
    saved = chunk_layers * (residual if backbone.recompute == "full" else layer)
    working = 2 * layer if backbone.recompute == "full" else layer
    final = 2 * residual + tokens * backbone.hidden * compute_bytes / sequence_split if stage == parallel.pipeline - 1 else 0.0
    return in_flight * (saved + residual) + working + final


def chunks_in_flight(pipeline: int, virtual: int, stage: int, micro_batches: int) -> int:
    """Forward passes of a chunk whose backward pass is still to come, at most, on this stage (1F1B, or interleaved over `virtual` chunks)."""
    if virtual == 1:
        return min(micro_batches, pipeline - stage)
    return min(micro_batches * virtual, 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1)


def _logits(config: RunConfig, derived: Derived, compute_bytes: int) -> float:
    """Logits once (their gradient is written over them), and three fp32 arrays of one slice: upcast logits, probabilities, gradient."""
    columns = derived.padded_size / config.parallel.tensor
    micro, length = config.batch.micro_sequences, config.batch.length
    return micro * columns * (length * compute_bytes + 3 * FP32 * min(config.precision.loss_chunk, length))


@dataclass(frozen=True)
class _Sizes:
    """Elements that one tensor-parallel rank holds of a network: of any one layer, of its largest parameter, and (stage, elements) of the rest."""

    layer: int
    largest: int
    rest: tuple[tuple[str | None, int], ...]


@cache
def _sizes(backbone: BackboneConfig, rows: int, tensor: int) -> _Sizes:
    """`backbone` with one layer: all are alike, so that a plan costs the same at every depth."""
    layer, rest = [], []
    for spec in parameter_table(backbone, rows).values():
        size = math.prod(spec.local_shape(tensor))
        if spec.layer is None:
            rest.append((spec.stage, size))
        else:
            layer.append(size)
    return _Sizes(sum(layer), max(layer), tuple(rest))


def _stage_parameters(config: RunConfig, derived: Derived, stage: int) -> tuple[int, int]:
    """Elements of all parameters of one rank on a stage, and of the largest."""
    parallel, backbone = config.parallel, config.backbone
    sizes = _sizes(replace(backbone, layers=1), derived.padded_size, parallel.tensor)
    held = {"all"} | ({"first"} if stage == 0 else set()) | ({"last"} if stage == parallel.pipeline - 1 else set())
    rest = [size for place, size in sizes.rest if place in held]
    return backbone.layers // parallel.pipeline * sizes.layer + sum(rest), max([sizes.largest, *rest])
