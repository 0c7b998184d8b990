"""The whole path for every method, by the commands that users type: pretraining, fine-tuning on word problems, and the score, as a Markdown table.

    python tests/benchmarks/gsm_symbolic.py                                        six tiny presets
    python tests/benchmarks/gsm_symbolic.py --presets ar_tiny mdlm_tiny --root runs/gsm
    python tests/benchmarks/gsm_symbolic.py --report                               runs nothing more

Each preset is pretrained on Shakespeare's plays and GSM-symbolic problems as text, half of each, asked the held-out problems without further
training (zero-shot), fine-tuned on other instances of the same templates, and asked again. Templates: of those with the fewest reasoning
steps (two), TEMPLATES, whose numbers are the smallest. Answers are decoded from left to right at temperature 0, RePlaid's
by 64 steps of its own sampler at score temperature 0.5, and read after `####`.
Stopped, the same command goes on where it was. What the launchers print goes to standard error, the table to standard output.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY)

from pretrain.telemetry.log import LOG_NAME, read_log  # noqa: E402

TEMPLATES = (26, 43)
PROBLEMS, HELD_OUT, TEXTS, VOCABULARY, CONTEXT = 4000, 200, 2000, 1024, 96
HEADER = (
    "preset", "zero-shot (95% interval)", "majority answer", "fine-tuned (95% interval)", "lowest above both", "held-out nats/token", "pretraining s",
    "fine-tuning s",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Epochs of fine-tuning, its peak rate, and further words for the launchers of one preset: for both trainings, for the second, for the score."""

    epochs: int
    peak: float
    words: tuple[str, ...] = ()
    tuning: tuple[str, ...] = ()
    asking: tuple[str, ...] = ("sampler=left_to_right", "temperature=0")


RECIPES = {
    "ar_tiny": Recipe(8, 2e-3),
    "mdlm_tiny": Recipe(40, 2e-3),
    "duo_tiny": Recipe(40, 2e-3),
    "esolm_tiny": Recipe(40, 2e-3, tuning=("objective.esolm.clean_order=natural",)),
    "replaid_tiny": Recipe(40, 2e-3, asking=("sampler=ddpm", "steps=64", "score_temperature=0.5")),
    "mdm_prime_tiny": Recipe(40, 2e-3, words=("objective.mdm_prime.digits=10",)),
}


def launch(launcher: str, *words: str) -> None:
    """A launcher, run in the repository. Leaves where it fails."""
    code = subprocess.run([sys.executable, f"launchers/{launcher}", *words], cwd=REPOSITORY, stdout=sys.stderr, check=False).returncode
    if code:
        sys.exit(f"launchers/{launcher} {' '.join(words)} ended with exit code {code}")


def prepare(root: Path) -> None:
    """Text, problems, one tokenizer for both, token files; every step that is done is skipped by the launcher itself."""
    plays, gsm = root / "plays", root / "gsm"
    launch("prepare_data.py", "plays", f"output={plays}")
    templates = f"templates=[{','.join(map(str, TEMPLATES))}]"
    launch("prepare_data.py", "gsm_symbolic", f"output={gsm}", f"count={PROBLEMS}", f"test_count={HELD_OUT}", f"text_count={TEXTS}", templates)
    tokenizer = root / "tokenizer.model"
    launch(
        "prepare_data.py", "train_tokenizer", f"input=[{plays}/train.jsonl,{gsm}/text.jsonl]", f"output={tokenizer}", f"vocab_size={VOCABULARY}",
        "byte_fallback=false",
    )  # fmt: skip
    for name, text in (("plays", plays / "train.jsonl"), ("gsm", gsm / "text.jsonl"), ("held_out", plays / "validation.jsonl")):
        launch("prepare_data.py", "tokenize", f"input={text}", f"tokenizer={tokenizer}", f"output={root / 'tokens' / name}")


def pretrain(root: Path, preset: str, words: Sequence[str]) -> None:
    """400 steps of 4,096 tokens."""
    tokens = root / "tokens"
    launch(
        "pretrain.py", f"+model={preset}", f"name={preset}", f"root={root / 'pretrained'}", f"tokenizer={root / 'tokenizer.model'}",
        f"data.train={{plays: {{path: {tokens / 'plays'}, weight: 0.5}}, gsm: {{path: {tokens / 'gsm'}, weight: 0.5}}}}",
        f"data.validation={{held_out: {{path: {tokens / 'held_out'}}}}}", "batch.length=128", "batch.global_sequences=32", "validation.every=0",
        "telemetry.log_every=50", "telemetry.wandb=off", *words, *RECIPES[preset].words,
    )  # fmt: skip


