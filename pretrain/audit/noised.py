"""What a rank's network read in an optimizer step: `launchers/prepare_data.py show step=K rank=R run=runs/NAME`."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.audit.config import ShowConfig
from pretrain.audit.rendering import Described, describe
from pretrain.audit.run import AuditedRun
from pretrain.data.samples import positions
from pretrain.errors import UserError


def show(config: ShowConfig) -> None:
    """Prints the samples. Raises UserError for a rank that there was not, and where the run or its corpora are not what they were."""
    run = AuditedRun(Path(config.run), config.step)
    run.say_if_planned()
    dp_rank, dp_size = data_rank(run, config.rank, config.world)
    numbers = [number for micro_batch in micro_batches(run, dp_rank, dp_size) for number in micro_batch]
    shown = numbers[: config.samples]
    if config.format == "table":
        print(
            f"Step {run.step:,} of {run.folder}, rank {config.rank}: {len(numbers)} samples as data-parallel rank {dp_rank} of {dp_size}"
            f"{'' if len(shown) == len(numbers) else f', of which the first {len(shown)}'}, by {run.source / 'config.yaml'}"
        )
    for number in shown:
        record = sample_record(run, number, config.tokens)
        print(json.dumps(record, ensure_ascii=False) if config.format == "json" else _lines(record, run))


def data_rank(run: AuditedRun, rank: int, world: int | None) -> tuple[int, int]:
    """(data-parallel rank, data-parallel ranks) of a global rank: tensor parallelism runs fastest, then data, then the pipeline."""
    parallel = run.config.parallel
    if world is not None and world % parallel.model_ranks:
        raise UserError(
            f"world={world} must be a multiple of parallel.tensor x parallel.pipeline = {parallel.model_ranks}; "
            f"use world={max(world // parallel.model_ranks, 1) * parallel.model_ranks}"
        )
    size = world // parallel.model_ranks if world is not None else run.data_parallel
    if size is None:
        raise UserError(f"{run.folder} does not say how many ranks trained step {run.step}; give world=RANKS")
    if rank >= size * parallel.model_ranks:
        raise UserError(f"rank={rank} must be below the {size * parallel.model_ranks} ranks that trained the step; use rank=0, or give world=RANKS")
    together = run.config.batch.micro_sequences * size
    if run.config.batch.global_sequences % together:
        raise UserError(
            f"{size} data-parallel ranks cannot share out {run.config.batch.global_sequences} sequences in micro-batches of "
            f"{run.config.batch.micro_sequences}; give the world=RANKS that trained the step"
        )
    return rank // parallel.tensor % size, size


def micro_batches(run: AuditedRun, dp_rank: int, dp_size: int) -> Iterator[range]:
    """Sample numbers of each of the rank's micro-batches."""
    batch, data_step = run.config.batch, run.samples.skips.data_step(run.index)
    return positions(
        data_step, global_sequences=batch.global_sequences, micro_sequences=batch.micro_sequences, dp_rank=dp_rank, dp_size=dp_size
    )  # fmt: skip


def sample_record(run: AuditedRun, number: int, tokens: int | None) -> dict[str, Any]:
    """A sample as training made it: where it is from, its arrays, and what they mean."""
    sample = run.samples.sample(number)
    address = run.samples.mixture.address(number)
    described: Described = describe(run, number, sample.corrupted, tokens)  # type: ignore[arg-type]
    return {
        "sample": number,
        "position": number % run.config.batch.global_sequences,
        "source": address.source,
        "epoch": address.epoch + 1,
        "window": address.window,
        "t": sample.corrupted.t,
        "count": sample.corrupted.count,
        "hash": _hash(sample.corrupted.inputs | {f"target {key}": value for key, value in sample.corrupted.targets.items()}),
        "notes": described.notes,
        "clean": described.clean,
        "noised": described.noised,
        "inputs": {key: np.asarray(value).tolist() for key, value in sample.corrupted.inputs.items()},
        "targets": {key: np.asarray(value).tolist() for key, value in sample.corrupted.targets.items()},
    }


def _lines(record: dict[str, Any], run: AuditedRun) -> str:
    time = "" if record["t"] is None else f", t {record['t']:.6g}"
    head = (
        f"\nsample {record['sample']:,} (position {record['position']}), window {record['window']:,} of {record['source']}, pass {record['epoch']}"
        f"{time}, counts {record['count']} of {run.config.batch.length} tokens, arrays {record['hash']}"
    )
    return "\n".join([head, *(f"  {note}" for note in record["notes"]), f"  clean:  {record['clean']}", f"  noised: {record['noised']}"])


def _hash(arrays: dict[str, np.ndarray]) -> str:
    """BLAKE2b of every array, by name."""
    digest = hashlib.blake2b(digest_size=8)
    for key in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[key]).tobytes())
    return digest.hexdigest()
