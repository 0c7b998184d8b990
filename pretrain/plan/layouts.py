"""The smallest layout that fits: a search over ranks, tensor and pipeline parallelism, ZeRO stage, recomputation and micro-batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pretrain.errors import UserError
from pretrain.plan.memory import rank_memory
from pretrain.rules import Derived, divisors, legal_tensor_sizes, resolve
from pretrain.run_config import RunConfig

MAX_RANKS = 1024
MAX_TENSOR = 8
"""Tensor parallelism beyond one node's devices is not worth proposing."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to spread a run: `config` on `ranks` ranks, each of which needs `memory` bytes."""

    ranks: int
    config: RunConfig
    memory: float

    def describe(self, against: RunConfig) -> str:
        """`16 ranks with key=value …`, naming only what differs from `against`."""
        pairs = [
            (f"{section}.{key}", getattr(getattr(self.config, section), key), getattr(getattr(against, section), key))
            for section, keys in (
                ("parallel", ("tensor", "pipeline", "virtual_pipeline", "sequence", "zero_stage")), ("backbone", ("recompute",)),
                ("batch", ("micro_sequences",)),
            )
            for key in keys
        ]  # fmt: skip
        changes = [f"{key}={str(new).lower()}" for key, new, old in pairs if new != old]
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)} with as much memory each"
        return f"{ranks} with {' '.join(changes)}" if changes else ranks


def smallest_layout(config: RunConfig, derived: Derived, *, memory: float, compute_bytes: int, cuda: bool) -> Layout | None:
    """The first layout whose every rank fits into `memory` bytes: fewest ranks (at least those of `derived`), then the least machinery."""
    ranks = derived.world_size
    while ranks <= max(MAX_RANKS, derived.world_size):
        for candidate in _candidates(config, ranks):
            try:
                resolved = resolve(candidate, world_size=ranks, model_size=derived.model_size)
            except UserError:
                continue
            needed = rank_memory(candidate, resolved, compute_bytes=compute_bytes, cuda=cuda)[0].total
            if needed <= memory:
                return Layout(ranks=ranks, config=candidate, memory=needed)
        ranks = 1 << ranks.bit_length()
    return None


def _candidates(config: RunConfig, ranks: int) -> Iterator[RunConfig]:
    """Layouts for `ranks` ranks, plainest first: no recomputation before recomputation, little model parallelism before much."""
    layers = config.backbone.layers
    tensors = [n for n in legal_tensor_sizes(config) if n <= MAX_TENSOR and ranks % n == 0]
    pipelines = [n for n in divisors(layers) if ranks % n == 0]
    model_splits = sorted(((t, p) for t in tensors for p in pipelines if ranks % (t * p) == 0), key=lambda split: (split[0] * split[1], split[0]))
    for recompute in ("none", "full"):
        for micro in sorted({config.batch.micro_sequences, 1}, reverse=True):
            for tensor, pipeline in model_splits:
                for zero in (1, 2, 3) if pipeline == 1 else (1,):
                    parallel = replace(
                        config.parallel, tensor=tensor, pipeline=pipeline, virtual_pipeline=1, sequence=tensor > 1, zero_stage=zero
                    )
                    yield replace(
                        config, parallel=parallel, backbone=replace(config.backbone, recompute=recompute),
                        batch=replace(config.batch, micro_sequences=micro),
                    )  # fmt: skip
