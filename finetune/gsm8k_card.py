"""The evaluation card: everything that somebody needs to trust a score or to get it again, as card.json and card.md."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.accuracy import Accuracy
from finetune.answers import EXTRACTORS
from finetune.gsm8k_samples import SAMPLES
from finetune.gsm8k_scores import DISAGREEMENTS, Report
from pretrain.checkpoint.resume import versions
from pretrain.data.files import atomic_writer
from pretrain.redaction import redact

CARD_JSON, CARD_MARKDOWN = "card.json", "card.md"


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Problems answered one at a time: generated tokens, EOS included, without the prompt and without what follows EOS; seconds of wall clock."""

    items: int
    tokens: int
    evaluations: int
    seconds: float
    device: str

    @property
    def tokens_per_second(self) -> float:
        """The figure that the scaling study reports."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        per_item = self.evaluations / self.items
        return (
            f"{self.tokens_per_second:,.1f} generated tokens/s at batch 1 ({self.items} problems, {self.tokens:,} tokens with EOS, "
            f"{self.seconds:.1f} s, {per_item:.1f} network evaluations (NFE) each, {self.device})"
        )


def card(
    *, model: Mapping[str, Any], settings: Mapping[str, Any], hash: str, files: Mapping[str, str], format_origin: str, report: Report,
    throughput: Throughput | None, batch: int, device: str, problems_in_file: int,
) -> dict[str, Any]:  # fmt: skip
    """The tree of card.json."""
    return {
        "task": "gsm8k",
        "model": dict(model),
        "settings": dict(settings),
        "settings_hash": hash,
        "files": dict(files),
        "format_from": format_origin,
        "shots": settings["shots"],
        "scores": {name: _accuracy(report.accuracy[name]) for name in EXTRACTORS},
        "majority_baseline": {"answer": report.baseline.answer, "counted_in": report.baseline.source, **_accuracy(report.baseline.accuracy)},
        "counts": {
            "problems": report.problems, "problems_in_file": problems_in_file, "whole_file": report.problems == problems_in_file,
            "prompts_too_long": report.too_long,
            "without_eos": report.truncated, "eos_at_once": report.flooded, "with_masks_left": report.masked,
            "without_a_number": dict(report.unanswered), "extractors_disagree": report.disagreeing, "generated_tokens": report.tokens,
            "network_evaluations": report.evaluations, "seconds_in_batches": round(report.seconds, 3),
        },
        "throughput": None if throughput is None else {**asdict(throughput), "tokens_per_second": throughput.tokens_per_second},
        "batch": batch,
        "device": device,
        "versions": {"python": platform.python_version(), **versions()},
    }  # fmt: skip


def write_card(folder: Path, tree: Mapping[str, Any], report: Report, throughput: Throughput | None) -> None:
    """Both forms. UserError where the disk refuses."""
    with atomic_writer(folder / CARD_JSON) as stream:
        stream.write((redact(json.dumps(tree, indent=1, ensure_ascii=False)) + "\n").encode())
    with atomic_writer(folder / CARD_MARKDOWN) as stream:
        stream.write(redact(_markdown(tree, report, throughput)).encode())


def _markdown(tree: Mapping[str, Any], report: Report, throughput: Throughput | None) -> str:
    counts, baseline = tree["counts"], report.baseline
    of = "all problems" if counts["whole_file"] else f"the first {counts['problems']:,} of {counts['problems_in_file']:,} problems"
    asked = report.problems - report.too_long
    confidence = f"{100 * report.accuracy['strict'].confidence:g}% {report.accuracy['strict'].method} interval"
    scores: list[tuple[str, Accuracy]] = [(name, report.accuracy[name]) for name in EXTRACTORS]
    scores.append((f"always {baseline.answer} (most frequent answer of {baseline.source})", baseline.accuracy))
    rows = [(name, f"{100 * found.share:.1f}%", _interval(found), f"{found.correct} of {found.total}") for name, found in scores]
    ended = [
        ("no EOS (truncated)", report.truncated, asked), ("EOS at once", report.flooded, asked), ("masks left over", report.masked, asked),
        ("prompt does not fit the context; counted as wrong", report.too_long, report.problems),
        ("extractors disagree", report.disagreeing, report.problems),
        *((f"no number found by {name}", report.unanswered[name], report.problems) for name in EXTRACTORS),
    ]  # fmt: skip
    parts = [
        f"# GSM8K evaluation of {tree['model'].get('name', tree['model']['objective'])}",
        f"Scores on {of} of `{tree['files']['data']}`, {tree['shots']} shots, one output per problem.",
        _table(("answers by", "accuracy", confidence, "correct"), rows),
        _table(("outputs", "count", "share"), [(what, str(count), f"{100 * count / total:.1f}%" if total else "-") for what, count, total in ended]),
        f"Throughput: {throughput if throughput is not None else 'not measured'}.",
        f"The prompt follows {tree['format_from']}.",
        "## Model, settings, versions",
        _table(("key", "value"), [(key, f"`{value}`") for key, value in _flat({k: tree[k] for k in _LISTED})]),
        f"Outputs: `{SAMPLES}`; where extractors differ: `{DISAGREEMENTS}`; this card as JSON: `{CARD_JSON}`.",
    ]
    return "\n\n".join(parts) + "\n"


_LISTED = ("model", "settings", "settings_hash", "files", "batch", "device", "versions")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", "\\n") for cell in line) + " |" for line in lines)


def _accuracy(found: Accuracy) -> dict[str, Any]:
    return {"accuracy": found.share, **asdict(found)}


def _interval(found: Accuracy) -> str:
    return f"{100 * found.low:.1f}-{100 * found.high:.1f}%"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        leaves += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return leaves
