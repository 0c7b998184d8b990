"""What a configuration may say: ranges of every field, and rules between fields, each refused with the value, the rule and the nearest fix.

`resolve` is the way in: it checks everything that does not need a device or a file, and computes what follows from the configuration.
No torch here.
"""

import math
from dataclasses import dataclass

from pretrain.backbones.flops import steps_for_budget, training_flops_per_token
from pretrain.data.phases import check_phases
from pretrain.data.tokenizer import Tokenizer, vocabulary_for
from pretrain.engine.schedule import warmup_steps
from pretrain.errors import UserError
from pretrain.objectives.rules import check_objective, check_parts, check_vocabulary
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.ranges import check_ranges
from pretrain.run_config import RunConfig

FP8_MULTIPLE = 16
"""FP8 matrix products need every dimension to be a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What a configuration means on `world_size` ranks.

    micro_batches    forward passes per optimizer step and data-parallel rank.
    tokens_per_step  input tokens of one optimizer step, all ranks together.
    steps            length of the learning-rate schedule; last_step is where this run leaves (earlier with duration.stop_after).
    model_size       classes of the model; padded_size is what it occupies in matrices.
    """

    world_size: int
    data_parallel: int
    micro_batches: int
    tokens_per_step: int
    steps: int
    last_step: int
    warmup_steps: int
    model_size: int
    padded_size: int


def resolve(config: RunConfig, *, world_size: int, model_size: int) -> Derived:
    """Everything that follows from a legal configuration; `model_size` is the vocabulary with its mask. Raises UserError."""
    validate(config, world_size=world_size)
    check_vocabulary(config.objective, model_size)
    data_parallel = world_size // config.parallel.model_ranks
    tokens_per_step = config.batch.global_sequences * config.batch.length
    steps = _steps(config, model_size, tokens_per_step)
    if config.sft is None:
        check_phases(config.data, tokens_per_step=tokens_per_step, steps=steps)
    warmup = _check_schedule(config, steps)
    return Derived(
        world_size=world_size,
        data_parallel=data_parallel,
        micro_batches=config.batch.global_sequences // (config.batch.micro_sequences * data_parallel),
        tokens_per_step=tokens_per_step,
        steps=steps,
        last_step=config.duration.stop_after or steps,
        warmup_steps=warmup,
        model_size=model_size,
        padded_size=Vocabulary.padded(model_size, config.backbone.vocab_multiple),
    )


def run_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> Vocabulary:
    """The three vocabulary sizes and the mask id of a run. Raises UserError for a mask id that text may use."""
    objective = config.objective
    return vocabulary_for(tokenizer, objective.has_mask, config.backbone.vocab_multiple, objective.mask_id)


def run_flops_per_token(config: RunConfig, model_size: int) -> float:
    """Model operations per input token of a run's training, attention included: what MFU and plans count."""
    objective = config.objective
    return training_flops_per_token(
        config.backbone, model_size, config.batch.length, two_stream=objective.two_stream_share, noisy=objective.noisy_share,
        preliminary=objective.preliminary_share,
    )


def validate(config: RunConfig, *, world_size: int) -> None:
    """Every rule that needs neither the vocabulary, a device nor a file. Raises UserError for the first one broken."""
    check_ranges(config)
    _check_backbone(config)
    _check_objective(config)
    _check_duration(config)
    _check_pipeline(config)
    _check_tensor(config)
    _check_world(config, world_size)
    _check_fp8(config)


def legal_tensor_sizes(config: RunConfig) -> list[int]:
    """Tensor-parallel sizes that this network and batch can be cut into."""
    return divisors(math.gcd(*(size for _, size in _split_by_tensor(config))))


