"""DeepSpeed ZeRO over megatron-core's groups and schedules: one optimizer step, one evaluation, save and load.

ZeRO 1 runs megatron-core's schedule (no pipelining, 1F1B or interleaved) for the backward passes, then sums the gradients of replicated
parameters, then lets DeepSpeed reduce, clip and update. ZeRO 2 and 3 hook into the backward pass itself and run without pipeline stages.
The loss is a sum over the global batch divided once, by the global count; megatron-core's division by micro-batches and DeepSpeed's by
data-parallel ranks are undone in `scale`.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.backbones.megatron import Stage
from pretrain.data.batch import BatchShard, MicroBatch
from pretrain.engine.config import OptimizerConfig
from pretrain.engine.gradients import sum_in_backward, sum_replicated
from pretrain.engine.loss import evaluation_nats, training_loss
from pretrain.engine.optimizer import ObjectiveOptimizer, adamw, parameter_groups, update_average
from pretrain.engine.preparation import Preparation
from pretrain.engine.safe_files import read_safely
from pretrain.engine.snapshot import Snapshot, write_file
from pretrain.engine.statistics import StepResult, StepStatistics, agree, global_count
from pretrain.engine.updates import Updates
from pretrain.engine.zero_files import guard
from pretrain.objectives.base import Objective
from pretrain.parallel.groups import DeepSpeedView, Groups
from pretrain.parallel.vocab import VocabShard

ZERO_FOLDER = "zero"
OBJECTIVE_FILE = "objective.pt"


class Engine:
    """Trains one stage of one model. Every rank calls every method."""

    def __init__(
        self, stage: Stage, objective: Objective, groups: Groups, *, optimizer: OptimizerConfig, zero_stage: int, dtype: torch.dtype,
        device: torch.device, micro_sequences: int, micro_batches: int, length: int, loss_chunk: int, peak_lr: float,
    ) -> None:  # fmt: skip
        import deepspeed

        _quiet_deepspeed()
        self.module, self.objective, self.groups, self.device = stage, objective, groups, device
        self.zero_stage, self.config = zero_stage, optimizer
        self._micro_batches, self._micro_sequences, self._length, self._chunk = micro_batches, micro_sequences, length, loss_chunk
        rows = stage.table["head.weight"].shape[0] // groups.tensor.size
        first = groups.tensor.rank * rows
        tensor_group = groups.tensor.group if groups.tensor.size > 1 else None
        self.vocab = VocabShard(objective.vocabulary, start=first, end=first + rows, group=tensor_group)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        settings = deepspeed_settings(
            zero_stage=zero_stage, dtype=dtype, clip=optimizer.clip, micro_sequences=micro_sequences, micro_batches=micro_batches,
            largest=max(p.numel() for p in stage.parameters()),
        )  # fmt: skip
        named = list(stage.named_parameters())
        self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
            model=stage, optimizer=adamw(parameter_groups(named, stage.table, optimizer), optimizer), config=settings, mpu=DeepSpeedView(groups)
        )
        self._files = guard(self.deepspeed)
        interleaved = len(stage.chunks) > 1
        self._preparation = Preparation(
            objective, groups, self.vocab, chunk=loss_chunk, same_passes=zero_stage == 3, multiple=groups.pipeline.size if interleaved else 1
        )
        self.objective_optimizer = ObjectiveOptimizer(objective.modules().to(device), optimizer, groups)
        self._updates = Updates(self.deepspeed, self.objective_optimizer, groups, zero_stage=zero_stage, clip=optimizer.clip, peak_lr=peak_lr)
        self._agreed: tuple[int, int] | None = None  # step, and tokens that its loss is divided by
        self.accept: Callable[[StepResult], bool] = lambda result: result.finite
        """Asked before every update, on every rank alike."""
        self.in_work: MicroBatch | None = None
        if zero_stage > 1:
            sum_in_backward(stage.parameters(), groups)

    # ---- one optimizer step -------------------------------------------------------------------------------------------------------

    def agree(self, shard: BatchShard | None, votes: Sequence[int] = ()) -> list[int]:
        """The ranks' sum of `votes`. Every rank calls it before a step, when it has its batch; it is a collective that the step needs anyway.

        A rank whose votes stop the run may come without a batch: the step is not begun then, on any rank.
        """
        count, found = agree(shard.micro_batches if shard else (), votes, self.groups, self.device)
        self._agreed = (shard.step, count) if shard else None
        return found

    def train_step(self, shard: BatchShard, lr: float) -> StepResult:
        """Forward, backward, and the update if `accept` wants it, on one global batch. Otherwise the step leaves no trace in the engine."""
        self.module.train()
        if self._agreed is None or self._agreed[0] != shard.step:
            self.agree(shard)
        assert self._agreed is not None
        count, self._agreed = self._agreed[1], None
        batches = self.prepared(shard, evaluation=False)
        assert len(batches) == self._micro_batches, f"{len(batches)} micro-batches for an engine of {self._micro_batches}"
        statistics = StepStatistics(self.groups, self.device)
        for group in self.base_optimizer.param_groups:
            group["lr"] = lr
        losses = self._backward(batches, count, statistics)
        result = statistics.result(self._updates.measure(), count)
        if not self.accept(result):
            self._updates.discard()
            return replace(result, updated=False)
        self._preparation.advance(batches, losses)
        self._updates.apply(lr)
        if self.config.ema:
            update_average(self.base_optimizer, self.flat_partitions(), self.config.ema)
        return result

    def replay(self, shard: BatchShard, statistics: StepStatistics) -> None:
        """The passes of a step once more, without an update: for hooks that look for what went wrong in it."""
        batches = self.prepared(shard, evaluation=False)
        self._backward(batches, global_count(batches, self.groups, self.device), statistics)
        self._updates.measure()  # the same collectives as in the step
        self._updates.discard()

    def _backward(self, batches: tuple[MicroBatch, ...], count: int, statistics: StepStatistics) -> list[Tensor]:
        """Gradients of the global batch, reduced; each micro-batch's loss_B on the last stage."""
        scale = self._micro_batches * self.groups.data.size / max(count, 1)
        if self.zero_stage > 1:
            return self._hooked_backward(batches, scale, statistics)
        losses = self.scheduled_backward(batches, scale, statistics)
        self._reduce()
        return losses

    def scheduled_backward(self, batches: tuple[MicroBatch, ...], scale: float, statistics: StepStatistics) -> list[Tensor]:
        """Gradients of this replica, whole but for the sum over data-parallel ranks, in each parameter's `accumulated_gradient`."""
        losses: list[Tensor] = []

        def loss(batch: MicroBatch, logits_LBv: Tensor) -> tuple[Tensor, dict[str, Any]]:
            value, sums = training_loss(self.objective, logits_LBv, batch.targets, self.vocab, scale=scale, chunk=self._chunk)
            statistics.add(batch, sums)
            losses.append(sums.loss_B)
            return value, {}

        self._run_schedule(batches, loss, forward_only=False)
        sum_replicated(self.module.named_parameters(), self.groups)
        self._preparation.after(batches, losses)
        return losses

    def _reduce(self) -> None:
        """Average gradients over data-parallel ranks."""
        if hasattr(self.optimizer, "reduce_gradients"):
            self.optimizer.reduce_gradients(pipeline_parallel=True)
        else:  # DeepSpeed's bf16 optimizer, which accumulates in fp32
            self.deepspeed.buffered_allreduce_fallback(elements_per_buffer=50_000_000)

    def _hooked_backward(self, batches: tuple[MicroBatch, ...], scale: float, statistics: StepStatistics) -> list[Tensor]:
        losses: list[Tensor] = []
        for i, batch in enumerate(batches):
            self.in_work = batch
            logits_LBv = self.deepspeed(self.objective.network_input(batch.inputs, self.vocab))
            value, sums = training_loss(self.objective, logits_LBv, batch.targets, self.vocab, scale=scale, chunk=self._chunk)
            statistics.add(batch, sums)
            losses.append(sums.loss_B)
            self.deepspeed.backward(value)
            if i < len(batches) - 1:
                self.deepspeed.step()  # counts the micro-batch; the last one's is the update
        self._preparation.after(batches, losses)
        return losses

    # ---- evaluation ---------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, shard: BatchShard) -> tuple[Tensor, Tensor]:
        """nats_N (float64) and count_N (int64) of the global batch's N samples, in their order, on every rank."""
        collected: list[Tensor] = []

        def collect(batch: MicroBatch, logits_LBv: Tensor) -> None:
            nats_B = evaluation_nats(self.objective, logits_LBv, batch.targets, self.vocab, chunk=self._chunk)
            collected.append(torch.stack([nats_B, batch.count_B.to(nats_B)]))

        self.module.eval()
        self._forward(list(self.prepared(shard, evaluation=True)), collect)
        ranks, own = self.groups.data.size, self.groups.data.rank
        # Position in the global batch: micro-batch, then data-parallel rank, then row.
        table = torch.zeros(2, len(shard.micro_batches), ranks, self._micro_sequences, dtype=torch.float64, device=self.device)
        if self.groups.reports_loss:
            table[:, :, own] = torch.stack(collected, dim=1)
        dist.all_reduce(table)
        nats, counts = table.flatten(1).cpu()
        return nats, counts.long()

    def prepared(self, shard: BatchShard, *, evaluation: bool) -> tuple[MicroBatch, ...]:
        """The shard's micro-batches with what the objective adds to them."""
        return self._preparation.before(shard.micro_batches, self._forward, evaluation=evaluation)

    # ---- the schedule -------------------------------------------------------------------------------------------------------------

    def _forward(self, batches: list[MicroBatch], collect: Callable[[MicroBatch, Tensor], None]) -> None:
        """A pass without gradients; `collect` gets each micro-batch's logits on the last stage."""

        def loss(batch: MicroBatch, logits_LBv: Tensor) -> tuple[Tensor, dict[str, Any]]:
            collect(batch, logits_LBv)
            return logits_LBv.new_zeros(()), {}

        if self.zero_stage == 3:  # parameters are gathered by DeepSpeed's forward hooks
            for batch in batches:
                collect(batch, self.deepspeed(self.objective.network_input(batch.inputs, self.vocab)))
        else:
            self._run_schedule(batches, loss, forward_only=True)

    def _run_schedule(self, batches: Sequence[MicroBatch], loss: Any, *, forward_only: bool) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Any]:
            batch = self.in_work = next(iterator)
            return chunk(self.objective.network_input(batch.inputs, self.vocab)), partial(loss, batch)

        chunks = list(self.module.chunks)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks,
            num_microbatches=len(batches),
            seq_length=self._length,
            micro_batch_size=self._micro_sequences,
            forward_only=forward_only,
        )

    # ---- state --------------------------------------------------------------------------------------------------------------------

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The AdamW inside DeepSpeed's optimizer."""
        return self.optimizer.optimizer

    def flat_partitions(self) -> list[Tensor]:
        """This rank's flat fp32 master weights, one tensor per (sub-)group."""
        if self.zero_stage == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        if hasattr(self.optimizer, "fp32_groups_flat_partition"):
            return list(self.optimizer.fp32_groups_flat_partition)
        return list(self.optimizer.single_partition_of_fp32_groups)

    def save(self, folder: Path) -> None:
        """Write this rank's ZeRO files below `folder`/zero, and the objective's own state. A failed write raises after every collective."""
        self.deepspeed.save_checkpoint(str(folder), tag=ZERO_FOLDER, save_latest=False, exclude_frozen_parameters=False)
        self._files.raise_failure()
        if self.groups.is_main and self.objective_optimizer.parameters:
            write_file(self._objective_state(), folder / OBJECTIVE_FILE)

    def snapshot(self) -> Snapshot:
        """Copy to host memory what `save` would write; the snapshot writes the same files later, while training goes on.

        One snapshot at a time: the next one uses its memory. A failure (no memory) raises after every collective.
        """
        with self._files.collected() as snapshot:
            self.deepspeed.save_checkpoint(os.curdir, tag=ZERO_FOLDER, save_latest=False, exclude_frozen_parameters=False)
        self._files.raise_failure()
        if self.groups.is_main and self.objective_optimizer.parameters:
            snapshot.add(Path(OBJECTIVE_FILE), self._objective_state())
        snapshot.finish()
        return snapshot

    def _objective_state(self) -> dict[str, Any]:
        return {"modules": self.objective.modules().state_dict(), "optimizer": self.objective_optimizer.state_dict()}

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote in the same layout. Raises UserError for a file that cannot be read, or not without running what it holds."""
        path, _ = self.deepspeed.load_checkpoint(str(folder), tag=ZERO_FOLDER)
        assert path is not None, f"DeepSpeed found nothing to load in {folder}"
        self.load_objective(folder)

    def load_objective(self, folder: Path) -> None:
        """Restore the objective's own parameters, which no layout cuts."""
        if self.objective_optimizer.parameters:
            state = read_safely(folder / OBJECTIVE_FILE, map_location=self.device)
            self.objective.modules().load_state_dict(state["modules"])
            self.objective_optimizer.load_state_dict(state["optimizer"])


def deepspeed_settings(*, zero_stage: int, dtype: torch.dtype, clip: float, micro_sequences: int, micro_batches: int, largest: int) -> dict[str, Any]:
    """DeepSpeed's configuration. bf16 accumulates gradients in fp32: in bf16, 128 micro-batches lose more than a percent."""
    bucket = min(max(largest, 1_000_000), 50_000_000)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_sequences,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        # One sub-group per parameter group: DeepSpeed splits larger ones at stage 3, in another order than the files are converted in.
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "sub_group_size": 10**15},
        "steps_per_print": 10**12,
    }
    if dtype is torch.bfloat16:
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _quiet_deepspeed() -> None:
    """Errors only, no memory reports, and no shared-memory operator on CPU: building it takes a compiler and a minute, and gloo serves as well."""
    import deepspeed.runtime.bf16_optimizer as bf16_optimizer
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    communication: Any = sys.modules["deepspeed.comm.torch"]
    if not torch.cuda.is_available():
        communication.build_shm_op = lambda: None
