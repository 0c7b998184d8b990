"""What a run came to, from its log: what was trained, its newest validation, the entropy to beat, its checkpoints and samples."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from pretrain.data.corpus import Corpus
from pretrain.errors import UserError
from pretrain.evaluation.likelihood import perplexity_of
from pretrain.telemetry.log import LOG_NAME, number, read_log

SAMPLES_NAME = "samples.jsonl"
SCORES = "gsm8k"
"""Where launchers/evaluate.py task=gsm8k leaves its cards, if it is told no other place."""


def finished(run_dir: Path) -> bool:
    """Whether the last step has been validated; False where there is no run. Raises UserError for a log that cannot be read."""
    log = run_dir / LOG_NAME
    records = list(read_log(log))
    run, validation = _last(records, "run"), _last(records, "validation")
    return run is not None and validation is not None and validation["step"] >= number(run, "total_steps", log)


def summary_table(run_dir: Path, corpus: Path | None) -> Table:
    """The figures, with the entropy of `corpus` to compare with, and the scores of answers where there are any. Raises UserError where nothing
    has been validated yet, and for a log, corpus or card that does not hold."""
    log = run_dir / LOG_NAME
    records = list(read_log(log))
    run, train, validation = (_last(records, kind) for kind in ("run", "train", "validation"))
    if run is None or train is None or validation is None:
        raise UserError(f"{run_dir} holds no validated run yet; give the directory of a run (runs/NAME), or train it with launchers/pretrain.py")
    table = Table(show_header=False, title=f"Run {run.get('run_name', run_dir.name)}", title_justify="left")
    parameters = f"{number(run, 'parameters', log):,.0f} parameters, " if "parameters" in run else ""
    table.add_row("trained", f"{_objective(run)}{parameters}{number(train, 'tokens', log):,.0f} tokens in {train['step']} steps")
    interval = number(validation, "ci95_nats_per_token", log)
    width = f" ± {interval:.4f} (95%)" if math.isfinite(interval) else ", no interval"
    label = validation.get("nelbo_label", "not_a_likelihood")
    table.add_row(f"validation ({label})", f"{_nats(number(validation, 'nelbo_nats_per_token', log))}{width}")
    if corpus is not None:
        table.add_row("unigram entropy of that text", _nats(Corpus(corpus).unigram_entropy()))
    for name, text in _scores(run_dir / SCORES):
        table.add_row(name, text)
    speeds = sorted(number(record, "tokens_per_second", log) for record in records if "tokens_per_second" in record)
    if speeds:
        table.add_row("speed (median)", f"{speeds[len(speeds) // 2]:,.0f} tokens/s")
    table.add_row("run, log", f"{run_dir}, {log}")
    table.add_row("checkpoints", ", ".join(sorted(str(path.parent) for path in run_dir.glob("checkpoints/step_*/COMPLETE"))))
    return table


def sample_texts(run_dir: Path) -> Iterator[str]:
    """The texts of the run's samples, if there are any. Raises UserError for a file of something else."""
    path = run_dir / SAMPLES_NAME
    if not path.exists():
        return
    try:
        with path.open(encoding="utf-8") as lines:  # not splitlines, to which some characters of the texts are line ends
            for place, line in enumerate(lines, start=1):
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                    raise ValueError(f"line {place} has no text")
                yield record["text"]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it, and sample again with launchers/sample.py checkpoint={run_dir}") from error


def _last(records: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((record for record in reversed(records) if record["kind"] == kind), None)


def _objective(run: dict[str, Any]) -> str:
    """The objective's name and a comma, where the run's configuration is in its log."""
    config = run.get("config")
    objective = config.get("objective") if isinstance(config, dict) else None
    return f"{objective['name']}, " if isinstance(objective, dict) and isinstance(objective.get("name"), str) else ""


def _nats(value: float) -> str:
    """Nats per token, and the perplexity that they are."""
    return f"{value:.4f} nats per token (perplexity {perplexity_of(value):.2f})" if math.isfinite(value) else f"{value} nats per token: diverged"


def _scores(folder: Path) -> Iterator[tuple[str, str]]:
    """Answers to word problems that were right, and what the most frequent answer would score, from every card below."""
    for card in sorted(folder.rglob("card.json")) if folder.is_dir() else ():
        try:
            tree = json.loads(card.read_text(encoding="utf-8"))
            found = [(f"{tree['settings']['sampler']}, after ####", tree["scores"]["strict"])]
            found.append((f"always {tree['majority_baseline']['answer']}", tree["majority_baseline"]))
            rows = [(name, *(one[key] for key in ("accuracy", "low", "high", "confidence", "correct", "total"))) for name, one in found]
            texts = [(name, f"{n} of {of} right: {p:.1%} ({sure:.0%} interval {low:.1%} to {high:.1%})") for name, p, low, high, sure, n, of in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            fix = "run launchers/evaluate.py task=gsm8k again with another output="
            raise UserError(f"{card} is no evaluation card ({error}); {fix}") from None
        yield from texts
