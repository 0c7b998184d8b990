"""A small run for layout tests: one network, one global batch, whatever the layout."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.megatron import build_stage
from pretrain.build import build_objective
from pretrain.data.batch import BatchShard, MicroBatch
from pretrain.data.parts import part_of, part_sizes
from pretrain.engine.config import OptimizerConfig
from pretrain.engine.gradients import accumulated_gradient
from pretrain.engine.statistics import StepStatistics, global_count
from pretrain.engine.zero import Engine
from pretrain.objectives.base import Objective
from pretrain.objectives.config import ObjectiveConfig
from pretrain.parallel import groups as parallel_groups
from pretrain.parallel.config import ParallelConfig
from pretrain.parallel.groups import Groups
from pretrain.parallel.initialization import initial_tensor
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.run_config import input_config

LENGTH, SEQUENCES, TOKENS = 16, 8, 50


@dataclass(frozen=True)
class World:
    """What a layout test varies."""

    objective: ObjectiveConfig = ObjectiveConfig(name="mdlm")
    backbone: BackboneConfig = BackboneConfig(kind="dit", hidden=32, layers=4, heads=4, cond_dim=16)
    parallel: ParallelConfig = ParallelConfig()
    micro_sequences: int = 2
    dtype: torch.dtype = torch.float32
    optimizer: OptimizerConfig = OptimizerConfig(clip=1.0)
    documents: bool = False
    cut: bool = False

    def laid(self, **sizes: int | bool) -> "World":
        """The same run in another layout."""
        return replace(self, parallel=ParallelConfig(**sizes))  # type: ignore[arg-type]


    @property
    def network(self) -> BackboneConfig:
        """The backbone with what the objective makes it read."""
        return replace(self.backbone, inputs=input_config(self.objective))


def vocabulary(objective: ObjectiveConfig) -> Vocabulary:
    masked = objective.has_mask
    return Vocabulary(tokenizer_size=TOKENS, model_size=TOKENS + masked, padded_size=128, mask_id=TOKENS if masked else None, eos_id=0)


def global_batch(world: World, objective: Objective, step: int = 0) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray], int, float]]:
    """The samples of one step, noised as the loader would: from (seed, index) alone."""
    samples = []
    sizes = part_sizes(objective.parts, SEQUENCES)
    for i in range(SEQUENCES):
        part, place = part_of(i, sizes)
        index = step * SEQUENCES + i
        generator = np.random.default_rng(1000 + index)
        total = LENGTH + objective.lookahead
        tokens = generator.integers(1, TOKENS, total)
        documents = np.zeros(total, np.int32)
        if world.documents:
            documents[generator.integers(4, 12) :] = 1
        if world.cut and i % 4 == 1:
            documents[10:] = -1
        noise = Noise(7, index, place, sizes[part], part=part, share=sizes[part] / SEQUENCES, step=step)
        sample = objective.corrupt(tokens, documents, noise, evaluation=False)
        samples.append((sample.inputs, sample.targets, sample.count, float("nan") if sample.t is None else sample.t))
    return samples


def shard(world: World, objective: Objective, groups: Groups, step: int = 0) -> BatchShard:
    """This data-parallel rank's micro-batches, stacked by hand."""
    samples, size = global_batch(world, objective, step), world.micro_sequences
    micro_batches = []
    for m in range(SEQUENCES // (size * groups.data.size)):
        first = (m * groups.data.size + groups.data.rank) * size
        rows = samples[first : first + size]
        inputs = {key: torch.stack([torch.as_tensor(row[0][key]) for row in rows]) for key in rows[0][0]}
        if not (world.documents or world.cut):
            inputs.pop("documents")
        targets = {key: torch.stack([torch.as_tensor(row[1][key]) for row in rows]) for key in rows[0][1]}
        count, t = torch.tensor([row[2] for row in rows]), torch.tensor([row[3] for row in rows], dtype=torch.float32)
        micro_batches.append(MicroBatch(inputs, targets, count, t, tuple(range(first, first + size))))
    return BatchShard(step, tuple(micro_batches))


def randomise(engine_module: torch.nn.Module, groups: Groups) -> None:
    """Non-zero values everywhere: with the zero-initialised head and modulation only the head would have a gradient."""
    for name, parameter in engine_module.named_parameters():
        spec = engine_module.spec(name)  # type: ignore[operator]
        full = initial_tensor(name, replace(spec, init="normal", scale=0.15), 3)
        full = full + 1 if "layernorm" in name else full
        with torch.no_grad():
            parameter.copy_(spec.shard(full, groups.tensor.size, groups.tensor.rank))


def make_engine(world: World) -> tuple[Engine, Objective, Groups]:
    groups = parallel_groups.initialize(world.parallel, seed=1)
    objective = build_objective(world.objective, vocabulary(world.objective))
    stage = build_stage(
        world.network, world.parallel, groups, rows=128, attention=objective.attention, dtype=world.dtype, device=torch.device("cpu"),
        variable_lengths=objective.two_stream,
    )  # fmt: skip
    randomise(stage, groups)
    engine = Engine(
        stage, objective, groups, optimizer=world.optimizer, zero_stage=world.parallel.zero_stage, dtype=world.dtype, device=torch.device("cpu"),
        micro_sequences=world.micro_sequences, micro_batches=SEQUENCES // (world.micro_sequences * groups.data.size), length=LENGTH, loss_chunk=5,
        peak_lr=1e-2,
    )  # fmt: skip
    return engine, objective, groups


def gradients(engine: Engine, objective: Objective, world: World) -> dict[str, torch.Tensor]:
    """Full gradients by logical name, gathered from every rank (ZeRO 1)."""
    groups = engine.groups
    engine.module.train()
    before = {key: value.clone() for key, value in objective.modules().state_dict().items()}
    batches = engine.prepared(shard(world, objective, groups), evaluation=False)
    scale = len(batches) / global_count(batches, groups, engine.device)
    engine.scheduled_backward(batches, scale, StepStatistics(groups, engine.device))
    mine = {}
    for name, parameter in engine.module.named_parameters():
        gradient = accumulated_gradient(parameter)
        gradient = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        dist.all_reduce(gradient, group=groups.data.group)
        mine[name] = gradient.float()
        parameter.grad = None
    engine.objective_optimizer.reduce()
    own = {f"objective.{name}": p.grad.clone() for name, p in objective.modules().named_parameters() if p.grad is not None}
    for parameter in objective.modules().parameters():
        parameter.grad = None
    objective.modules().load_state_dict(before)  # running state has moved on
    everyone: list[tuple[int, dict[str, torch.Tensor]]] = [None] * groups.world_size  # type: ignore[list-item]
    dist.all_gather_object(everyone, (groups.tensor.rank, mine))
    whole = {}
    for name in engine.module.table:
        shards = {rank: held[name] for rank, held in reversed(everyone) if name in held}
        whole[name] = engine.module.spec(name).unshard([shards[rank] for rank in range(groups.tensor.size)])
    return whole | own


def losses(world: World, steps: int = 3, lr: float = 1e-2) -> list[tuple[float, float, float]]:
    """(loss, nelbo, gradient norm) of the first optimizer steps."""
    engine, objective, groups = make_engine(world)
    return _train(engine, objective, world, steps, lr)


def _train(engine: Engine, objective: Objective, world: World, steps: int, lr: float) -> list[tuple[float, float, float]]:
    results = [engine.train_step(shard(world, objective, engine.groups, step), lr) for step in range(steps)]
    return [(r.loss, r.nelbo, r.gradient_norm) for r in results]


@dataclass(frozen=True)
class Answers:
    """Everything that a layout must not change."""

    gradients: dict[str, torch.Tensor]
    nats: list[float]
    counts: list[int]
    steps: list[tuple[float, float, float]]


def answers(world: World) -> Answers:
    """Gradients of the first batch, its evaluation, and three training steps."""
    engine, objective, groups = make_engine(world)
    whole = gradients(engine, objective, world) if world.parallel.zero_stage == 1 else {}
    nats, counts = engine.evaluate(shard(world, objective, groups))
    return Answers(whole, nats.tolist(), counts.tolist(), _train(engine, objective, world, 3, 1e-2))
