"""Real engines that save and load, for the tests that run on several processes (the functions must be importable)."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.backbones.config import BackboneConfig
from pretrain.checkpoint.layout import Layout, TrainState, step_name
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.peers import Peers
from pretrain.checkpoint.reshape import fill_engine, load_any_layout
from pretrain.engine.config import OptimizerConfig
from pretrain.objectives.config import ObjectiveConfig
from pretrain.parallel.groups import Groups
from tests.engine.world import World, make_engine, shard

DIT = World(
    backbone=BackboneConfig(kind="dit", hidden=32, layers=2, heads=4, cond_dim=16), optimizer=OptimizerConfig(clip=1.0, decay="matrices", ema=0.9)
)
LLAMA = replace(
    DIT, backbone=BackboneConfig(kind="llama", hidden=32, layers=2, heads=4, kv_heads=2, qk_norm=True), objective=ObjectiveConfig(name="ar")
)
KEYS = ("fp32", "exp_avg", "exp_avg_sq", "ema")
STEPS = 2
LR = 1e-2


def train_state(world: World, groups: Groups, step: int) -> TrainState:
    layout = Layout.of(world.parallel, groups.data.size)
    return TrainState(
        step=step, tokens=step * 128, samples=step * 8, lr=LR, next_batch="", seed=1, layout=layout, backbone=asdict(world.network), rows=128
    )


def full_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """KEY/NAME -> full tensor, gathered by DeepSpeed itself over the data axis and by the table over the tensor axis: the outside truth."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    groups, mine, optimizer = engine.groups, {}, engine.optimizer
    if hasattr(optimizer, "_hp_optimizer_states_linked"):  # DeepSpeed links the states of the first step only; the average came after it
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        for key in KEYS:
            full = safe_get_full_fp32_param(parameter) if key == "fp32" else safe_get_full_optimizer_state(parameter, key)
            mine[f"{key}/{name}"] = full.detach().float().cpu().clone()
    everyone: list[Any] = [None] * groups.world_size
    dist.all_gather_object(everyone, (groups.pipeline.rank, groups.tensor.rank, mine))
    whole = {}
    for name, spec in engine.module.table.items():
        for key in KEYS:
            held = {rank: tensors[f"{key}/{name}"] for _, rank, tensors in reversed(everyone) if f"{key}/{name}" in tensors}
            whole[f"{key}/{name}"] = spec.unshard([held[rank] for rank in range(groups.tensor.size)])
    return whole


def learned(engine: Any) -> dict[str, Any]:
    """objective/NAME -> what the objective itself holds (parameters, running statistics) and its optimizer's state."""
    state, found = engine._objective_state(), {}
    found |= {f"objective/{name}": value.detach().clone().numpy() for name, value in state["modules"].items()}
    for number, moments in state["optimizer"].get("state", {}).items():
        found |= {f"objective/optimizer/{number}/{key}": torch.as_tensor(value).clone().numpy() for key, value in moments.items()}
    return found


def train_on(engine: Any, objective: Any, groups: Groups, world: World) -> list[float]:
    return [engine.train_step(shard(world, objective, groups, step), LR).loss for step in range(STEPS, STEPS + 5)]


def save_run(world: World, run: str) -> tuple[dict[str, Any], list[float]]:
    """Train, save, train on: the tensors at the checkpoint, and the losses after it."""
    engine, objective, groups = make_engine(world)
    for step in range(STEPS):
        engine.train_step(shard(world, objective, groups, step), LR)
    CheckpointManager(Path(run), 0, Peers.world()).save(STEPS, engine.save, train_state(world, groups, STEPS), "")
    tensors = {name: tensor.numpy() for name, tensor in full_tensors(engine).items()} | learned(engine)
    return tensors, train_on(engine, objective, groups, world)


def load_run(world: World, run: str) -> tuple[dict[str, Any], list[float]]:
    """The same, resumed from a checkpoint of any layout."""
    engine, objective, groups = make_engine(world)
    load_any_layout(engine, Path(run) / "checkpoints" / step_name(STEPS), Peers.world())
    engine.load_objective(Path(run) / "checkpoints" / step_name(STEPS))
    tensors = {name: tensor.numpy() for name, tensor in full_tensors(engine).items()} | learned(engine)
    return tensors, train_on(engine, objective, groups, world)


def fill_over(world: World, run: str, logical: str) -> tuple[dict[str, Any], list[float]]:
    """Fill an engine that has stepped already."""
    engine, objective, groups = make_engine(world)
    engine.train_step(shard(world, objective, groups, 0), LR)
    fill_engine(engine, Path(logical))
    tensors = {name: tensor.numpy() for name, tensor in full_tensors(engine).items()}
    return tensors, train_on(engine, objective, groups, world)


def fill_and_save(world: World, logical: str, folder: str) -> None:
    """What an engine of this layout saves after it was filled, with the learning rate that it sets before every step."""
    engine, _, _ = make_engine(world)
    fill_engine(engine, Path(logical))
    for group in engine.base_optimizer.param_groups:
        group["lr"] = LR
    engine.save(Path(folder))


def save_onto_full_disk(world: World, run: str) -> str:
    """Rank 1's optimizer file goes to a device that is full."""
    engine, objective, groups = make_engine(world)
    engine.train_step(shard(world, objective, groups, 0), LR)
    checkpoints = CheckpointManager(Path(run), 0, Peers.world(), say=lambda _: None)
    checkpoints.save(1, engine.save, train_state(world, groups, 1), "")

    def write(folder: Path) -> None:
        if groups.world_rank == 1:
            (folder / "zero").mkdir(exist_ok=True)
            (folder / "zero" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").symlink_to("/dev/full")
        engine.save(folder)

    try:
        checkpoints.save(2, write, train_state(world, groups, 2), "")
    except Exception as error:
        found = checkpoints.latest()
        return f"{type(error).__name__}: {error} | {found and found.step}"
    return "saved"
