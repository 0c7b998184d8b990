"""Which documents an optimizer step saw: `launchers/prepare_data.py audit step=K run=runs/NAME`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.audit.config import StepAuditConfig
from pretrain.audit.run import AuditedRun

TABLE_WIDTH = 160
"""Columns where the terminal does not say how many it has."""


def audit_step(config: StepAuditConfig) -> None:
    """Prints them. Raises UserError where the run or its corpora are not what they were."""
    run = AuditedRun(Path(config.run), config.step)
    run.say_if_planned()
    rows = documents(run, config.words)
    if config.format == "json":
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
        return
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    console = console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=TABLE_WIDTH)
    tokens = run.config.batch.length * run.config.batch.global_sequences
    shares = ", ".join(f"{name} {count}" for name, count in sorted(Counter(row["source"] for row in rows).items()))
    console.print(f"Step {run.step:,} of {run.folder}: tokens {run.index * tokens:,} to {run.step * tokens:,}, by {run.source / 'config.yaml'}")
    console.print(f"Drawn from {run.phase.describe()}; samples by source: {shares}")
    console.print(_table(rows))
    console.print(f"fingerprint {run.samples.fingerprint(run.index)} of the step's windows and tokens")


def documents(run: AuditedRun, words: int) -> list[dict[str, Any]]:
    """A row per sample of the global batch, in its order; documents are numbered within their shard."""
    first = run.samples.numbers(run.index).start
    rows: list[dict[str, Any]] = []
    for position, (address, shards) in enumerate(run.samples.documents(run.index)):
        tokens, _ = run.samples.text(address)
        rows.append({
            "position": position,
            "sample": first + position,
            "source": address.source,
            "epoch": address.epoch + 1,
            "window": address.window,
            "first_token": address.window * run.config.batch.length,
            "documents": [{"shard": shard, "first": low, "last": high} for shard, low, high in shards],
            "text": " ".join(run.tokenizer.decode([tokens[: 2 * words].tolist()])[0].split())[:words] if words else "",
        })  # fmt: skip
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("position", "sample"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("source", "epoch", "window", "shard", "documents", "begins"):
        table.add_column(name, justify="right" if name in ("epoch", "window") else "left", overflow="fold")
    for row in rows:
        shards = "\n".join(part["shard"] for part in row["documents"])
        numbers = "\n".join(f"{part['first']:,}" if part["first"] == part["last"] else f"{part['first']:,} to {part['last']:,}"
                            for part in row["documents"])  # fmt: skip
        cells = (str(row["position"]), f"{row['sample']:,}", row["source"], str(row["epoch"]), f"{row['window']:,}", shards, numbers, row["text"])
        table.add_row(*cells)
    return table
