"""What a run would cost: memory per rank, operations, tokens, epochs and time, before a device is taken; and whether it can start here."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from pretrain.backbones.parameters import count_parameters
from pretrain.data.manifest import FILE_NAME as MANIFEST
from pretrain.data.manifest import Manifest
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.launch_config import PlanConfig
from pretrain.plan.epochs import Reading, check_repetition, readings
from pretrain.plan.layouts import MAX_RANKS, Layout, smallest_layout
from pretrain.plan.machine import GIB, Machine, check_machine, this_machine
from pretrain.plan.memory import Memory, rank_memory
from pretrain.rules import Derived, resolve, run_flops_per_token, run_vocabulary, validate
from pretrain.run_config import RunConfig

Compute = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one rank of a run needs: bytes of the rank that needs most, on pipeline stage `stage`, and what its machine has."""

    config: RunConfig
    derived: Derived
    machine: Machine
    compute: Compute
    memory: Memory
    stage: int

    @property
    def fits(self) -> bool:
        """Whether one rank's memory suffices."""
        return self.memory.total <= self.machine.memory

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of the compute type."""
        return _bytes(self.compute)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would cost.

    parameters    of the network, without vocabulary padding.
    step_flops    model operations of one optimizer step, attention included, over all ranks.
    hours         wall time until the run leaves, at `mfu` of `peak` (FLOP/s of one rank); peak_source says where the peak is from.
    readings      how often each training source is read, phase by phase.
    """

    needs: Needs
    parameters: int
    step_flops: float
    mfu: float
    peak: float
    peak_source: str
    hours: float
    readings: list[Reading]


