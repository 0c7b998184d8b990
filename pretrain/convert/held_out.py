"""A trained checkpoint on the held-out text of its run, through the plain network: one process, any objective.

Shape suffixes: B sequences, L positions, V model vocabulary, P padded vocabulary, E width of RePlaid's embeddings.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.build import build_objective
from pretrain.convert.plain_network import TrainedModel
from pretrain.data.arrays import stack, to_micro_batch
from pretrain.data.batch import MicroBatch
from pretrain.data.corpus import open_corpora
from pretrain.data.samples import NumberedSample, ValidationSamples
from pretrain.engine.loss import evaluation_nats
from pretrain.engine.safe_files import read_safely
from pretrain.engine.zero import OBJECTIVE_FILE
from pretrain.errors import UserError, counted
from pretrain.evaluation.config import EvaluationConfig
from pretrain.evaluation.likelihood import LikelihoodResult, estimate_likelihood
from pretrain.evaluation.ode_likelihood import OdeSettings, ode_likelihood
from pretrain.hf_model.network_input import NetworkInput
from pretrain.objectives.base import Objective
from pretrain.objectives.replaid import RePlaid
from pretrain.parallel.vocab import VocabShard

CHUNK = 128
"""Positions whose logits are upcast at once."""
Progress = Callable[[int], None]


class HeldOut:
    """The model, its objective with what that learned, and the held-out text. Raises UserError where the run has no such text."""

    def __init__(self, trained: TrainedModel, config: EvaluationConfig, device: torch.device) -> None:
        self.config, self.device, self.batch = config, device, trained.run.batch
        self.network = trained.network(device=device, dtype=torch.float32)
        self.objective = build_objective(trained.run.objective, trained.vocabulary)
        load_objective(self.objective, trained.folder)
        self.objective.modules().to(device).requires_grad_(False)
        self.vocab = VocabShard.whole(trained.vocabulary)
        if trained.run.sft is not None:
            raise UserError(
                f"{trained.run_directory} is a fine-tuning run: its log has the likelihood of held-out answers where sft.validation is set; to score "
                "answers, use task=gsm8k data=FILE"
            )
        if not trained.run.data.validation:
            raise UserError(f"{trained.run_directory} names no held-out text, so there is nothing to score; train with a data.validation source")
        self.samples = ValidationSamples(
            trained.run.data, open_corpora(trained.run.data.validation, trained.tokenizer), trained.run.batch,
            corrupt=partial(self.objective.corrupt, evaluation=True), lookahead=self.objective.lookahead,
            draws=config.draws * self.objective.importance, seed=config.seed, parts=self.objective.evaluation_parts,
        )  # fmt: skip

    def describe(self) -> str:
        """What is about to be scored."""
        numbers = self.numbers()
        sequences = len(np.unique(self.samples.sequences(len(self.samples))[numbers]))
        parameters = sum(parameter.numel() for parameter in self.network.parameters()) / 1e6
        text = f"{counted(sequences, 'sequence')} of {self.batch.length} tokens, each {counted(len(numbers) / max(sequences, 1), 'time')}"
        return f"{self.objective.name} with {parameters:,.4g}M parameters on {self.device}: {text}"

    def numbers(self) -> np.ndarray:
        """Samples of the sequences that are asked for; of one part each, part after part."""
        window_N = self.samples.sequences(len(self.samples))
        wanted_N = (window_N >= 0) & (window_N < (self.config.sequences or len(self.samples)))
        return np.flatnonzero(wanted_N)

    @torch.no_grad()
    def nelbo(self, progress: Progress) -> LikelihoodResult:
        """What training validates with, by the other backbone."""
        numbers, nats, counts = self.numbers(), [], []
        sequences = self.samples.sequences(len(self.samples))
        for rows in self._batches(numbers):
            batch = self._prepared(rows)
            logits_LBP = self._logits(self.objective.network_input(batch.inputs, self.vocab)).transpose(0, 1)
            nats.append(evaluation_nats(self.objective, logits_LBP, batch.targets, self.vocab, chunk=CHUNK).cpu().numpy())
            counts.append(batch.count_B.cpu().numpy())
            progress(int(batch.count_B.sum()))
        objective = self.objective
        return estimate_likelihood(
            sequences[numbers], np.concatenate(nats), np.concatenate(counts), label=objective.label(evaluation=True), importance=objective.importance
        )

    def ode(self, progress: Progress) -> LikelihoodResult:
        """RePlaid's likelihood through the probability-flow ODE; sequences that padding fills up are left out."""
        if not isinstance(self.objective, RePlaid):
            raise UserError(f"likelihood=ode is RePlaid's, and this run trained {self.objective.name}; use likelihood=nelbo")
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        schedule, config = self.objective.schedule, self.config
        settings = OdeSettings(steps=config.ode_steps, self_conditioning=self.objective.config.self_conditioning > 0)
        windows = self.samples.sequences(len(self.samples))
        first = [int(np.flatnonzero(windows == window)[0]) for window in np.unique(windows[self.numbers()])]
        whole = [sample for sample in map(self.samples.sample, first) if sample.corrupted.count == self.batch.length]
        if not whole:
            raise UserError("no sequence of the held-out text is whole, and the ODE scores whole ones only; ask for more sequences=")
        nats = []
        for start in range(0, len(whole), config.batch):
            rows = whole[start : start + config.batch]
            reader = _LatentReader(self.objective, self._logits, self._stack(rows), self.vocab)
            found = ode_likelihood(
                reader.denoise, reader.decode, reader.clean_BLE, gamma_0=float(schedule.gamma_0), gamma_1=float(schedule.gamma_1),
                samples=config.ode_samples, generator=generator, settings=settings,
            )  # fmt: skip
            nats.append(found.nats_B.cpu().numpy())
            progress(len(rows) * self.batch.length)
        return estimate_likelihood(np.arange(len(whole)), np.concatenate(nats), np.full(len(whole), self.batch.length), label="estimate")

    def _batches(self, numbers: np.ndarray) -> list[list[NumberedSample]]:
        """Of at most `batch` samples, none of which mixes parts."""
        per_part = len(self.samples) // self.objective.evaluation_parts
        found = []
        for part in np.unique(numbers // per_part):
            own = numbers[numbers // per_part == part]
            found += [[self.samples.sample(int(n)) for n in own[i : i + self.config.batch]] for i in range(0, len(own), self.config.batch)]
        return found

    def _stack(self, rows: list[NumberedSample]) -> MicroBatch:
        return to_micro_batch(stack(rows), pin=False).to(self.device)

    def _prepared(self, rows: list[NumberedSample]) -> MicroBatch:
        """With what the objective adds, and the estimates of a preliminary pass."""
        batch = self._stack(rows)
        inputs, targets = self.objective.prepare(batch.inputs, batch.targets, evaluation=True)
        if self.objective.preliminary_rows(inputs, evaluation=True) is not None:  # in evaluation, all of them
            logits_BLP = self._logits(self.objective.network_input(inputs, self.vocab))
            inputs = inputs | {"estimate": self.objective.preliminary_result(logits_BLP, targets, self.vocab)}
        return MicroBatch(inputs, targets, batch.count_B, batch.t_B, batch.sample_ids)

    def _logits(self, inputs: NetworkInput) -> Tensor:
        """[B, L, P]; the plain network has no padding rows, and what stands there is never read."""
        logits_BLV = self.network(inputs)
        return F.pad(logits_BLV, (0, self.vocab.end - logits_BLV.shape[-1]))


class _LatentReader:
    """RePlaid's denoiser as a function of latents, for one batch of texts."""

    def __init__(self, objective: RePlaid, logits: Callable[[NetworkInput], Tensor], batch: MicroBatch, vocab: VocabShard) -> None:
        self.objective, self.logits, self.batch, self.vocab = objective, logits, batch, vocab
        self.table_PE = objective.embedding(vocab.start, vocab.end)
        self.clean_BLE = vocab.lookup(self.table_PE, batch.targets["ids"])

    def denoise(self, z_BLE: Tensor, gamma_B: Tensor, estimate_BLE: Tensor | None) -> Tensor:
        """e_theta."""
        return self._read(z_BLE, gamma_B, estimate_BLE)[1]

    def decode(self, z_BLE: Tensor, gamma_B: Tensor, estimate_BLE: Tensor | None) -> Tensor:
        """log p(x | z_0) of each sequence."""
        return -self._read(z_BLE, gamma_B, estimate_BLE)[0].double().sum(-1)

    def _read(self, z_BLE: Tensor, gamma_B: Tensor, estimate_BLE: Tensor | None) -> tuple[Tensor, Tensor]:
        logits_BLP = self.logits(self.objective.reading(z_BLE, gamma_B, estimate_BLE, self.batch.inputs))
        evidence_BLE = self.objective.evidence(z_BLE, gamma_B)
        learns_B = torch.zeros_like(gamma_B, dtype=torch.bool)
        return self.vocab.cross_entropy_and_mean(logits_BLP, evidence_BLE, self.table_PE, self.batch.targets["ids"], learns_B)


def load_objective(objective: Objective, checkpoint: Path) -> None:
    """Give an objective what it had learned itself. Raises UserError when the file is missing or of another objective."""
    if not list(objective.modules().parameters()):
        return
    path = checkpoint / OBJECTIVE_FILE
    try:
        objective.modules().load_state_dict(read_safely(path)["modules"])
    except (KeyError, TypeError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{path}, what the objective itself learned, cannot be used ({why}); use another checkpoint") from error
