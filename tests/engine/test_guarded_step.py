"""Steps that are refused, what is said about them, and copies of parameters: in every kind of optimizer and layout."""

import math
from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state

from pretrain.engine.config import OptimizerConfig
from pretrain.engine.diagnosis import diagnose, layer_of, logical_name
from pretrain.engine.replicas import ReplicaCheck, _bits, _weights
from pretrain.objectives.config import ObjectiveConfig
from tests.distributed import run_distributed
from tests.engine.world import World, make_engine, shard

BF16 = World(dtype=torch.bfloat16)
EMA = replace(World(), optimizer=OptimizerConfig(clip=1.0, ema=0.9))
REPLAID = World(objective=ObjectiveConfig(name="replaid"))
KINDS = [
    (World().laid(tensor=2, pipeline=2), 4), (World().laid(zero_stage=2), 2), (World().laid(zero_stage=3), 2), (BF16.laid(pipeline=2), 2),
    (BF16.laid(zero_stage=2), 2), (BF16.laid(zero_stage=3), 2), (EMA, 1), (REPLAID, 2), (REPLAID.laid(zero_stage=3), 2),
]  # fmt: skip


def state(engine, objective) -> list[torch.Tensor]:
    """Everything that an update changes."""
    flats = engine.flat_partitions()
    moments = [value for flat in flats for value in engine.base_optimizer.state[flat].values() if isinstance(value, torch.Tensor)]
    held = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    own = [*objective.modules().state_dict().values()]
    apart = [v for s in engine.objective_optimizer.state_dict().get("state", {}).values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [value.detach().clone() for value in (*flats, *moments, *held, *own, *apart)]


def refused(world: World) -> tuple[bool, list[tuple[float, float]], list[tuple[float, float]], bool]:
    """One step, a step that is refused, and two more; the same without the refused one; and whether weights, moments, average and running state
    were bitwise left alone by it."""
    engine, objective, groups = make_engine(world)
    engine.train_step(shard(world, objective, groups, 0), 1e-2)
    before = state(engine, objective)
    engine.accept = lambda _: False
    result = engine.train_step(shard(world, objective, groups, 1), 1e-2)
    engine.accept = lambda result: result.finite
    after = state(engine, objective)
    same = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with_gap = [engine.train_step(shard(world, objective, groups, step), 1e-2) for step in (2, 3)]
    parallel_state.destroy_model_parallel()
    engine, objective, groups = make_engine(world)
    engine.train_step(shard(world, objective, groups, 0), 1e-2)
    without = [engine.train_step(shard(world, objective, groups, step), 1e-2) for step in (2, 3)]
    return same, [(r.loss, r.gradient_norm) for r in with_gap], [(r.loss, r.gradient_norm) for r in without], result.updated


@pytest.mark.parametrize(("world", "ranks"), KINDS)
def test_a_refused_step_leaves_no_trace(world, ranks):
    for same, with_gap, without, updated in run_distributed(refused, ranks, world):
        assert same and not updated
        assert with_gap == without, "the steps after it are those of a run that never saw it"


def poisoned(world: World, name: str, rank: int) -> tuple[str, tuple[int, ...], tuple[int, ...], bool]:
    """A weight that is no number, on one rank: what the diagnosis says, and whether the refused step and its replay changed anything."""
    engine, objective, groups = make_engine(world)
    if groups.world_rank == rank:
        parameter = dict(engine.module.named_parameters())[name]
        held = parameter.ds_tensor if parameter.numel() == 0 else parameter
        with torch.no_grad():
            held.view(-1)[3] = math.nan
    before = [value.nan_to_num(7.0) for value in state(engine, objective)]
    batch = shard(world, objective, groups, 0)
    result = engine.train_step(batch, 1e-2)
    assert not result.finite and not result.updated
    found = diagnose(engine, batch)
    after = [value.nan_to_num(7.0) for value in state(engine, objective)]
    own = tuple(number for micro in batch.micro_batches for number in micro.sample_ids)
    return str(found), found.samples, own, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("world", "ranks", "name", "rank", "module"),
    [
        (World(), 1, "layers.2.mlp.linear_fc1.weight", 0, "layers.2.mlp.linear_fc1"),
        (World().laid(tensor=2, pipeline=2), 4, "layers.3.self_attention.linear_qkv.weight", 3, "layers.3.self_attention.linear_qkv"),
        (World().laid(pipeline=2, virtual_pipeline=2), 2, "layers.1.mlp.linear_fc2.weight", 1, "layers.1.mlp.linear_fc2"),
        (World().laid(zero_stage=2), 2, "layers.1.mlp.linear_fc1.weight", 1, "layers.1.mlp.linear_fc1"),
        (BF16, 1, "head.weight", 0, "head"),
    ],
)
def test_the_first_module_is_named_with_its_layer_and_rank(world, ranks, name, rank, module):
    answers = run_distributed(poisoned, ranks, world, name, rank)
    stage = {"layers.3": 1, "layers.1": 1 if ranks == 2 and world.parallel.pipeline == 2 else 0}.get(name[:8], 0)
    for said, samples, _, untouched in answers:
        assert said == f"first in the output of {module} on rank {rank}, pipeline stage {stage}" and untouched
        # A weight spoils every sample that passes through it (a loss over no masked token is 0 all the same): those of its own replica.
        own = answers[rank][2]
        assert set(samples) <= set(own) and len(samples) >= len(own) - 1