def tune(root: Path, preset: str, words: Sequence[str]) -> None:
    """On the problems, for the recipe's epochs."""
    recipe = RECIPES[preset]
    launch(
        "finetune.py", f"+model={preset}", f"name={preset}", f"root={root / 'tuned'}", f"init_from={root / 'pretrained' / preset}",
        f"tokenizer={root / 'tokenizer.model'}", "sft=gsm_symbolic", f"sft.train={root / 'gsm' / 'train.jsonl'}",
        f"sft.validation={root / 'gsm' / 'test.jsonl'}", f"sft.format.context={CONTEXT}", f"sft.epochs={recipe.epochs}",
        f"schedule.peak={recipe.peak}", f"schedule.final={recipe.peak / 20}", "checkpoint.every=500",
        "checkpoint.keep=1", "validation.every=500",
        "telemetry.log_every=50", "telemetry.wandb=off", *words, *recipe.words, *recipe.tuning,
    )  # fmt: skip


def ask(root: Path, preset: str, stage: str) -> None:
    """The held-out problems, all of them."""
    launch(
        "evaluate.py", "task=gsm8k", f"checkpoint={root / stage / preset}", f"data={root / 'gsm' / 'test.jsonl'}",
        f"train={root / 'gsm' / 'train.jsonl'}", f"output={root / 'scores' / stage / preset}", "batch=50", "throughput_items=4",
        *(() if stage == "tuned" else (f"format.context={CONTEXT}",)), *RECIPES[preset].asking,
    )  # fmt: skip


def seconds(run: Path) -> float:
    """Time spent on steps over all starts, without start-up, validation and checkpoints."""
    total, before = 0.0, 0
    for record in read_log(run / LOG_NAME):
        if record["kind"] == "train":
            total += (record["tokens"] - before) / record["tokens_per_second"]
            before = record["tokens"]
    return total


def row(root: Path, preset: str) -> tuple[str, ...]:
    """One line of the table; dashes for what has not been done."""
    cards: dict[str, dict[str, Any]] = {}
    for stage in ("pretrained", "tuned"):
        path = root / "scores" / stage / preset / "card.json"
        if path.exists():
            cards[stage] = json.loads(path.read_text())
    if len(cards) < 2:
        return (preset, *["-"] * (len(HEADER) - 1))
    zero, tuned = (cards[stage]["scores"]["strict"] for stage in ("pretrained", "tuned"))
    majority = cards["tuned"]["majority_baseline"]
    above = tuned["low"] > max(zero["accuracy"], majority["accuracy"])
    validation = [record for record in read_log(root / "tuned" / preset / LOG_NAME) if record["kind"] == "validation"][-1]
    return (
        preset, _score(zero), _score(majority), _score(tuned), "yes" if above else "NO",
        f"{float(validation['nelbo_nats_per_token']):.4f} ({validation['nelbo_label']})",
        f"{seconds(root / 'pretrained' / preset):.0f}", f"{seconds(root / 'tuned' / preset):.0f}",
    )  # fmt: skip


def _score(found: dict[str, Any]) -> str:
    return f"{100 * found['accuracy']:.1f}% ({100 * found['low']:.1f} to {100 * found['high']:.1f})"


def main() -> int:
    """0 if every preset's interval lies above its own zero-shot score and the majority answer's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(RECIPES), choices=list(RECIPES), help="default: all")
    parser.add_argument("--root", type=Path, default=REPOSITORY / "runs" / "gsm_symbolic", help="default: runs/gsm_symbolic")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every training run")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    root = options.root.resolve()
    if not options.report:
        prepare(root)
        for number, preset in enumerate(options.presets, start=1):
            print(f"== {preset} ({number} of {len(options.presets)})", file=sys.stderr, flush=True)
            pretrain(root, preset, options.set)
            ask(root, preset, "pretrained")
            tune(root, preset, options.set)
            ask(root, preset, "tuned")
    rows = [HEADER, *(row(root, preset) for preset in options.presets)]
    print("\n".join(["| " + " | ".join(line) + " |" for line in [rows[0], ("---",) * len(HEADER), *rows[1:]]]))
    return int(any("yes" not in line for line in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
