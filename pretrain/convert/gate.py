"""The export gate: nothing is published unless the model that `transformers` loads from the written folder is the one that was trained.

Compared with the training backbone (megatron-core on one process, filled from the checkpoint): fields of config.json, logits on random and
real sequences at three noise levels, the likelihood of the same noise by each side's own code, greedy samples, ids of the tokenizer.

Shape suffixes: B, N sequences, L positions, V model vocabulary.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.build import build_objective
from pretrain.checkpoint.logical import WeightSource
from pretrain.convert import gate_texts
from pretrain.convert.gate_hub import HubModel, load_hub
from pretrain.convert.gate_nelbo import bound_of, nats_of, network_inputs
from pretrain.convert.gate_reference import Reference, reference_backbone
from pretrain.convert.gate_reports import REPORT, GateReport
from pretrain.convert.held_out import load_objective
from pretrain.convert.hf_config import differences
from pretrain.convert.objective_parts import parts_of
from pretrain.convert.param_map import ParameterMap
from pretrain.convert.plain_network import TrainedModel
from pretrain.convert.stock import stock_differences
from pretrain.errors import UserError
from pretrain.hf_model.likelihood_draws import Text
from pretrain.hf_model.sampling_model import fill, starting_canvas
from pretrain.objectives.base import Objective
from pretrain.parallel.vocab import VocabShard

LOGITS, NELBO = 1e-4, 1e-4
"""Largest allowed relative differences."""
LEVELS = (0.1, 0.5, 0.9)
"""t of diffusion; for ar the share of each sequence that is read."""
_SAMPLED, _SAMPLED_LENGTH, _SAMPLED_STEPS = 4, 32, 8
_TEXTS = ("The quick brown fox\njumps over  two dogs.", "", " ", "1234567890", "naïve café")


def run_gate(
    folder: Path, trained: TrainedModel, objective: Objective, source: WeightSource, *, key: str, dtype: torch.dtype, text: str | None
) -> GateReport:
    """Compare, and write gate.json into `folder`. Raises UserError, with the first difference in words, if anything differs."""
    facts = {
        "compared": "the model as transformers loads it from this folder, with the megatron-core backbone filled from the checkpoint",
        "checkpoint": f"run {trained.run.name}, step {trained.step}",
        "weights": key,
        "dtype_of_files": str(dtype).removeprefix("torch."),
        "arithmetic": "float32",
        "real_text": Path(text).name if text else "the run's held-out text",
        "sequences": {"random": gate_texts.SEQUENCES, "real": gate_texts.SEQUENCES, "length": gate_texts.gate_length(trained)},
    }
    report = GateReport(facts)
    real_NL = gate_texts.real_sequences(trained, text)
    scored = build_objective(bound_of(trained.run.objective), trained.vocabulary)
    load_objective(scored, trained.folder)
    scored.modules().requires_grad_(False)
    facts["likelihood_label"] = scored.label(evaluation=True)
    hub = _loaded(folder, trained, objective, report)
    if hub is not None and not report.failures:
        with reference_backbone(trained, objective, source, key=key, dtype=dtype) as reference:
            _compare(_Sides(hub.to(reference.device), reference, scored, trained), real_NL, report)
            if any(check.name.startswith("logits") for check in report.failures):
                _name_the_tensor(hub, trained, source, report, key=key, dtype=dtype)
    report.write(folder)
    if report.failures:
        first = report.failures[-1] if report.failures[-1].name == "weights" else report.failures[0]
        count = f"{len(report.failures)} of {len(report.checks)} comparisons failed"
        raise UserError(f"nothing was published: {first.said}; {count}, see {folder / REPORT}")
    return report


def _loaded(folder: Path, trained: TrainedModel, objective: Objective, report: GateReport) -> HubModel | None:
    """What needs no network: config.json field by field, whether the folder loads, the objective's own values, the tokenizer."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stock = "auto_map" not in found
    wrong = (stock_differences if stock else differences)(found, trained.run, trained.vocabulary)
    if not report.add("fields of config.json", len(wrong), 0, "fields that differ", next(iter(wrong), "")):
        return None
    try:
        hub = load_hub(folder)
    except Exception as error:  # whatever a damaged file makes the library raise
        report.add("loading with transformers", 1, 0, "errors", f"transformers cannot load {folder} ({' '.join(str(error).split())[:300]})")
        return None
    report.add("loading with transformers", 0, 0, "errors")
    for name, wanted in ({} if stock else parts_of(objective)).items():
        same = torch.equal(hub.state()[name].cpu(), wanted)
        report.add(f"values of {name}", 0 if same else 1, 0, "tensors that differ", f"{name} is not what the objective has learned or fixed")
    _compare_tokenizer(folder, trained, report)
    return hub


def _compare_tokenizer(folder: Path, trained: TrainedModel, report: GateReport) -> None:
    from transformers import AutoTokenizer, PretrainedConfig

    # A tokenizer needs no code of the folder's. Its configuration does, and without it would be taken for one of another model, with a warning.
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, config=PretrainedConfig())
    ids_NL = gate_texts.random_sequences(trained)
    texts = [*_TEXTS, *trained.tokenizer.decode(ids_NL.tolist())]
    wrong = [words for words in texts if loaded(words, add_special_tokens=False, verbose=False)["input_ids"] != trained.tokenizer.encode([words])[0]]
    said = f"the exported tokenizer gives other ids for {wrong[0][:60]!r}" if wrong else ""
    report.add("ids of the tokenizer", len(wrong), 0, f"of {len(texts)} texts", said)