def bad_sample(world: World, where: str) -> tuple[str, tuple[int, ...]]:
    """Sample 5 has a target weight that is no number, or a gradient that is none though every output is."""
    engine, objective, groups = make_engine(world)
    batch = shard(world, objective, groups, 0)
    if where == "loss":
        for micro in batch.micro_batches:
            for row, number in enumerate(micro.sample_ids):
                if number == 5:
                    micro.targets["loss_weight"][row] = math.nan
    elif groups.world_rank == 0:
        module = engine.module.chunks[0].decoder.layers[1].mlp.linear_fc1

        class Spoil(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient * math.inf

        module.register_forward_pre_hook(lambda _, inputs: (Spoil.apply(inputs[0]), *inputs[1:]))
    assert not engine.train_step(batch, 1e-2).finite
    found = diagnose(engine, batch)
    return str(found), found.samples


@pytest.mark.parametrize(("world", "ranks"), [(World(), 1), (World().laid(tensor=2, pipeline=2), 4), (World().laid(zero_stage=3), 2)])
def test_a_bad_sample_is_named(world, ranks):
    for said, samples in run_distributed(bad_sample, ranks, world, "loss"):
        assert said.startswith("first in the loss on rank ") and samples == (5,)


def test_a_gradient_that_is_lost_on_the_way_back_is_named():
    for said, _ in run_distributed(bad_sample, 2, World().laid(pipeline=2), "gradient"):
        assert said == "first in the gradient at the output of layers.1.pre_mlp_layernorm on rank 0, pipeline stage 0"


def healthy(world: World) -> str:
    engine, objective, groups = make_engine(world)
    batch = shard(world, objective, groups, 0)
    engine.accept = lambda _: False
    engine.train_step(batch, 1e-2)
    return str(diagnose(engine, batch))


def test_what_does_not_happen_again_is_a_device_s_fault():
    assert run_distributed(healthy, 1, World())[0].startswith("repeating the step gave finite numbers")


def test_names_and_places():
    assert [layer_of(name) for name in ("embedding", "layers.11.mlp", "head")] == [-1, 11, 1_000_000]
    assert logical_name(None, "time.input") == "time.input" and logical_name(None, "chunks.0.head") == "head"


# ---- replicas -----------------------------------------------------------------------------------------------------------------------------


def flipped(world: World, name: str, rank: int, train: bool) -> tuple[list[str], list[str]]:
    """What is found before and after one bit of a parameter or buffer changes on one rank."""
    engine, objective, groups = make_engine(world)
    if train:
        engine.train_step(shard(world, objective, groups, 0), 1e-2)
    check = ReplicaCheck(engine.module, objective.modules(), groups, engine.device)
    before = [str(found) for found in check.compare()]
    if groups.world_rank == rank:
        held = dict(engine.module.named_parameters()) | {f"objective.{n}": v for n, v in objective.modules().state_dict(keep_vars=True).items()}
        value = held[name]
        bits = _bits(value.ds_tensor if value.numel() == 0 else value)  # a view
        bits[bits.numel() // 2] ^= 1
    return before, [str(found) for found in check.compare()]


@pytest.mark.parametrize(
    ("world", "ranks", "name", "rank", "found"),
    [
        (World(), 2, "layers.1.mlp.linear_fc1.weight", 1, "layers.1.mlp.linear_fc1.weight (rank 0 against 1)"),
        (World().laid(tensor=2), 2, "layers.0.input_layernorm.weight", 0, "layers.0.input_layernorm.weight (rank 0 against 1)"),
        (World().laid(pipeline=2), 2, "time.output.bias", 1, "time.output.bias (rank 0 against 1)"),
        (World(micro_sequences=1), 4, "head.weight", 2, "head.weight (rank 2 against 0, 1, 3)"),
        (World().laid(tensor=2, pipeline=2), 4, "time.input.weight", 3, "time.input.weight (rank 3 against 0, 1, 2)"),
        (BF16.laid(zero_stage=2), 2, "layers.3.mlp.linear_fc2.weight", 1, "layers.3.mlp.linear_fc2.weight (rank 0 against 1)"),
        (World().laid(tensor=2, zero_stage=3), 4, "layers.1.modulation.weight", 1, "layers.1.modulation.weight"),
        (REPLAID, 2, "objective.running.mass", 1, "objective.running.mass (rank 0 against 1)"),
    ],
)
def test_one_bit_of_one_copy_is_found_and_named(world, ranks, name, rank, found):
    for before, after in run_distributed(flipped, ranks, world, name, rank, True):
        assert before == []
        assert len(after) == 1 and after[0].startswith(found)


def test_a_shard_is_nobody_s_copy():
    assert run_distributed(flipped, 2, World().laid(tensor=2), "layers.1.mlp.linear_fc1.weight", 1, False)[0] == ([], [])


def test_the_hash_is_the_stated_sum():
    weights = _weights(torch.device("cpu"))
    assert bool((weights & 1).all()) and weights.unique().numel() == weights.numel()

    def mix(i: int) -> int:  # splitmix64, as published
        x = i * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return (x ^ x >> 31) | 1

    assert [w % 2**64 for w in weights[:50].tolist()] == [mix(i) for i in range(1, 51)]
