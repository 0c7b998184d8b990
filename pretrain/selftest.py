"""launchers/pretrain.py selftest=true: whether a preset learns on this machine and in this layout, before a run is trusted to it.

Objective, network, engine and loader are built as training builds them, but for one global batch, of as few sequences as the layout allows.
Its noise is drawn once, and it is trained on again and again: even an objective whose loss is a noisy bound must then fall, to what memory
can reach. The text is the run's first batch, or random ids where it is not prepared yet. Nothing is written.

Findings, in this order: the loss before the first update and an evaluation then, against what uniform predictions give; a gradient for every
parameter; the fall of the loss; equal weights where several ranks hold them; an evaluation at the end.

Shape suffixes: B sequences, L positions, v this rank's share of the vocabulary, N parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.build import build_engine, build_objective, build_training_samples, compute_dtype
from pretrain.data.batch import BatchShard, MicroBatch
from pretrain.data.loader import Loader
from pretrain.data.manifest import FILE_NAME as MANIFEST
from pretrain.data.random_text import RandomText
from pretrain.data.samples import Corrupt, Samples
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine.inspection import GradientFindings, GradientWatch, replica_difference
from pretrain.engine.loss import slice_targets
from pretrain.errors import UserError
from pretrain.launch_config import FEWEST_SELFTEST_STEPS, SELFTEST_STEPS
from pretrain.objectives.base import Corrupted, Objective, Tensors
from pretrain.parallel import groups as parallel_groups
from pretrain.parallel import platform
from pretrain.parallel.groups import Groups
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.rules import resolve, run_vocabulary, validate
from pretrain.run_config import RunConfig
from pretrain.telemetry.progress import ProgressDisplay

SHARE = 0.3
"""Of the loss at the start, under which it must fall. Frequencies of ids alone leave 0.9 and more of it, so positions must be told apart."""
SEQUENCES = 8
"""Sequences of the batch, or the next number that the layout and the objective allow."""
EXACT, AROUND = 1e-4, 2.0
"""Relative error of a zero head's loss, which is known; factor for other heads, whose first logits are small."""


def learning_rate(hidden: int) -> float:
    """A constant rate for this width: Adam's best is about inversely proportional to it."""
    return min(0.25 / hidden, 4e-3)


def run(config: RunConfig, *, assumed_vocabulary: int | None, steps: int = SELFTEST_STEPS) -> bool:
    """Whether every check passed, having printed each. `assumed_vocabulary` is the model's, where the tokenizer is missing. Raises UserError."""
    groups = parallel_groups.initialize(config.parallel, seed=config.seed)
    try:
        return SelfTest(config, groups, assumed_vocabulary=assumed_vocabulary).run(steps)
    finally:
        parallel_groups.shutdown()


