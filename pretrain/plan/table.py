"""A plan as a table with units."""

import math
from dataclasses import fields
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pretrain.plan.epochs import Reading
from pretrain.plan.layouts import MAX_RANKS
from pretrain.plan.machine import GIB
from pretrain.plan.memory import snapshot_bytes
from pretrain.plan.plan import Needs, Plan, fitting_layout
from pretrain.redaction import redact


def show(plan: Plan, stream: TextIO | None = None) -> None:
    """Prints a plan on `stream` (standard output)."""
    table = Table(title=f"Plan of {plan.needs.config.name}", show_header=False, title_justify="left", title_style="bold")
    for section in (_run_rows(plan), _memory_rows(plan.needs), _cost_rows(plan)):
        for name, text in section:
            table.add_row(redact(name), redact(text))
        table.add_section()
    console = Console(file=stream, highlight=False)
    console.print(table)
    if plan.readings:
        console.print(_readings(plan.readings))


def size(number: float) -> str:
    """Bytes for people."""
    return f"{number / GIB:8.2f} GiB" if number >= GIB / 10 else f"{number / 1024**2:8.1f} MiB"


def duration(hours: float) -> str:
    """Hours for people."""
    for unit, length in (("years", 24 * 365.0), ("days", 24.0), ("hours", 1.0)):
        if hours >= 2 * length:
            return f"{hours / length:,.1f} {unit}"
    return f"{hours * 60:.1f} minutes"


def _readings(found: list[Reading]) -> Table:
    """Sources by phase; sizes in tokens."""
    table = Table(title="Tokens by phase and source", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("phase", "source"):
        table.add_column(name, overflow="fold")
    for name in ("reads", "share", "holds", "passes", "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, reading in enumerate(found):
        first = number == 0 or found[number - 1].phase != reading.phase
        passes = ["-", "-"] if math.isnan(reading.total) else [f"{reading.passes:.3g}", f"{reading.total:.3g}"]
        held = "not prepared" if reading.held is None else f"{reading.held:.3g}"
        phase = f"{reading.phase}, to {reading.end:.4g}" if first else ""
        table.add_row(phase, reading.source, f"{reading.tokens:.3g}", f"{reading.share:.1%}", held, *passes)
    return table


def _run_rows(plan: Plan) -> list[tuple[str, str]]:
    config, derived = plan.needs.config, plan.needs.derived
    parallel = config.parallel
    sequence = ", sequence parallel" if parallel.sequence else ""
    virtual = f" x {parallel.virtual_pipeline} chunks" if parallel.virtual_pipeline > 1 else ""
    stop = f" (leaves at {derived.last_step:,})" if derived.last_step != derived.steps else ""
    layout = f"tensor {parallel.tensor}{sequence} x pipeline {parallel.pipeline}{virtual} x data {derived.data_parallel}"
    return [
        ("parameters", f"{plan.parameters:,} with {derived.model_size:,} classes, padded to {derived.padded_size:,}"),
        ("ranks", f"{derived.world_size} = {layout}"),
        ("arithmetic", f"{plan.needs.compute}, ZeRO {parallel.zero_stage}, recomputation {config.backbone.recompute}"),
        ("step", f"{config.batch.global_sequences} sequences x {config.batch.length} = {derived.tokens_per_step:,} tokens"),
        ("micro-batches", f"{derived.micro_batches} of {config.batch.micro_sequences} sequences per rank and step"),
        ("steps", f"{derived.steps:,}{stop}, warm-up {derived.warmup_steps:,}, {config.schedule.kind} schedule"),
        ("tokens", f"{derived.tokens_per_step * derived.last_step:.4g}"),
    ]


def _memory_rows(needs: Needs) -> list[tuple[str, str]]:
    where = f", stage {needs.stage}" if needs.config.parallel.pipeline > 1 else ""
    rows = [(f"memory: {item.name}", size(getattr(needs.memory, item.name))) for item in fields(needs.memory)]
    rows.append(("memory of one rank", f"{size(needs.memory.total)}{where}"))
    if needs.memory.snapshot == 0 and needs.config.checkpoint.asynchronous:
        host = snapshot_bytes(needs.config, needs.derived, needs.stage, compute_bytes=needs.compute_bytes)
        rows.append(("host memory to save from", f"{size(host)} per rank, besides (checkpoint.asynchronous=false needs none)"))
    rows.append(("available to one rank", f"{size(needs.machine.memory)}, {needs.machine.device}: {'fits' if needs.fits else 'does not fit'}"))
    if not needs.fits:
        layout = fitting_layout(needs)
        what = f"{layout.describe(needs.config)}, {size(layout.memory).strip()} each" if layout else f"none up to {MAX_RANKS} ranks"
        rows.append(("smallest that fits", what))
    return rows


def _cost_rows(plan: Plan) -> list[tuple[str, str]]:
    return [
        ("model FLOPs of a step", f"{plan.step_flops:.4g} (attention counted as full)"),
        ("model FLOPs of the run", f"{plan.step_flops * plan.needs.derived.last_step:.4g}"),
        ("peak of one rank", f"{plan.peak / 1e12:,.4g} TFLOP/s ({plan.peak_source})"),
        ("time", f"{duration(plan.hours)} at {plan.mfu:.0%} of the peak"),
    ]
