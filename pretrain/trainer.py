"""The training loop. Everything it needs is built before it starts; it knows no objective, no layout and no file format.

main -> run -> Trainer.fit: next(loader) -> engine.train_step -> telemetry -> validate and save when due.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import torch
import yaml

from pretrain.backbones.parameters import count_parameters
from pretrain.build import build_engine, build_objective, build_samples, compute_dtype
from pretrain.checkpoint.changes import Freedom, changes, read_config
from pretrain.checkpoint.history import PHASES, phases_from, recorded_phases, switch
from pretrain.checkpoint.layout import Layout, TrainState
from pretrain.checkpoint.lock import lock_run
from pretrain.checkpoint.manager import Checkpoint, CheckpointManager
from pretrain.checkpoint.peers import Peers
from pretrain.checkpoint.reshape import load_any_layout
from pretrain.checkpoint.resume import MEANT, RATES_AHEAD, ResumeCard, freeze_run, meant, versions
from pretrain.checkpoint.saving import Saved, Saving
from pretrain.convert.initial import require_own, start_from
from pretrain.data.loader import Loader, build_loader, build_validation_loader
from pretrain.data.phases import to_record
from pretrain.data.samples import TrainingSamples, ValidationSamples
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine.safe_files import require_safe
from pretrain.engine.schedule import learning_rate
from pretrain.engine.statistics import TIME_BINS, StepResult, time_records
from pretrain.engine.zero import Engine
from pretrain.engine.zero_files import ALLOWED
from pretrain.errors import UserError
from pretrain.evaluation.likelihood import LikelihoodResult, estimate_likelihood
from pretrain.objectives.base import Objective
from pretrain.parallel import groups as parallel_groups
from pretrain.parallel import platform
from pretrain.parallel.groups import Groups
from pretrain.redaction import redacted
from pretrain.rules import Derived, resolve, run_flops_per_token, run_vocabulary
from pretrain.run_config import RunConfig
from pretrain.telemetry.log import RunLog
from pretrain.telemetry.throughput import Compute, Throughput, device_peak, peak_memory_gib


def run(config: RunConfig) -> int:
    """Train, or continue, the run that the configuration describes; 0 when it reached its last step."""
    groups = parallel_groups.initialize(config.parallel, seed=config.seed)
    try:
        trainer = Trainer(config, groups)
        try:
            trainer.fit()
        finally:
            trainer.close()
    finally:
        parallel_groups.shutdown()
    return 0


@dataclass
class Window:
    """Sums since the last training record."""

    steps: int = 0
    loss: float = 0.0
    nelbo: float = 0.0
    gradient_norm: float = 0.0
    tokens: int = 0
    time_sums: np.ndarray = field(default_factory=lambda: np.zeros((TIME_BINS, 5)))

    def add(self, result: StepResult) -> None:
        """Count one step."""
        self.steps += 1
        self.loss += result.loss * result.tokens
        self.nelbo += result.nelbo * result.tokens
        self.gradient_norm = max(self.gradient_norm, result.gradient_norm)
        self.tokens += result.tokens
        self.time_sums = self.time_sums + result.time_sums


class Trainer:
    """A run on this rank."""

    def __init__(self, config: RunConfig, groups: Groups) -> None:
        self.config, self.groups, self.device = config, groups, platform.device()
        tokenizer = Tokenizer(config.tokenizer)
        vocabulary = run_vocabulary(config, tokenizer)
        self.meant = meant(config, vocabulary, tokenizer.hash)
        self.derived: Derived = resolve(config, world_size=groups.world_size, model_size=vocabulary.model_size)
        self.objective: Objective = build_objective(config.objective, vocabulary)
        self.peers = Peers.world()
        # Each rank verifies its share of what its machine sees, and all leave where one finds damage.
        built: list[tuple[TrainingSamples, ValidationSamples | None]] = []
        self.peers.everyone(lambda: built.append(build_samples(config, self.objective, tokenizer, share=platform.machine_share())))
        self.samples, self.held_out = built[0]
        self.lock = lock_run(config.directory, self.peers)
        try:
            self._begin()
        except BaseException:
            self.lock.release()
            raise

    def _begin(self) -> None:
        """Everything that reads or writes the run directory, which is this run's alone from here on."""
        config, peers = self.config, self.peers
        self.manager = CheckpointManager(config.directory, config.checkpoint.keep, peers)
        checkpoint = self.manager.begin(config.resume)
        require_own(checkpoint, config)
        self.start = checkpoint.step if checkpoint else 0
        card = self._resume_card(checkpoint) if checkpoint else None
        if card:
            card.require_legal(config.resume)
        self.config_text = yaml.safe_dump(redacted(dataclasses.asdict(config)), sort_keys=False)
        peers.writer(lambda: freeze_run(config.directory, self.config_text))
        self.engine: Engine = build_engine(config, self.objective, self.groups, self.device)
        opened: list[tuple[RunLog, Throughput]] = []
        peers.everyone(lambda: opened.append(self._open_log(checkpoint)))  # the main rank alone opens files, and all leave if it cannot
        self.log, self.throughput = opened[0]
        background = Peers.apart() if config.checkpoint.asynchronous else None
        self.saving = Saving(self.manager, Peers.apart(), background, self._report_saved)
        if card:
            self._restore(card)
        elif config.init_from is not None:
            self.log.event(0, "start", start_from(config, self.engine, self.objective, peers))

    # ---- the loop -----------------------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step of this start, with records, validation and checkpoints when they are due."""
        last, window = self.derived.last_step, Window()
        if self.start >= last:
            if last < self.derived.steps:
                why = f"step {self.start} of {self.derived.steps} is done, and duration.stop_after={last} does not lie ahead of it"
            else:
                why = f"step {self.start} of {last} is done"
            self.log.event(self.start, "finished", f"nothing to do: {why}")
            return
        with self._training_loader() as loader:
            for shard in loader:
                lr, step = self.lr(shard.step), shard.step + 1
                window.add(self._finite(step, self.engine.train_step(shard, lr)))
                self.throughput.add(self.derived.tokens_per_step)
                self.log.advance(step)
                if self._due(step, self.config.telemetry.log_every):
                    self._record(step, lr, window)
                    window = Window()
                with self.throughput.pause():
                    self.saving.boundary(step)
                    if self.held_out and self._due(step, self.config.validation.every):
                        self.validate(step)
                    if self._due(step, self.config.checkpoint.every) or self._milestone(step):
                        self.save(step, lr)
                if step >= last:
                    break
        self.saving.finish()

    def _finite(self, step: int, result: StepResult) -> StepResult:
        """Raises UserError for a loss or gradient that is not finite, before anything after it is saved: the same on every rank."""
        # DeepSpeed's helpers answer -1 for a norm that is not finite.
        if math.isfinite(result.loss) and math.isfinite(result.gradient_norm) and result.gradient_norm >= 0:
            return result
        raise self._diverged(f"step {step} gave loss {result.loss:.4g} and gradient norm {result.gradient_norm:.4g}")

    def _diverged(self, what: str) -> UserError:
        clip = "lower optimizer.clip" if self.config.optimizer.clip else "set optimizer.clip=1"
        return UserError(
            f"{what}: the run diverged and stops here, with its earlier checkpoints intact; lower schedule.peak or {clip}, remove the "
            "checkpoints after the last good one, and start again with resume=changed"
        )

    def _due(self, step: int, every: int) -> bool:
        """Every so many steps (0: never), and at the last step of the schedule or of this start."""
        return step >= self.derived.last_step or (every > 0 and step % every == 0)

    def _milestone(self, step: int) -> bool:
        """Whether this step consumed the last token of a multiple of checkpoint.milestone_tokens."""
        every, per_step = self.config.checkpoint.milestone_tokens, self.derived.tokens_per_step
        return every is not None and step * per_step // int(every) > (step - 1) * per_step // int(every)

    def lr(self, step: int) -> float:
        """Learning rate of update number `step` (0-based)."""
        return learning_rate(self.config.schedule, step, self.derived.steps)

    # ---- validation and telemetry -------------------------------------------------------------------------------------------------

    def validate(self, step: int) -> LikelihoodResult:
        """The whole held-out set once."""
        assert self.held_out is not None
        nats, counts = [], []
        loader = build_validation_loader(
            self.held_out, self.config.data, self.config.batch, dp_rank=self.groups.data.rank, dp_size=self.groups.data.size, device=self.device
        )
        with loader:
            for shard in loader:
                nats_N, count_N = self.engine.evaluate(shard)
                nats.append(nats_N.numpy())
                counts.append(count_N.numpy())
        ids = self.held_out.sequences(sum(map(len, nats)))
        result = estimate_likelihood(
            ids, np.concatenate(nats), np.concatenate(counts), label=self.objective.label(evaluation=True), importance=self.objective.importance
        )
        # A draw of a sequence is one record in each part.
        result = dataclasses.replace(result, draws=result.draws // self.objective.evaluation_parts)
        self.log.validation(step, self._validation_record(step, result))
        if not math.isfinite(result.nats_per_token):
            raise self._diverged(f"validation at step {step} gave {result.nats_per_token:.4g} nats per token")
        return result

    def _validation_record(self, step: int, result: LikelihoodResult) -> dict[str, object]:
        record: dict[str, object] = {
            "tokens": step * self.derived.tokens_per_step,
            "nelbo_nats_per_token": result.nats_per_token,
            "ci95_nats_per_token": (result.ci_high - result.ci_low) / 2,
            "nelbo_label": result.label,
            "validation_tokens": result.tokens,
            "validation_sequences": result.sequences,
            "draws": result.draws,
            "summary": result.describe(),
        }
        return record | ({"perplexity": result.perplexity} if result.label != "not_a_likelihood" else {})

    def _record(self, step: int, lr: float, window: Window) -> None:
        speed = self.throughput.read()
        bins = time_records(window.time_sums)
        self.log.train(
            step,
            {
                "tokens": step * self.derived.tokens_per_step,
                "loss_nats_per_token": window.loss / window.tokens,
                "nelbo_nats_per_token": window.nelbo / window.tokens,
                "lr": lr,
                "gradient_norm": window.gradient_norm,
                "peak_memory_gib": peak_memory_gib(self.device),
                **speed,
                "loss_bearing_tokens_per_second": speed["tokens_per_second"] * window.tokens / (window.steps * self.derived.tokens_per_step),
            }
            | ({"t_bins": bins} if bins else {}),
        )

    def _open_log(self, checkpoint: Checkpoint | None) -> tuple[RunLog, Throughput]:
        model_size = self.objective.vocabulary.model_size
        flops = run_flops_per_token(self.config, model_size)
        dtype: Compute = "fp8" if self.config.precision.fp8 else "bf16" if compute_dtype(self.config) is torch.bfloat16 else "fp32"
        peak = device_peak(self.device, dtype, self.config.telemetry.peak_tflops)
        log = RunLog(
            self.config.directory,
            is_main=self.groups.is_main,
            settings=self.config.telemetry,
            label=self.objective.label(evaluation=False),
            resumed_step=checkpoint.step if checkpoint else None,
            total_steps=self.derived.steps,
            last_step=self.derived.last_step,
            run_name=self.config.name,
            config=dataclasses.asdict(self.config),
            facts={
                "parameters": count_parameters(self.config.backbone, model_size),
                "vocabulary": dataclasses.asdict(self.objective.vocabulary),
                "training_flops_per_token": flops,
                "flops_formula": "3 x forward matrix products, attention scores and values counted in full",
                "peak_flops_per_rank": peak.flops,
                "peak_source": peak.source,
                "layout": str(self._layout()),
                "compute": dtype,
            },
        )
        return log, Throughput(flops, peak.flops, ranks=self.groups.world_size)

    # ---- data ---------------------------------------------------------------------------------------------------------------------

    def _training_loader(self) -> Loader:
        return build_loader(
            self.samples,
            self.config.data,
            self.config.batch,
            dp_rank=self.groups.data.rank,
            dp_size=self.groups.data.size,
            start_step=self.start,
            device=self.device,
        )

    # ---- checkpoints --------------------------------------------------------------------------------------------------------------

    def save(self, step: int, lr: float) -> None:
        """Save the state after `step` updates, in the background if so configured. Raises UserError, with the earlier checkpoints intact, for
        weights that are not finite, or for a full disk (in the background at a later boundary)."""
        last = self.derived.steps - 1
        state = TrainState(
            step=step,
            tokens=step * self.derived.tokens_per_step,
            samples=step * self.config.batch.global_sequences,
            lr=lr,
            next_batch=self.samples.fingerprint(step),
            seed=self.config.seed,
            layout=self._layout(),
            backbone=dataclasses.asdict(self.config.backbone),
            rows=self.objective.vocabulary.padded_size,
            versions=versions(),
            extras={MEANT: self.meant, PHASES: to_record(self.samples.mixture.phases), RATES_AHEAD: self._rates([step, (step + last) // 2, last])},
            milestone=self._milestone(step),
        )
        self.saving.start(step, self.engine, state, self.config_text)

    def _report_saved(self, saved: Saved) -> None:
        self.log.event(saved.step, "checkpoint", str(saved), saved.figures)

    def _resume_card(self, checkpoint: Checkpoint) -> ResumeCard:
        then = checkpoint.state
        found = changes(read_config(checkpoint.folder), redacted(dataclasses.asdict(self.config)), then.extras.get(MEANT, {}), self.meant)
        if not any(change.freedom is Freedom.FIXED for change in found):  # another run, which the card refuses, has other phases
            self.samples.follow(phases_from(self.config, checkpoint.folder, then))
        return ResumeCard(
            checkpoint=checkpoint.folder,
            then=then,
            changes=found,
            layout_now=self._layout(),
            lr_now=self.lr(then.step - 1),
            rates_now=self._rates([int(step) for step in then.extras.get(RATES_AHEAD, {})]),
            next_batch_now=self.samples.fingerprint(then.step),
            rows_now=self.objective.vocabulary.padded_size,
        )

    def _rates(self, steps: list[int]) -> dict[str, float]:
        """Learning rates by 0-based step, as JSON keeps them."""
        return {str(step): self.lr(step) for step in steps}

    def _restore(self, card: ResumeCard) -> None:
        """Load weights and moments, in this layout or from another one, and say what is continued."""
        pickled = sorted(card.checkpoint.rglob("*.pt"))[self.peers.rank :: self.peers.size]
        self.peers.everyone(lambda: require_safe(pickled, ALLOWED))  # all leave if one is forged
        if card.same_files:
            self.engine.load(card.checkpoint)
        else:  # logical tensors fit every engine
            load_any_layout(self.engine, card.checkpoint, self.peers)
            self.engine.load_objective(card.checkpoint)
        found = all("exp_avg" in self.engine.base_optimizer.state[flat] for flat in self.engine.flat_partitions())
        self.log.event(card.then.step, "resume", dataclasses.replace(card, optimizer_found=found).render())
        before, now = recorded_phases(card.checkpoint, card.then), list(self.samples.mixture.phases)
        if changed := switch(before, now, card.then.samples, self.config.batch.length):
            self.log.event(card.then.step, "data", changed)

    def _layout(self) -> Layout:
        return Layout.of(self.config.parallel, self.groups.data.size)

    def close(self) -> None:
        """Let a save that is in flight end, finish logs, and leave the run directory to the next one."""
        try:
            self.saving.close(lambda trouble: self.log.event(self.start, "checkpoint", trouble))
            self.log.close()
        finally:
            self.lock.release()