class SelfTest:
    """The checks of one run on this rank; every rank calls every method, and all come to the same findings."""

    def __init__(self, config: RunConfig, groups: Groups, *, assumed_vocabulary: int | None) -> None:
        self.config, self.groups, self.device = smallest_batch(config, groups.world_size), groups, platform.device()
        tokenizer = Tokenizer(config.tokenizer) if Path(config.tokenizer).exists() else None
        vocabulary = run_vocabulary(config, tokenizer) if tokenizer else assumed(config, assumed_vocabulary)
        resolve(config, world_size=groups.world_size, model_size=vocabulary.model_size)
        self.objective = build_objective(config.objective, vocabulary)
        self.samples, self.text = text_source(self.config, self.objective, tokenizer)
        self.engine = build_engine(self.config, self.objective, groups, self.device)
        self.findings: list[bool] = []

    def run(self, steps: int) -> bool:
        """All checks; True if they passed."""
        self.display = ProgressDisplay(steps, 0) if self.groups.is_main else None
        try:
            self._say(self._describe(steps))
            shard = self._batch(partial(self.objective.corrupt, evaluation=False))
            nats, uniform = self._evaluate()
            self._find(self._plausible(nats, uniform), "evaluation at the start", f"{nats:.4f} nats/token, {self._against(uniform)}")
            self._check_training(shard, steps)
            self._check_replicas()
            nats, _ = self._evaluate()
            label = self.objective.label(evaluation=True)
            self._find(math.isfinite(nats), "evaluation at the end", f"{nats:.4f} nats/token ({label}), with other noise on the same text")
            failed, count = self.findings.count(False), len(self.findings)
            self._say(f"self-test FAILED: {failed} of {count} checks" if failed else f"self-test passed: all {count} checks")
            return not failed
        finally:
            if self.display:
                self.display.close()

    # ---- checks -------------------------------------------------------------------------------------------------------------------

    def _check_training(self, shard: BatchShard, steps: int) -> None:
        """Steps on one batch: the loss at the start, gradients, and the fall of the loss."""
        uniform, form = self._uniform_loss(self.engine.prepared(shard, evaluation=False))
        watch = GradientWatch(self.engine.module, self.objective.modules(), self.groups, self.device)
        lr, losses, norms = learning_rate(self.config.backbone.hidden), [], []
        for step in range(1, steps + 1):
            result = self.engine.train_step(shard, lr)
            losses.append(result.loss)
            norms.append(result.gradient_norm)
            self._show(step, steps, result.loss, result.gradient_norm)
            if step == 1:
                self._find(self._plausible(losses[0], uniform), "loss at the start", f"{losses[0]:.4f} nats/token, {self._against(uniform, form)}")
            if step == FEWEST_SELFTEST_STEPS:
                watch.close()
                self._check_gradients(watch.findings())
            finite = math.isfinite(result.loss) and 0 <= result.gradient_norm < math.inf  # DeepSpeed answers -1 for a norm that is not finite
            if not finite or (step >= FEWEST_SELFTEST_STEPS and max(losses[-2:]) < SHARE * losses[0]):
                break
        self._find(finite, "numbers", f"losses and gradient norms of {len(losses)} steps, the largest norm {max(norms):.3g}; all must be finite")
        figure = f"{losses[-1]:.4f} nats/token after {len(losses)} steps, {losses[-1] / losses[0]:.1%} of the first"
        too_few = f"; fewer than {SELFTEST_STEPS} steps may not be enough" if steps < SELFTEST_STEPS else ""
        self._find(max(losses[-2:]) < SHARE * losses[0], "fall of the loss", f"{figure} (must be under {SHARE:.0%} within {steps} steps{too_few})")

    def _check_gradients(self, found: GradientFindings) -> None:
        problems = [f"{what} in {', '.join(names[:3])}{' …' if len(names) > 3 else ''}" for what, names in
                    (("NOT FINITE", found.not_finite), ("ZERO", found.zero)) if names]  # fmt: skip
        good = len(found.names) - len({*found.not_finite, *found.zero})
        figure = f"{good} of {len(found.names)} parameters have finite, non-zero ones within {FEWEST_SELFTEST_STEPS} steps"
        self._find(not problems, "gradients", "; ".join([figure, *problems]))

    def _check_replicas(self) -> None:
        compared, difference = replica_difference(self.engine.module, self.objective.modules(), self.groups)
        held = f"{compared} parameters of this rank are on other ranks too; the largest difference is {difference:g} (must be 0)"
        self._find(difference == 0, "replicas", held if compared else "no parameter is held twice in this layout")

    def _plausible(self, value: float, uniform: float) -> bool:
        if self._zero_head:
            return abs(value - uniform) <= EXACT * abs(uniform)
        return math.isfinite(value) and uniform / AROUND < value < uniform * AROUND

    def _against(self, uniform: float, form: str = "") -> str:
        rule = "must be equal" if self._zero_head else f"must be within a factor of {AROUND:g}, as this head does not start at zero"
        return f"uniform predictions give {uniform:.4f}{form} ({rule})"

    @property
    def _zero_head(self) -> bool:
        return self.engine.module.table["head.weight"].init == "zeros"

    # ---- figures ------------------------------------------------------------------------------------------------------------------

    def _evaluate(self) -> tuple[float, float]:
        """Nats per token of the batch's text in every part of the objective's evaluation: of the network, and of uniform predictions."""
        nats = tokens = uniform = 0.0
        size, parts = self.config.batch.global_sequences, self.objective.evaluation_parts
        for part in range(parts):

            def corrupt(tokens_L: np.ndarray, documents_L: np.ndarray, noise: Noise, part: int = part) -> Corrupted:
                own = Noise(noise.seed, noise.index, noise.index % size, size, part=part, share=1 / parts)
                return self.objective.corrupt(tokens_L, documents_L, own, evaluation=True)

            shard = self._batch(corrupt)
            nats_N, count_N = self.engine.evaluate(shard)
            nats, tokens = nats + float(nats_N.sum()), tokens + float(count_N.sum())
            uniform += self._at_zero_logits(self.engine.prepared(shard, evaluation=True), self._nelbo)
        return nats / tokens, uniform / tokens

    def _uniform_loss(self, batches: tuple[MicroBatch, ...]) -> tuple[float, str]:
        """Nats per token of uniform predictions on a training batch, in closed form where there is one, and that form's name."""
        tokens = self._over_replicas(sum(float(batch.count_B.sum()) for batch in batches))
        known = CLOSED_FORMS.get(self.objective.name)
        if known is None:
            return self._at_zero_logits(batches, self._loss) / tokens, ""
        form, name = known
        return self._over_replicas(sum(float(form(b.targets, self.objective.vocabulary)) for b in batches)) / tokens, f", {name}"

    @torch.no_grad()
    def _at_zero_logits(self, batches: Iterable[MicroBatch], term: Callable[[Tensor, Tensors], Tensor]) -> float:
        """The objective's own sum over the global batch for logits of zero, without a network."""
        total, chunk = 0.0, self.config.precision.loss_chunk
        for batch in batches:
            length = batch.targets["ids"].shape[1]  # Eso-LM's noisy stream may be shorter than the sequence
            for start in range(0, length, chunk):
                stop = min(start + chunk, length)
                logits = torch.zeros(len(batch.count_B), stop - start, self.engine.vocab.end - self.engine.vocab.start, device=self.device)
                total += float(term(logits, slice_targets(batch.targets, start, stop)).double().sum())
        return self._over_replicas(total)

    def _loss(self, logits_BLv: Tensor, targets: Tensors) -> Tensor:
        return self.objective.token_loss(logits_BLv, targets, self.engine.vocab).loss_B

    def _nelbo(self, logits_BLv: Tensor, targets: Tensors) -> Tensor:
        return self.objective.token_nelbo(logits_BLv, targets, self.engine.vocab)

    def _over_replicas(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.groups.data.group)
        return float(total)

    def _batch(self, corrupt: Corrupt) -> BatchShard:
        """The first global batch, noised by `corrupt`."""
        config, data = self.config, self.groups.data
        samples = self.samples(corrupt)
        with Loader(samples, config.data, config.batch, dp_rank=data.rank, dp_size=data.size, steps=iter([0]), device=self.device) as loader:
            return next(loader)

    # ---- words --------------------------------------------------------------------------------------------------------------------

    def _describe(self, steps: int) -> str:
        batch, parallel = self.config.batch, self.config.parallel
        dtype = str(compute_dtype(self.config)).removeprefix("torch.")
        layout = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {self.groups.data.size}, ZeRO {parallel.zero_stage}, {dtype}"
        rate = learning_rate(self.config.backbone.hidden)
        return (
            f"self-test of {self.config.name}: {self.objective.name}, {layout} on {self.device.type}; {batch.global_sequences} sequences of "
            f"{batch.length} tokens, {self.text}; up to {steps} steps at a constant rate of {rate:.2g}, the noise drawn once"
        )

    def _find(self, passed: bool, name: str, figure: str) -> None:
        self.findings.append(passed)
        self._say(f"{'pass' if passed else 'FAIL'}  {name}: {figure}")

    def _say(self, sentence: str) -> None:
        if self.display:
            self.display.note(sentence)

    def _show(self, step: int, steps: int, loss: float, norm: float) -> None:
        if self.display:
            self.display.advance(step)
            if step % max(steps // 5, 1) == 0:
                self.display.show(step, {"loss_nats_per_token": loss, "gradient_norm": norm})


# ---- the batch --------------------------------------------------------------------------------------------------------------------


def smallest_batch(config: RunConfig, world_size: int) -> RunConfig:
    """The same run with the fewest sequences per step, `SEQUENCES` or more, that its rules allow."""
    together = config.batch.micro_sequences * world_size // config.parallel.model_ranks
    for sequences in range(together, config.batch.global_sequences, together):
        smaller = replace(config, batch=replace(config.batch, global_sequences=sequences))
        if sequences >= SEQUENCES and _legal(smaller, world_size):
            return smaller
    return config


def _legal(config: RunConfig, world_size: int) -> bool:
    try:
        validate(config, world_size=world_size)
    except UserError:
        return False
    return True


def assumed(config: RunConfig, model_size: int | None) -> Vocabulary:
    """A vocabulary of this many classes, while there is no tokenizer."""
    if model_size is None:
        raise UserError(f"tokenizer={config.tokenizer} does not exist; to test without it, give the model's vocabulary: plan.vocabulary=32001")
    objective = config.objective
    own = objective.has_mask and objective.mask_id is None  # the mask then comes after the tokenizer's ids
    mask = None if not objective.has_mask else model_size - 1 if objective.mask_id is None else objective.mask_id
    padded = Vocabulary.padded(model_size, config.backbone.vocab_multiple)
    return Vocabulary(tokenizer_size=model_size - own, model_size=model_size, padded_size=padded, mask_id=mask, eos_id=int(mask == 0))


def text_source(config: RunConfig, objective: Objective, tokenizer: Tokenizer | None) -> tuple[Callable[[Corrupt], Samples], str]:
    """What makes the samples of a batch for a way of noising, and which text they are. Raises UserError for a corpus that is there but unfit."""
    missing = [f"data.train.{name}.path={source.path}" for name, source in config.data.train.items() if not (Path(source.path) / MANIFEST).exists()]
    if tokenizer is not None and not missing:
        return lambda corrupt: build_training_samples(config, objective, tokenizer, corrupt), "the first of the run's own text"
    what = f"tokenizer={config.tokenizer} does not exist" if tokenizer is None else f"{missing[0]} holds no prepared corpus"
    words = f"random ids of a vocabulary of {objective.vocabulary.model_size}, since {what}"

    def random(corrupt: Corrupt) -> Samples:
        return RandomText(
            config.batch, objective.vocabulary, corrupt=corrupt, lookahead=objective.lookahead, seed=config.seed, parts=objective.parts
        )

    return random, words


# ---- known losses -----------------------------------------------------------------------------------------------------------------


def _scored(targets: Tensors, vocabulary: Vocabulary) -> Tensor:
    return targets["scored"].sum() * math.log(vocabulary.model_size)


def _masked(targets: Tensors, vocabulary: Vocabulary) -> Tensor:
    return (targets["masked"].sum(1) * targets["loss_weight"]).sum() * math.log(vocabulary.model_size - 1)


CLOSED_FORMS: dict[str, tuple[Callable[[Tensors, Vocabulary], Tensor], str]] = {
    "ar": (_scored, "log V"),
    "mdlm": (_masked, "weight x log(V - 1) at masked positions"),
    "esolm": (_masked, "weight x log(V - 1) at masked positions"),
}
"""Objective -> the training loss of uniform predictions, summed over a micro-batch, and how it is called. V counts the mask, which is never
predicted. The others' depend on the draw in less simple ways, and are taken from the objective itself, without network, layout and engine."""
