"""What each objective learns from the same text, tokens and seed: the tiny presets on the plays, as a Markdown table.

    python tests/benchmarks/learning.py                                                   six presets, 400 steps each
    python tests/benchmarks/learning.py --steps 40 --presets mdlm_tiny duo_tiny --root runs/learning
    python tests/benchmarks/learning.py --report                                          trains nothing more
    python tests/benchmarks/learning.py --set precision=fp32 optimizer.beta2=0.98         the same change for all

Each preset is a run of launchers/pretrain.py in ROOT/PRESET_STEPS, validated at its end. Stopped, the same command goes on where it was; a
run that has finished is only read. What the launchers print goes to standard error, the table to standard output.
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY)

from pretrain.data.corpus import Corpus  # noqa: E402
from pretrain.data.manifest import FILE_NAME as MANIFEST  # noqa: E402
from pretrain.telemetry.log import LOG_NAME, read_log  # noqa: E402

PRESETS = ("ar_tiny", "mdlm_tiny", "duo_tiny", "esolm_tiny", "replaid_tiny", "mdm_prime_tiny")
PLAYS = Path("cache/plays")
HEADER = ("preset", "objective", "label", "nats/token (95% interval)", "perplexity", "unigram entropy", "tokens", "seconds")


def launch(launcher: str, *words: str) -> int:
    """The exit code of a launcher, run in the repository."""
    return subprocess.run([sys.executable, f"launchers/{launcher}", *words], cwd=REPOSITORY, stdout=sys.stderr, check=False).returncode


def prepare_plays() -> bool:
    """The quickstart's text and tokenizer, where they are not there yet."""
    if (REPOSITORY / PLAYS / "validation" / MANIFEST).exists():
        return True
    text, tokenizer = f"{PLAYS}/text", f"{PLAYS}/tokenizer.model"
    commands = [
        ("plays", f"output={text}"),
        ("train_tokenizer", f"input={text}/train.jsonl", f"output={tokenizer}", "vocab_size=256", "byte_fallback=false"),
        *(("tokenize", f"input={text}/{part}.jsonl", f"tokenizer={tokenizer}", f"output={PLAYS}/{part}") for part in ("train", "validation")),
    ]
    return all(launch("prepare_data.py", *words) == 0 for words in commands)


def train(preset: str, directory: Path, options: argparse.Namespace) -> int:
    """Trains, or goes on with, one run to its end: the recipe of the tiny presets at another length."""
    draws = 1 if preset.startswith("ar_") else options.draws
    return launch(
        "pretrain.py", f"+model={preset}", f"name={directory.name}", f"root={directory.parent}", f"seed={options.seed}",
        f"duration.steps={options.steps}", f"schedule.warmup_steps={max(options.steps // 10, 1)}", "validation.every=0",
        f"validation.draws={draws}", f"checkpoint.every={max(options.steps // 4, 1)}", "checkpoint.keep=1", "telemetry.wandb=off", *options.set,
    )  # fmt: skip


def finished(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The validation of the run's last step, once there is one."""
    total = next((record["total_steps"] for record in records if record["kind"] == "run"), math.inf)
    return next((record for record in records if record["kind"] == "validation" and record["step"] >= total), None)


def training_seconds(records: list[dict[str, Any]]) -> float:
    """Time spent on steps over all starts, without start-up, validation and checkpoints."""
    seconds, before = 0.0, 0
    for record in records:
        if record["kind"] == "train":
            seconds += (record["tokens"] - before) / record["tokens_per_second"]
            before = record["tokens"]
    return seconds


def row(preset: str, records: list[dict[str, Any]], unigram: float) -> tuple[str, ...]:
    """One line of the table; dashes where the run is not finished."""
    validation = finished(records)
    if validation is None:
        steps = [record["step"] for record in records if record["kind"] == "train"]
        return (preset, f"not finished (step {max(steps, default=0)})", *["-"] * (len(HEADER) - 2))
    run = next(record for record in records if record["kind"] == "run")
    nats, half = float(validation["nelbo_nats_per_token"]), float(validation["ci95_nats_per_token"])
    perplexity = f"{validation['perplexity']:.2f}" if "perplexity" in validation else "-"  # what is no likelihood has none
    interval = f"{nats:.4f} ± {half:.4f} ({nats - half:.4f} to {nats + half:.4f})"
    objective, label = run["config"]["objective"]["name"], validation["nelbo_label"]
    return (preset, objective, label, interval, perplexity, f"{unigram:.4f}", f"{validation['tokens']:,}", f"{training_seconds(records):.0f}")


def markdown(rows: list[tuple[str, ...]]) -> str:
    """The table, its columns lined up."""
    cells = [HEADER, *rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def main() -> int:
    """0 if every run is finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--presets", nargs="+", default=PRESETS, help=f"default: {' '.join(PRESETS)}")
    parser.add_argument("--root", type=Path, default=REPOSITORY / "runs" / "learning", help="default: runs/learning")
    parser.add_argument("--draws", type=int, default=1, help="noise draws per validation sequence (not for ar)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    if not prepare_plays():
        return 1
    unigram, rows = Corpus(REPOSITORY / PLAYS / "validation").unigram_entropy(), []
    for number, preset in enumerate(options.presets, start=1):
        directory = options.root.resolve() / f"{preset}_{options.steps}"
        log = directory / LOG_NAME
        if not options.report and finished(list(read_log(log))) is None:
            print(f"== {preset} ({number} of {len(options.presets)})", file=sys.stderr, flush=True)
            if train(preset, directory, options) != 0:
                print(f"== {preset} did not reach its end; the others go on", file=sys.stderr, flush=True)
        rows.append(row(preset, list(read_log(log)), unigram))
    print(markdown(rows))
    return int(any("not finished" in line[1] for line in rows))


if __name__ == "__main__":
    sys.exit(main())
