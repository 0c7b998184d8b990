"""What a run came to: `summary.py RUN_DIR VALIDATION_CORPUS` prints it, `summary.py --finished RUN_DIR` answers by its exit status."""

import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pretrain.command_line import run_command  # noqa: E402
from pretrain.data.corpus import Corpus  # noqa: E402
from pretrain.telemetry.log import LOG_NAME, read_log  # noqa: E402


def last(records: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """The newest record of a kind."""
    return next((record for record in reversed(records) if record["kind"] == kind), None)


def nats(value: float) -> str:
    """Nats per token, and the perplexity that they are."""
    return f"{value:.4f} nats per token (perplexity {math.exp(value):.2f})"


def summarise(run_dir: Path, corpus: Path) -> int:
    """Print the table and the samples; 1 where the run has not been validated yet."""
    records = list(read_log(run_dir / LOG_NAME))
    run, train, validation = (last(records, kind) for kind in ("run", "train", "validation"))
    if run is None or train is None or validation is None:
        print(f"{run_dir} holds no validated run yet; train it with launchers/pretrain.py", file=sys.stderr)
        return 1
    nelbo, label = validation["nelbo_nats_per_token"], validation["nelbo_label"]
    speeds = sorted(record["tokens_per_second"] for record in records if "tokens_per_second" in record)
    table = Table(show_header=False, title=f"Run {run['run_name']}", title_justify="left")
    parameters = f"{run['parameters']:,} parameters, " if "parameters" in run else ""
    table.add_row("trained", f"{run['config']['objective']['name']}, {parameters}{train['tokens']:,} tokens in {train['step']} steps")
    table.add_row(f"validation ({label})", f"{nats(nelbo)} ± {float(validation['ci95_nats_per_token']):.4f} (95%)")
    table.add_row("unigram entropy of that text", nats(Corpus(corpus).unigram_entropy()))
    table.add_row("speed (median)", f"{speeds[len(speeds) // 2]:,.0f} tokens/s")
    table.add_row("run, log", f"{run_dir}, {run_dir / LOG_NAME}")
    table.add_row("checkpoints", ", ".join(sorted(str(path.parent) for path in run_dir.glob("checkpoints/step_*/COMPLETE"))))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    samples = run_dir / "samples.jsonl"
    for number, line in enumerate(samples.read_text().splitlines() if samples.exists() else [], start=1):
        print(f"\n--- sample {number}\n{json.loads(line)['text']}")
    return 0


def finished(run_dir: Path) -> bool:
    """Whether the last step has been validated."""
    records = list(read_log(run_dir / LOG_NAME))
    run, validation = last(records, "run"), last(records, "validation")
    return run is not None and validation is not None and validation["step"] >= run["total_steps"]


def main() -> int:
    """`--finished RUN_DIR`, or `RUN_DIR VALIDATION_CORPUS`."""
    first, second = sys.argv[1:]
    return int(not finished(Path(second))) if first == "--finished" else summarise(Path(first), Path(second))


if __name__ == "__main__":
    sys.exit(run_command(main))