def work_out_needs(config: RunConfig, assumptions: PlanConfig, *, local_ranks: int | None = None) -> Needs:
    """Checks every rule, on the ranks of this command or on those of `assumptions`, and counts memory. Raises UserError.

    local_ranks  ranks that share one machine; None: those of this command, or all that are planned for.
    """
    _check_assumptions(assumptions)
    world_size = assumptions.ranks or int(os.environ.get("WORLD_SIZE", 1))
    validate(config, world_size=world_size)
    derived = resolve(config, world_size=world_size, model_size=model_size(config, assumptions.vocabulary))
    machine = _machine(assumptions, local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    compute: Compute = "fp8" if config.precision.fp8 else _compute(config, machine)
    memory, stage = rank_memory(config, derived, compute_bytes=_bytes(compute), cuda=machine.device != "CPU")
    return Needs(config=config, derived=derived, machine=machine, compute=compute, memory=memory, stage=stage)


def make_plan(config: RunConfig, assumptions: PlanConfig) -> Plan:
    """The needs of a run and its cost. Raises UserError for every broken rule, but not for missing memory or data."""
    return cost(work_out_needs(config, assumptions), assumptions)


def cost(needs: Needs, assumptions: PlanConfig) -> Plan:
    """What a run with these needs costs."""
    config, derived = needs.config, needs.derived
    peak, source = _peak(config, needs.machine, needs.compute)
    step_flops = run_flops_per_token(config, derived.model_size) * derived.tokens_per_step
    return Plan(
        needs=needs,
        parameters=count_parameters(config.backbone, derived.model_size),
        step_flops=step_flops,
        mfu=assumptions.mfu,
        peak=peak,
        peak_source=source,
        hours=step_flops * derived.last_step / (derived.world_size * peak * assumptions.mfu) / 3600,
        readings=readings(config, derived),
    )


def check_ready(config: RunConfig, assumptions: PlanConfig) -> Needs:
    """The needs of a run that can start here. Raises UserError where the machine or the data cannot serve it, before anything is allocated."""
    needs = check_device(config, assumptions)
    check_data(config)
    check_batch(needs)
    check_repetition(config, readings(config, needs.derived))
    check_directory(config)
    return needs


def check_device(config: RunConfig, assumptions: PlanConfig) -> Needs:
    """The needs of a run whose machine can serve it, whatever there is of its data. Raises UserError."""
    needs = work_out_needs(config, assumptions)
    check_machine(config, needs.machine, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    check_fits(needs)
    return needs


def check_fits(needs: Needs) -> None:
    """Raises UserError with the memory needed and available per rank, and the smallest layout that fits."""
    if needs.fits:
        return
    ranks = needs.derived.world_size
    layout = fitting_layout(needs)
    advice = (
        f"the smallest layout that fits is {layout.describe(needs.config)}"
        if layout is not None
        else f"no layout of up to {MAX_RANKS} such ranks fits: choose a smaller preset (--help lists them)"
    )
    raise UserError(
        f"{needs.config.name} needs {needs.memory.total / GIB:,.1f} GiB per rank on {ranks} rank{'s' * (ranks > 1)}, and "
        f"{needs.machine.memory / GIB:,.1f} GiB are available to each on this machine ({needs.machine.device}); {advice}"
    )


def fitting_layout(needs: Needs) -> Layout | None:
    """The smallest layout, on at least as many ranks as planned, whose ranks fit into this machine's memory."""
    return smallest_layout(
        needs.config, needs.derived, memory=needs.machine.memory, compute_bytes=needs.compute_bytes, cuda=needs.machine.device != "CPU"
    )


def check_data(config: RunConfig) -> None:
    """Raises UserError naming the tokenizer or prepared corpus that is missing, and the command that makes it."""
    if not os.path.exists(config.tokenizer):  # not Path.exists, which raises for names that are too long
        made = f"python launchers/prepare_data.py train_tokenizer input=TEXT output={config.tokenizer}"
        advice = f"train it with: {made}" if config.tokenizer.endswith(".model") else "copy the tokenizer there, or set tokenizer=FILE"
        raise UserError(f"tokenizer={config.tokenizer} does not exist; {advice}")
    tokenizer = Tokenizer(config.tokenizer)
    for key, path in _sources(config):
        if not os.path.exists(Path(path) / MANIFEST) and not os.path.isfile(path):
            raise UserError(
                f"{key}.path={path} holds no prepared corpus; prepare it with: "
                f"python launchers/prepare_data.py tokenize input=TEXT tokenizer={config.tokenizer} output={path}"
            )
        made_with = Manifest.load(Path(path)).tokenizer
        if made_with.hash != tokenizer.hash:
            raise UserError(
                f"{key}.path={path} was prepared with tokenizer {made_with.name} ({made_with.hash[:12]}), and tokenizer={config.tokenizer} is "
                f"another ({tokenizer.hash[:12]}); set tokenizer= to that one, or prepare the text again in another folder"
            )


def check_batch(needs: Needs) -> None:
    """Raises UserError where one step would read the prepared text more than once: its batch is made in memory, and the copies teach nothing."""
    if needs.config.sft is not None:  # an epoch ends with a step of fewer examples
        return
    config, together = needs.config, needs.config.batch.micro_sequences * needs.derived.data_parallel
    held = sum(Manifest.load(Path(source.path)).tokens for source in config.data.train.values()) // config.batch.length
    if config.batch.global_sequences > held > 0:
        fix = f"use batch.global_sequences={held // together * together}" if held >= together else "use more text, or a smaller batch.length"
        raise UserError(
            f"batch.global_sequences={config.batch.global_sequences} must not be more than the {held:,} sequences of {config.batch.length} tokens "
            f"that data.train holds, or one step would read them more than once; {fix}"
        )


def check_directory(config: RunConfig) -> None:
    """Raises UserError where no run directory can be made or written, before a process group is formed for it."""
    place = config.directory
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{place} is in the way: it is not a folder, and the run is to live in {config.directory}; choose another root= or name=")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{place} cannot be written, and the run is to live in {config.directory}; choose another root=")


def model_size(config: RunConfig, assumed: int | None) -> int:
    """Classes of the model: from the tokenizer where it exists, else as assumed. Raises UserError where neither is known."""
    if not os.path.exists(config.tokenizer):  # not Path.exists, which raises for names that are too long
        if assumed is None:
            raise UserError(f"tokenizer={config.tokenizer} does not exist; to plan without it, give the model's vocabulary: plan.vocabulary=32001")
        return assumed
    return run_vocabulary(config, Tokenizer(config.tokenizer)).model_size


def _bytes(compute: Compute) -> int:
    return 4 if compute == "fp32" else 2


def _sources(config: RunConfig) -> list[tuple[str, str]]:
    train = [(f"data.train.{name}", source.path) for name, source in config.data.train.items()]
    return train + [(f"data.validation.{name}", source.path) for name, source in config.data.validation.items()]


def _check_assumptions(assumptions: PlanConfig) -> None:
    rules = {"ranks": (1, 2**20), "memory_gib": (0, 10**6), "vocabulary": (2, 2**31), "mfu": (0, 1)}
    for item in fields(assumptions):
        value, (low, high) = getattr(assumptions, item.name), rules[item.name]
        if value is not None and not (low <= value <= high and value > 0):
            raise UserError(f"plan.{item.name}={value} must lie in {f'[{low}' if low else '(0'}, {high}]")


def _machine(assumptions: PlanConfig, local_ranks: int) -> Machine:
    """This machine, or one with the assumed memory."""
    machine = this_machine(local_ranks)
    if assumptions.memory_gib is None:
        return machine
    if machine.cuda_devices:
        return replace(machine, memory=assumptions.memory_gib * GIB)
    return Machine(device="H100 (assumed)", memory=assumptions.memory_gib * GIB, cuda_devices=0, bf16=True)


def _compute(config: RunConfig, machine: Machine) -> Literal["fp32", "bf16"]:
    if config.precision.compute == "auto":
        return "bf16" if machine.bf16 else "fp32"
    return config.precision.compute


def _peak(config: RunConfig, machine: Machine, compute: Compute) -> tuple[float, str]:
    """FLOP/s of one rank, and where the figure is from."""
    import torch

    from pretrain.telemetry.throughput import data_sheet_flops, device_peak

    if config.telemetry.peak_tflops is None and not machine.cuda_devices and machine.device != "CPU":
        flops = data_sheet_flops("H100", compute)
        assert flops is not None
        return flops, f"H100 data sheet, dense {compute}, assumed"
    device = torch.device("cuda" if machine.cuda_devices else "cpu")
    peak = device_peak(device, compute, config.telemetry.peak_tflops)
    return peak.flops, peak.source