def divisors(value: int) -> list[int]:
    """Every divisor of a positive number, in order."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return sorted({*small, *(value // n for n in small)})


def nearest_multiple(value: int, of: int) -> int:
    """The positive multiple of `of` nearest to `value`."""
    return max(round(value / of), 1) * of


def _check_backbone(config: RunConfig) -> None:
    backbone = config.backbone
    if backbone.hidden % backbone.heads:
        # Rotary embeddings turn pairs: heads of an odd width would be refused next.
        fixes = [f"backbone.hidden={nearest_multiple(backbone.hidden, 2 * backbone.heads)}"] if backbone.heads <= backbone.hidden else []
        if backbone.hidden % 2 == 0:
            fixes.append(f"backbone.heads={_divisor(backbone.hidden // 2, backbone.heads)}")
        fixes = fixes or [f"backbone.heads=1 with backbone.hidden={backbone.hidden + 1}"]
        raise UserError(
            f"backbone.hidden={backbone.hidden} must be a multiple of backbone.heads={backbone.heads}; use {' or '.join(fixes)}"
        )
    head_dim = backbone.hidden // backbone.heads
    if head_dim % 2:
        raise UserError(
            f"backbone.hidden / backbone.heads = {head_dim} must be even, since rotary embeddings turn pairs; "
            f"use backbone.hidden={(head_dim + 1) * backbone.heads}"
        )
    if backbone.kind == "dit":
        for key, value in (("kv_heads", backbone.kv_heads), ("qk_norm", backbone.qk_norm)):
            if value:
                raise UserError(f"backbone.{key}={value} belongs to backbone.kind=llama; the dit has none: leave it out or use backbone=llama")
    elif backbone.cond_dim != 128:
        raise UserError(f"backbone.cond_dim={backbone.cond_dim} has no meaning for llama, which has no time conditioning: leave it out")
    if backbone.heads % backbone.kv_groups:
        raise UserError(
            f"backbone.kv_heads={backbone.kv_heads} must divide backbone.heads={backbone.heads}; "
            f"use backbone.kv_heads={_divisor(backbone.heads, backbone.kv_groups)}"
        )


def _check_objective(config: RunConfig) -> None:
    objective = config.objective
    check_objective(objective)
    if config.sft is None and objective.name == "replaid" and objective.replaid.prompt_embedding:
        raise UserError("objective.replaid.prompt_embedding=true is for fine-tuning, whose examples have prompts; leave it out")
    if config.sft is not None and config.data.random_length_probability:
        raise UserError(
            f"data.random_length_probability={config.data.random_length_probability} cuts pretraining text, and examples stay whole; leave it out"
        )
    if objective.name != "ar":
        return
    if config.data.random_length_probability:
        raise UserError(
            f"data.random_length_probability={config.data.random_length_probability} is for diffusion objectives; ar sees every length "
            "in every sequence: use data.random_length_probability=0"
        )
    if config.validation.draws != 1:
        raise UserError(f"validation.draws={config.validation.draws} averages over noise and ar has none: use validation.draws=1")


def _check_duration(config: RunConfig) -> None:
    duration = config.duration
    given = {key: getattr(duration, key) for key in ("steps", "tokens", "flops") if getattr(duration, key) is not None}
    if not given:
        raise UserError("the run has no length: set one of duration.steps, duration.tokens and duration.flops")
    if len(given) > 1:
        both = " and ".join(f"duration.{key}={value:g}" for key, value in given.items())
        first, *others = given
        raise UserError(f"{both} are set, and exactly one must be; to keep {first}, add {' '.join(f'duration.{key}=null' for key in others)}")


def _check_pipeline(config: RunConfig) -> None:
    parallel, layers = config.parallel, config.backbone.layers
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise UserError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} needs pipeline stages, and parallel.pipeline=1 has none; "
            "use parallel.virtual_pipeline=1"
        )
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if layers % chunks:
        what = "parallel.pipeline" if parallel.virtual_pipeline == 1 else "parallel.pipeline x parallel.virtual_pipeline"
        deeper = f", or backbone.layers={nearest_multiple(layers, chunks)}" if chunks <= 2 * layers else ""
        raise UserError(
            f"backbone.layers={layers} must be a multiple of {what} = {chunks}; use {_listed(divisors(layers), chunks)} there{deeper}"
        )
    if parallel.zero_stage > 1 and parallel.pipeline > 1:
        raise UserError(
            f"parallel.zero_stage={parallel.zero_stage} works inside the backward pass and needs parallel.pipeline=1 (it is "
            f"{parallel.pipeline}); use parallel.zero_stage=1"
        )


def _check_tensor(config: RunConfig) -> None:
    parallel = config.parallel
    if parallel.sequence and parallel.tensor == 1:
        raise UserError("parallel.sequence=true splits what tensor parallelism leaves whole, but parallel.tensor=1; use parallel.sequence=false")
    problem = _indivisible(config, parallel.tensor)
    if problem:
        legal = legal_tensor_sizes(config)
        others = divisors(config.backbone.layers)[1:]
        hint = f"; to use more ranks for one model, parallel.pipeline can be {_listed(others, parallel.tensor)}" if len(legal) == 1 and others else ""
        raise UserError(f"{problem}; parallel.tensor can be {_listed(legal, parallel.tensor)} here{hint}")


def _indivisible(config: RunConfig, tensor: int) -> str | None:
    """Why this network cannot be cut over `tensor` ranks."""
    for key, size in _split_by_tensor(config):
        if size % tensor:
            why = ", so that the padded vocabulary splits evenly" if key == "backbone.vocab_multiple" else ""
            why = ", since parallel.sequence=true splits sequences" if key == "batch.length" else why
            return f"{key}={size} cannot be split over parallel.tensor={tensor}: it must be a multiple of it{why}"
    return None


def _split_by_tensor(config: RunConfig) -> list[tuple[str, int]]:
    """Key and size of everything that tensor parallelism cuts."""
    backbone = config.backbone
    sizes = [
        ("backbone.heads", backbone.heads),
        ("backbone.kv_heads", backbone.kv_groups),
        ("backbone.ffn", backbone.ffn_width),
        ("backbone.vocab_multiple", backbone.vocab_multiple),
    ]
    return [*sizes, ("batch.length", config.batch.length)] if config.parallel.sequence else sizes


def _check_world(config: RunConfig, world_size: int) -> None:
    parallel, batch = config.parallel, config.batch
    if world_size % parallel.model_ranks:
        raise UserError(
            f"{world_size} {'rank' if world_size == 1 else 'ranks'} must be a multiple of parallel.tensor x parallel.pipeline = {parallel.tensor} x "
            f"{parallel.pipeline} = {parallel.model_ranks}; start {nearest_multiple(world_size, parallel.model_ranks)} ranks "
            "(torchrun --nproc-per-node=N on each machine)"
        )
    data_parallel = world_size // parallel.model_ranks
    together = batch.micro_sequences * data_parallel
    if batch.global_sequences % together:
        share = batch.global_sequences // data_parallel if batch.global_sequences % data_parallel == 0 else 0
        micro = [n for n in divisors(share) if n < batch.micro_sequences] if share else []
        smaller = f" or batch.micro_sequences={micro[-1]}" if micro else ""
        raise UserError(
            f"batch.global_sequences={batch.global_sequences} must be a multiple of batch.micro_sequences x data-parallel ranks = "
            f"{batch.micro_sequences} x {data_parallel} = {together}; "
            f"use batch.global_sequences={nearest_multiple(batch.global_sequences, together)}{smaller}"
        )
    check_parts(config.objective, batch.global_sequences, batch.micro_sequences)
    micro_batches = batch.global_sequences // together
    if parallel.virtual_pipeline > 1 and micro_batches % parallel.pipeline:
        raise UserError(
            f"the interleaved schedule needs micro-batches per step in multiples of parallel.pipeline={parallel.pipeline}, and there are "
            f"{micro_batches}; use batch.global_sequences={nearest_multiple(micro_batches, parallel.pipeline) * together} or "
            "parallel.virtual_pipeline=1"
        )


def _check_fp8(config: RunConfig) -> None:
    if not config.precision.fp8:
        return
    if config.precision.compute == "fp32":
        raise UserError("precision.fp8=true computes its other products in bf16, but precision.compute=fp32; use precision.compute=bf16")
    tensor = config.parallel.tensor
    split = tensor if config.parallel.sequence else 1
    rows = config.batch.micro_sequences * config.batch.length
    for name, size, parts in (
        ("batch.micro_sequences x batch.length", rows, split),
        ("backbone.hidden", config.backbone.hidden, tensor),
        ("backbone.ffn", config.backbone.ffn_width, tensor),
    ):
        if size % (parts * FP8_MULTIPLE):
            per_rank = f" / parallel.tensor = {size} / {parts}" if parts > 1 else f" = {size}"
            raise UserError(
                f"precision.fp8=true needs {name}{per_rank} in multiples of {FP8_MULTIPLE}; "
                f"make {name} {nearest_multiple(size, parts * FP8_MULTIPLE)}, or set precision.fp8=false"
            )


def _steps(config: RunConfig, model_size: int, tokens_per_step: int) -> int:
    duration, batch = config.duration, config.batch
    if duration.steps is not None:
        steps = duration.steps
    elif duration.tokens is not None:
        steps = int(duration.tokens // tokens_per_step)
        if steps == 0:
            raise UserError(f"duration.tokens={duration.tokens:g} is less than one step of {tokens_per_step} tokens; use at least that many")
    else:
        assert duration.flops is not None
        steps = steps_for_budget(
            config.backbone, model_size, batch.length, batch.global_sequences, duration.flops,
            two_stream=config.objective.two_stream_share, noisy=config.objective.noisy_share,
            preliminary=config.objective.preliminary_share,
        )  # fmt: skip
        if steps == 0:
            raise UserError(
                f"duration.flops={duration.flops:g} pays for less than one step of {tokens_per_step} tokens; raise it or lower batch.global_sequences"
            )
    if duration.stop_after is not None and duration.stop_after > steps:
        raise UserError(f"duration.stop_after={duration.stop_after} is never reached in a run of {steps} steps; use duration.stop_after=null")
    return steps


def _check_schedule(config: RunConfig, steps: int) -> int:
    """The warm-up's length, after checking that the schedule has room for it."""
    schedule = config.schedule
    if schedule.kind != "constant" and schedule.final > schedule.peak:
        raise UserError(
            f"schedule.final={schedule.final:g} must not be above schedule.peak={schedule.peak:g}; use schedule.final={schedule.peak / 10:g}"
        )
    warmup = warmup_steps(schedule, steps)
    decay = max(round(schedule.decay_fraction * steps), 1) if schedule.kind == "wcd" else 0
    if warmup > 0 and warmup >= steps and (steps > 1 or warmup > 1):
        raise UserError(
            f"schedule.warmup_steps={warmup} must be below the {steps} step{'s' * (steps > 1)} of the run; "
            f"use schedule.warmup_steps={steps // 10} or schedule.warmup_steps=null"
        )
    if warmup + decay > steps:
        raise UserError(
            f"schedule.warmup_steps={warmup} and the decay over {decay} steps (schedule.decay_fraction={schedule.decay_fraction:g}) do not fit "
            f"into {steps} steps; use schedule.warmup_steps={max(steps - decay, 0)}"
        )
    return warmup


def _divisor(value: int, near: int) -> int:
    """The divisor of `value` nearest to `near`."""
    return min(divisors(value), key=lambda n: abs(n - near))


def _listed(values: list[int], near: int) -> str:
    """`1, 2 or 4 (2 is nearest)`; of many values, the five nearest."""
    shown = sorted(sorted(values, key=lambda n: abs(n - near))[:5])
    if len(shown) == 1:
        return f"only {shown[0]}" if len(values) == 1 else str(shown[0])
    nearest = min(shown, key=lambda n: abs(n - near))
    return f"{', '.join(map(str, shown[:-1]))} or {shown[-1]} ({nearest} is nearest)"
