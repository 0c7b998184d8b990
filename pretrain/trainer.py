"""The training loop. Everything it needs is built before it starts; it knows no objective, no layout and no file format.

main -> run -> Trainer.fit: next(loader) -> engine.train_step -> guard -> telemetry -> validate and save when due. Before every step the ranks
agree whether to go on (preemption.Requests).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import yaml

from pretrain import preemption
from pretrain.build import build_engine, build_objective, build_samples
from pretrain.checkpoint.changes import Freedom, changes, read_config
from pretrain.checkpoint.history import PHASES, SKIPS, phases_from, recorded_phases, skips_from, switch
from pretrain.checkpoint.layout import MEANT, Layout, TrainState
from pretrain.checkpoint.lock import lock_run
from pretrain.checkpoint.manager import Checkpoint, CheckpointManager
from pretrain.checkpoint.peers import Peers
from pretrain.checkpoint.reshape import load_any_layout
from pretrain.checkpoint.resume import RATES_AHEAD, ResumeCard, freeze_run, meant, versions
from pretrain.checkpoint.saving import Saved, Saving
from pretrain.convert.initial import require_own, start_from
from pretrain.data.batch import BatchShard
from pretrain.data.loader import Loader, build_loader
from pretrain.data.phases import begun, to_record
from pretrain.data.samples import HeldOutSamples, TrainingStream
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine.safe_files import require_safe
from pretrain.engine.schedule import learning_rate
from pretrain.engine.zero import Engine
from pretrain.engine.zero_files import ALLOWED
from pretrain.errors import UserError
from pretrain.evaluation.likelihood import LikelihoodResult
from pretrain.guard import Guard
from pretrain.objectives.base import Objective
from pretrain.parallel import groups as parallel_groups
from pretrain.parallel import platform
from pretrain.parallel.groups import Groups
from pretrain.redaction import redacted
from pretrain.rules import Derived, resolve, run_vocabulary
from pretrain.run_config import RunConfig
from pretrain.run_records import Window, open_log, training_record
from pretrain.telemetry.heartbeat import Heartbeat, gather_values
from pretrain.telemetry.log import RunLog
from pretrain.telemetry.throughput import Throughput
from pretrain.telemetry.watchdog import Watchdog
from pretrain.validation import validate, validation_record

GUARD, OWED = "guard", "validation_owed"
"""In TrainState.extras: the guard's state; whether a stop cut this step's validation short."""
POLL_SECONDS = 0.5
"""While a rank waits for data, it looks so often whether it shall stop."""


SamplesBuilder = Callable[[RunConfig, Objective, Tokenizer, tuple[int, int]], tuple[TrainingStream, HeldOutSamples | None]]
"""(run, objective, tokenizer, this process's share of what has to be verified) -> what is trained on, and the held-out set if there is one."""


def run(config: RunConfig, build: SamplesBuilder = build_samples) -> int:
    """Train, or continue, the run that the configuration describes; the exit code: 0 when it reached its last step."""
    hang = config.telemetry.hang_seconds  # the watchdog must speak before the collectives themselves give up
    groups = parallel_groups.initialize(config.parallel, seed=config.seed, timeout_minutes=max(30.0, hang / 30))
    try:
        trainer = Trainer(config, groups, build)
        try:
            reason = trainer.fit()
        finally:
            trainer.close()
        trainer.peers.exchange(None)  # torchrun ends the other ranks when one has left
    finally:
        parallel_groups.shutdown()
    return preemption.exit_code(reason) if reason else 0


class Trainer:
    """A run on this rank. step: optimizer steps done."""

    def __init__(self, config: RunConfig, groups: Groups, build: SamplesBuilder = build_samples) -> None:
        self.config, self.groups, self.device = config, groups, platform.device()
        self.requests, self.step = preemption.current(), 0
        self.reason: str | None = None
        tokenizer = Tokenizer(config.tokenizer)
        vocabulary = run_vocabulary(config, tokenizer)
        self.meant = meant(config, vocabulary, tokenizer.hash)
        self.derived: Derived = resolve(config, world_size=groups.world_size, model_size=vocabulary.model_size)
        self.objective: Objective = build_objective(config.objective, vocabulary)
        self.peers = Peers.world()
        # Each rank verifies its share of what its machine sees, and all leave where one finds damage.
        built: list[tuple[TrainingStream, HeldOutSamples | None]] = []
        self.peers.everyone(lambda: built.append(build(config, self.objective, tokenizer, platform.machine_share())))
        self.samples, self.held_out = built[0]
        self.lock = lock_run(config.directory, self.peers)
        try:
            self._begin()
        except BaseException as error:
            if isinstance(error, preemption.Stopped) and self.peers.is_writer:
                preemption.leave_marker(config.directory, error.reason, self.step)
            self.lock.release()
            raise

    def _begin(self) -> None:
        """Everything that reads or writes the run directory, which is this run's alone from here on."""
        config, peers = self.config, self.peers
        self.manager = CheckpointManager(config.directory, config.checkpoint.keep, peers)
        checkpoint = self.manager.begin(config.resume)
        require_own(checkpoint, config)
        extras = checkpoint.state.extras if checkpoint else {}
        self.step = self.saved = checkpoint.step if checkpoint else 0
        self.owed = bool(extras.get(OWED))
        self.samples.skips = skips_from(checkpoint.state if checkpoint else None)
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
        self._build_watch()
        if card:
            self._restore(card)
            self.guard.load(extras.get(GUARD, {}))
        elif self.samples.description:
            self.log.event(0, "data", self.samples.description)
        if not card and config.init_from is not None:
            self.log.event(0, "start", start_from(config, self.engine, self.objective, peers))

    def _build_watch(self) -> None:
        """What looks after the run while it goes on."""
        config, groups = self.config, self.groups
        clip = "lower optimizer.clip" if config.optimizer.clip else "set optimizer.clip=1"
        self.advice = (
            f"lower schedule.peak or {clip}, remove the checkpoints after the last good one, and start again with resume=changed"
        )
        self.guard = Guard(config.guard, self.engine, self.samples, self.log.event, self.advice)
        self.watchdog = Watchdog(config.directory, groups.world_rank, groups.world_size, config.telemetry.hang_seconds)
        self.heartbeat = Heartbeat(partial(gather_values, device=self.device), sampled=self.device.type == "cuda")
        self.requests.watch(config.directory, groups.world_size)
        self.peers.writer(lambda: preemption.clear_marker(config.directory))

    # ---- the loop -----------------------------------------------------------------------------------------------------------------

    def fit(self) -> str | None:
        """Train to the last step of this start, with records, validation and checkpoints when they are due. Why it was stopped before, if so."""
        if self.step >= self.derived.last_step and not self.owed:
            self.log.event(self.step, "finished", f"nothing to do: {self._why_finished()}")
            return None
        self.watchdog.start()
        self.requests.defer()
        if self.owed and self.held_out:
            self.validate(self.step)
        while (rewind := self._walk()) is not None:
            self._rewind(*rewind)
        if self.reason:
            self._leave()
            return self.reason
        self.saving.finish()
        return None

    def _walk(self) -> tuple[int, str] | None:
        """Steps until the last one or a stop; or until one went wrong that asks for a rewind: its 0-based number, and what is said about it."""
        last, window = self.derived.last_step, Window()
        with self._training_loader() as loader:
            while self.step < last and not self.reason:
                self.heartbeat.begin(last=self._due(self.step + 1, self.config.telemetry.log_every))
                shard = self._next(loader)
                if shard is None:
                    break
                lr, step = self.lr(shard.step), shard.step + 1
                result = self.engine.train_step(shard, lr)
                self.heartbeat.end()
                verdict = self.guard.check(shard, result)
                if verdict.action == "rewind":
                    return shard.step, verdict.message
                if verdict.action == "keep":
                    window.add(result)
                self.step = step
                self.throughput.add(self.derived.tokens_per_step)
                self.log.advance(step)
                self._say_phase(step)
                if self._due(step, self.config.telemetry.log_every):
                    self._record(step, lr, window)
                    window = Window()
                with self.throughput.pause():
                    self.guard.check_replicas(step)
                    if verdict.action == "keep":
                        self.saving.boundary(step)
                    if self.held_out and self._due(step, self.config.validation.every):
                        self.validate(step)
                    if self._due(step, self.config.checkpoint.every) or self._milestone(step):
                        self.save(step, lr)
        return None

    def _next(self, loader: Loader) -> BatchShard | None:
        """The next batch, when all ranks have theirs; None: a rank was asked to stop, and all know."""
        self.watchdog.beat(self.step, "data")
        while not loader.ready(POLL_SECONDS) and not self.requests.asked:
            pass
        shard = next(loader) if loader.ready(0) else None
        self.reason = preemption.agreed(self.engine.agree(shard, self.requests.votes()))
        if self.reason or shard is None:
            return None
        self.watchdog.beat(self.step, "step", [number for batch in shard.micro_batches for number in batch.sample_ids])
        return shard

    def _leave(self) -> None:
        """Stopped before the end: save, and leave word for whoever starts the run again."""
        assert self.reason is not None
        reason, step = self.reason, self.step
        if self.saved != step:
            self.save(step, self.lr(step - 1))
        self.saving.wait()
        self.peers.writer(lambda: preemption.leave_marker(self.config.directory, reason, step))
        what = "everything is saved" if step else "nothing had to be saved"
        self.log.event(step, "stopped", f"by {reason} after step {step}: {what}, and the same command continues")

    def _rewind(self, bad: int, said: str) -> None:
        """Back to the last checkpoint, and on with the text after that of step `bad` (0-based)."""
        self.watchdog.beat(self.step, "rewind")
        self.saving.settle()
        checkpoint = self.manager.latest()
        if checkpoint is None:
            remedy = "lower schedule.peak, and start again with resume=fresh"
            raise UserError(f"{said}: there is no checkpoint yet to rewind to, so the run stops here; {remedy}")
        card = self._resume_card(checkpoint)
        count = self.samples.skips.rewind(checkpoint.step, bad)
        self._load(card)
        self.guard.rewound(checkpoint.state.extras.get(GUARD, {}))
        self.step = self.saved = checkpoint.step
        self.peers.everyone(lambda: self.log.rewind(checkpoint.step))
        self.log.event(self.step, "rewind", f"{said}; back to step {self.step}, leaving out the text of {count} steps: {self.samples.skips.entries}")

    def _why_finished(self) -> str:
        if self.step < self.derived.last_step or self.derived.last_step == self.derived.steps:
            return f"step {self.step} of {self.derived.last_step} is done"
        return f"step {self.step} of {self.derived.steps} is done, and duration.stop_after={self.derived.last_step} does not lie ahead of it"

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

    def validate(self, step: int) -> LikelihoodResult | None:
        """The whole held-out set once; None, and owed to the next start, if the ranks agreed to stop."""
        assert self.held_out is not None

        def go_on(samples: tuple[int, ...]) -> bool:
            self.watchdog.beat(step, "validation", samples)
            self.reason = preemption.agreed(self.engine.agree(None, self.requests.votes()))
            return self.reason is None

        result = validate(self.engine, self.held_out, self.config, self.device, go_on)
        self.watchdog.beat(step, "checkpoint")
        self.owed = result is None
        if result is None:
            return None
        self.log.validation(step, validation_record(step * self.derived.tokens_per_step, result))
        if not math.isfinite(result.nats_per_token):
            raise UserError(
                f"validation at step {step} gave {result.nats_per_token:.4g} nats per token: the run diverged and stops here, with its earlier "
                f"checkpoints intact; {self.advice}"
            )
        return result

    def _record(self, step: int, lr: float, window: Window) -> None:
        speed, ranks = self.throughput.read(), self.heartbeat.read()
        if window.steps == 0:  # every step of it was left out
            return
        tokens, per_step = step * self.derived.tokens_per_step, self.derived.tokens_per_step
        self.log.train(step, training_record(window, speed, tokens=tokens, tokens_per_step=per_step, lr=lr, device=self.device) | ranks)

    def _say_phase(self, step: int) -> None:
        """With the record of its first step, so that a run that goes on from before that step says it again, and one from after it does not."""
        first, before = (self.samples.numbers(number).start if number >= 0 else None for number in (step - 1, step - 2))
        if first is not None and (said := begun(self.samples.phases, first, before, length=self.config.batch.length)):
            self.log.event(step, "phase", said)

    def _open_log(self, checkpoint: Checkpoint | None) -> tuple[RunLog, Throughput]:
        resumed = checkpoint.step if checkpoint else None
        return open_log(self.config, self.objective, self.derived, self.groups, self.device, layout=self._layout(), resumed_step=resumed)

    # ---- data ---------------------------------------------------------------------------------------------------------------------

    def _training_loader(self) -> Loader:
        return build_loader(
            self.samples,
            self.config.data,
            self.config.batch,
            dp_rank=self.groups.data.rank,
            dp_size=self.groups.data.size,
            start_step=self.step,
            device=self.device,
        )

    # ---- checkpoints --------------------------------------------------------------------------------------------------------------

    def save(self, step: int, lr: float) -> None:
        """Save the state after `step` updates, in the background if so configured. Raises UserError, with the earlier checkpoints intact, for
        weights that are not finite, or for a full disk (in the background at a later boundary)."""
        self.watchdog.beat(step, "checkpoint")
        last = self.derived.steps - 1
        state = TrainState(
            step=step,
            tokens=step * self.derived.tokens_per_step,
            samples=self.samples.numbers(step).start,
            lr=lr,
            next_batch=self.samples.fingerprint(step),
            seed=self.config.seed,
            layout=self._layout(),
            backbone=dataclasses.asdict(self.config.backbone),
            rows=self.objective.vocabulary.padded_size,
            versions=versions(),
            extras={
                MEANT: self.meant, PHASES: to_record(self.samples.phases), SKIPS: self.samples.skips.entries,
                RATES_AHEAD: self._rates([step, (step + last) // 2, last]), GUARD: self.guard.state(), OWED: self.owed,
            },
            milestone=self._milestone(step),
        )  # fmt: skip
        self.saving.start(step, self.engine, state, self.config_text)
        self.saved = step

    def _report_saved(self, saved: Saved) -> None:
        self.log.event(saved.step, "checkpoint", str(saved), saved.figures)

    def _resume_card(self, checkpoint: Checkpoint) -> ResumeCard:
        then = checkpoint.state
        found = changes(read_config(checkpoint.folder), redacted(dataclasses.asdict(self.config)), then.extras.get(MEANT, {}), self.meant)
        another = any(change.freedom is Freedom.FIXED for change in found)  # which the card refuses
        if self.samples.phases and not another:
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
        """Load the checkpoint, and say what is continued."""
        self._load(card)
        found = all("exp_avg" in self.engine.base_optimizer.state[flat] for flat in self.engine.flat_partitions())
        self.log.event(card.then.step, "resume", dataclasses.replace(card, optimizer_found=found).render())
        before, now = recorded_phases(card.checkpoint, card.then), list(self.samples.phases)
        if changed := switch(before, now, card.then.samples, self.config.batch.length):
            self.log.event(card.then.step, "data", changed)

    def _load(self, card: ResumeCard) -> None:
        """Weights and moments, in this layout or from another one."""
        pickled = sorted(card.checkpoint.rglob("*.pt"))[self.peers.rank :: self.peers.size]
        self.peers.everyone(lambda: require_safe(pickled, ALLOWED))  # all leave if one is forged
        if card.same_files:
            self.engine.load(card.checkpoint)
        else:  # logical tensors fit every engine
            load_any_layout(self.engine, card.checkpoint, self.peers)
            self.engine.load_objective(card.checkpoint)

    def _layout(self) -> Layout:
        return Layout.of(self.config.parallel, self.groups.data.size)

    def close(self) -> None:
        """Let a save that is in flight end, finish logs, and leave the run directory to the next one."""
        try:
            self.saving.close(lambda trouble: self.log.event(self.step, "checkpoint", trouble))
            self.watchdog.close()
            self.log.close()
        finally:
            self.lock.release()
