"""What an objective adds to a step's micro-batches before the passes, and takes from them afterwards (the hooks of objectives.base).

Most objectives have none of this, and then nothing here communicates. Shape suffixes: B sequences, L positions, E width of an estimate.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.data.batch import MicroBatch
from pretrain.engine.loss import slice_targets
from pretrain.objectives.base import Objective
from pretrain.parallel.groups import Groups
from pretrain.parallel.vocab import VocabShard

Forward = Callable[[list[MicroBatch], Callable[[MicroBatch, Tensor], None]], None]
"""Runs a forward pass over micro-batches, and calls back with each one's logits_LBv on the last stage."""


class Preparation:
    """The hooks of one objective, run on every rank of a layout."""

    def __init__(self, objective: Objective, groups: Groups, vocab: VocabShard, *, chunk: int, same_passes: bool, multiple: int) -> None:
        """
        same_passes  data-parallel ranks must run equally many forward passes (ZeRO 3, which gathers parameters in each).
        multiple     the number of micro-batches of a pass must be a multiple of this (the interleaved schedule).
        """
        self._objective, self._groups, self._vocab = objective, groups, vocab
        self._chunk, self._same_passes, self._multiple = chunk, same_passes, multiple

    def before(self, batches: tuple[MicroBatch, ...], forward: Forward, *, evaluation: bool) -> tuple[MicroBatch, ...]:
        """The micro-batches as the passes need them: with what the objective adds, and the estimates of a preliminary pass."""
        prepared = []
        for batch in batches:
            inputs, targets = self._objective.prepare(batch.inputs, batch.targets, evaluation=evaluation)
            prepared.append(replace(batch, inputs=inputs, targets=targets, t_B=targets.get("t", batch.t_B)))
        marked = [self._objective.preliminary_rows(batch.inputs, evaluation=evaluation) for batch in prepared]
        rows = [rows_B for rows_B in marked if rows_B is not None]
        return tuple(self._with_estimates(prepared, rows, forward) if rows else prepared)

    def after(self, batches: tuple[MicroBatch, ...], losses: list[Tensor]) -> None:
        """Make the leaves' gradients whole and hand them on. `losses` has each micro-batch's loss_B on the last stage."""
        leaves = [leaf for batch in batches for leaf in _leaves(batch)]
        if leaves and self._groups.pipeline.size > 1:
            gradients = torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
            dist.all_reduce(gradients, group=self._groups.pipeline.group)
            for leaf, gradient in zip(leaves, gradients.split([leaf.numel() for leaf in leaves]), strict=True):
                leaf.grad = gradient
        if self._groups.pipeline.last:
            for batch, loss_B in zip(batches, losses, strict=True):
                self._objective.finish(batch.targets, loss_B)

    def advance(self, batches: tuple[MicroBatch, ...], losses: list[Tensor]) -> None:
        """Update running state, with the parameters that gave these losses: before the update, and only where there will be one."""
        self._objective.advance(self._statistics(batches, losses))

    def _statistics(self, batches: tuple[MicroBatch, ...], losses: list[Tensor]) -> Tensor | None:
        """Sums over the global batch, on every rank: one rank of each replica contributes."""
        total: Tensor | None = None
        for i, batch in enumerate(batches):
            loss_B = losses[i] if self._groups.reports_loss else torch.zeros_like(batch.count_B, dtype=torch.float32)
            numbers = self._objective.statistics(batch.targets, loss_B)
            if numbers is None:
                return None
            numbers = numbers.double() * float(self._groups.reports_loss)
            total = numbers if total is None else total + numbers
        if total is not None:
            dist.all_reduce(total)
        return total

    # ---- the preliminary pass -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _with_estimates(self, batches: list[MicroBatch], marked: list[Tensor], forward: Forward) -> list[MicroBatch]:
        """Rows that need a first pass, packed into as few micro-batches as hold them; what it finds goes into inputs["estimate"]."""
        size = batches[0].count_B.shape[0]
        where = [(m, b) for m, rows_B in enumerate(marked) for b in rows_B.nonzero().flatten().tolist()]
        passes = self._passes(-(-len(where) // size), batches[0].count_B.device)
        filled = where + [(0, 0)] * (passes * size - len(where))
        packed = [_packed(batches, filled[i : i + size]) for i in range(0, len(filled), size)]
        found: list[Tensor] = []

        def collect(batch: MicroBatch, logits_LBv: Tensor) -> None:
            pieces = []
            for start in range(0, len(logits_LBv), self._chunk):
                stop = min(start + self._chunk, len(logits_LBv))
                targets = slice_targets(batch.targets, start, stop)
                pieces.append(self._objective.preliminary_result(logits_LBv[start:stop].transpose(0, 1), targets, self._vocab))
            found.append(torch.cat(pieces, dim=1))

        if packed:
            forward(packed, collect)
        estimate_RLE = self._everywhere(found, len(filled), batches[0])
        return [self._scattered(batch, m, where, estimate_RLE) for m, batch in enumerate(batches)]

    def _passes(self, own: int, device: torch.device) -> int:
        if self._same_passes:
            most = torch.tensor(own, device=device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._groups.data.group)
            own = int(most)
        return -(-own // self._multiple) * self._multiple

    def _everywhere(self, found: list[Tensor], rows: int, batch: MicroBatch) -> Tensor:
        """The last stage's estimates on every stage."""
        length, device = batch.inputs["positions"].shape[1], batch.count_B.device
        if found:
            estimate_RLE = torch.cat(found).float().contiguous()
        else:
            estimate_RLE = torch.zeros(rows, length, self._objective.preliminary_width(), device=device)
        pipeline = self._groups.pipeline
        if pipeline.size > 1 and rows:
            dist.broadcast(estimate_RLE, src=dist.get_global_rank(pipeline.group, pipeline.size - 1), group=pipeline.group)
        return estimate_RLE

    def _scattered(self, batch: MicroBatch, number: int, where: list[tuple[int, int]], estimate_RLE: Tensor) -> MicroBatch:
        estimate_BLE = estimate_RLE.new_zeros(batch.count_B.shape[0], *estimate_RLE.shape[1:])
        for row, (m, b) in enumerate(where):
            if m == number:
                estimate_BLE[b] = estimate_RLE[row]
        return replace(batch, inputs={**batch.inputs, "estimate": estimate_BLE})


def _packed(batches: list[MicroBatch], rows: list[tuple[int, int]]) -> MicroBatch:
    """A micro-batch of these (micro-batch, row) pairs, without gradients. Where any has document masks, all get them."""

    def gather(pick: Callable[[MicroBatch], dict[str, Tensor]]) -> dict[str, Tensor]:
        keys = set().union(*(pick(batches[m]) for m, _ in rows))
        return {key: torch.stack([_row(pick(batches[m]), key, b) for m, b in rows]).detach() for key in keys}

    first = batches[rows[0][0]]
    count_B = torch.stack([batches[m].count_B[b] for m, b in rows])
    return replace(first, inputs=gather(lambda batch: batch.inputs), targets=gather(lambda batch: batch.targets), count_B=count_B)


def _row(tensors: dict[str, Tensor], key: str, b: int) -> Tensor:
    if key == "documents" and key not in tensors:
        return torch.zeros_like(tensors["positions"][b], dtype=torch.int32)
    return tensors[key][b]


def _leaves(batch: MicroBatch) -> list[Tensor]:
    """Tensors that the objective made leaves, in the same order on every stage."""
    found = {**batch.inputs, **batch.targets}
    return [found[key] for key in sorted(found) if found[key].requires_grad]