class _Sides:
    """Both models, and what scores them."""

    def __init__(self, hub: HubModel, reference: Reference, objective: Objective, trained: TrainedModel) -> None:
        self.hub, self.reference, self.objective, self.trained = hub, reference, objective, trained
        objective.modules().to(reference.device)
        self.vocab = VocabShard.whole(trained.vocabulary)

    def text(self, ids_NL: Tensor, t: float | None = None, prompt: int = 0) -> Text:
        """A batch, scored after the first `prompt` tokens of each sequence, which are given."""
        ids_NL = ids_NL.to(self.reference.device)
        scored_NL = torch.arange(ids_NL.shape[1], device=ids_NL.device).expand_as(ids_NL) >= prompt
        return Text(ids_BL=ids_NL, scored_BL=scored_NL, documents_BL=None, seed=1, t=t)


def _compare(sides: _Sides, real_NL: Tensor, report: GateReport) -> None:
    texts = [("random", gate_texts.random_sequences(sides.trained), 0), ("real", real_NL, 0)]
    if sides.trained.run.sft is not None:  # what it was fine-tuned to read
        texts.append(("prompted", real_NL, real_NL.shape[1] // 2))
    for kind, ids_NL, prompt in texts:
        for level in LEVELS:
            _compare_logits(sides, kind, ids_NL, level, report, prompt)
        _compare_nelbo(sides, kind, ids_NL, report, prompt)
    _compare_samples(sides, real_NL, report)


def _compare_logits(sides: _Sides, kind: str, ids_NL: Tensor, level: float, report: GateReport, prompt: int) -> None:
    autoregressive = sides.objective.name == "ar"
    read = ids_NL[:, : max(2, round(level * ids_NL.shape[1]))] if autoregressive else ids_NL
    what = f"the first {read.shape[1]} tokens" if autoregressive else f"t = {level}"
    worst = 0.0
    for inputs in network_inputs(sides.objective, sides.text(read, None if autoregressive else level, prompt), sides.vocab):
        ours_BLV, theirs_BLV = sides.reference.logits(inputs), sides.hub.logits(inputs)
        worst = max(worst, _difference(theirs_BLV, ours_BLV))
    said = f"logits on {kind} sequences at {what} differ by {worst:.1e} of the largest one, and {LOGITS:g} is allowed"
    report.add(f"logits, {kind}, {what}", worst, LOGITS, "of the largest logit", said)


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference over the largest absolute value; inf for other shapes and for what is not finite."""
    if found.shape != wanted.shape or not bool(found.isfinite().all()):
        return math.inf
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def _compare_nelbo(sides: _Sides, kind: str, ids_NL: Tensor, report: GateReport, prompt: int) -> None:
    text = sides.text(ids_NL, prompt=prompt)
    wanted = float(nats_of(sides.objective, text, sides.vocab, sides.reference.padded_logits).sum())
    found = sides.hub.nats(text.ids_BL, seed=text.seed, prompt=prompt)
    worst = abs(found - wanted) / max(abs(wanted), 1e-30) if math.isfinite(found) else math.inf
    label, count = sides.objective.label(evaluation=True), int(text.scored_BL.sum())
    said = f"the likelihood ({label}) of {kind} sequences is {found / count:.6f} nats/token in the export and {wanted / count:.6f} in training"
    report.add(f"likelihood ({label}), {kind}", worst, NELBO, f"of {wanted / count:.4f} nats/token", said)


def _compare_samples(sides: _Sides, real_NL: Tensor, report: GateReport) -> None:
    """The most likely tokens under the same seed: continuations of real text, and every other token of it."""
    vocabulary, length = sides.trained.vocabulary, min(_SAMPLED_LENGTH, real_NL.shape[1])
    canvas_BL = real_NL[:_SAMPLED, :length].clone().to(sides.reference.device)
    blank = int(starting_canvas(sides.reference, count=1, length=1, prompt=None)[0, 0])
    if sides.objective.name == "ar":
        canvas_BL[:, length // 2 :] = blank
    else:
        canvas_BL[:, ::2] = blank
    settings: dict[str, Any] = {"temperature": 0.0} | ({} if sides.objective.name == "ar" else {"steps": _SAMPLED_STEPS})
    if sides.objective.name == "replaid":
        settings["sampler"] = "ddim"
    wanted_BL = fill(sides.reference, canvas_BL, seed=1, settings=settings).sequences
    try:
        found_BL = sides.hub.sample(canvas_BL, settings)
        wrong = int((found_BL != wanted_BL).sum())
        outside = int((found_BL >= vocabulary.model_size).sum() + (found_BL == (-1 if vocabulary.mask_id is None else vocabulary.mask_id)).sum())
    except (RuntimeError, ValueError) as error:
        report.add("greedy samples", canvas_BL.numel(), 0, "tokens that differ", f"the exported model cannot sample ({error})")
        return
    said = f"{wrong} of {canvas_BL.numel()} tokens of greedy samples are not those that the training backbone gives with the same sampler and seed"
    report.add("greedy samples", wrong, 0, f"of {canvas_BL.numel()} tokens differ", said)
    report.add("samples outside the vocabulary", outside, 0, "tokens", f"{outside} sampled ids are padding of the vocabulary or masks")


def _name_the_tensor(hub: HubModel, trained: TrainedModel, source: WeightSource, report: GateReport, *, key: str, dtype: torch.dtype) -> None:
    """Which weights are not the checkpoint's, where logits differ."""
    mapping, state = ParameterMap(trained.run.backbone, trained.vocabulary.model_size), hub.state()
    wrong = [
        hub.name(plain)
        for name in source.table
        for plain, piece in mapping.split(name, source.tensor(name, key)).items()
        if hub.name(plain) not in state or not torch.equal(state[hub.name(plain)].cpu().float(), piece.to(dtype).float())
    ]
    if wrong:
        report.add("weights", len(wrong), 0, "tensors that differ", f"{report.failures[0].said}: {wrong[0]} is not the checkpoint's")
