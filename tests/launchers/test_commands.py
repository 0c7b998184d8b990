"""Every command that a user types, as a process started in another directory, on text made here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.examples import text, write_jsonl

LAUNCHERS = Path(__file__).parents[2] / "launchers"


def command(folder: Path, *words: str) -> str:
    """What a command that must succeed prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def python(folder: Path, launcher: str, *words: str) -> str:
    return command(folder, sys.executable, str(LAUNCHERS / launcher), *words)


@pytest.mark.slow
def test_from_text_to_samples(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [text(60, seed) for seed in range(40)])
    write_jsonl(tmp_path / "validation.jsonl", [text(60, seed) for seed in range(100, 104)])
    python(tmp_path, "prepare_data.py", "train_tokenizer", "input=train.jsonl", "output=words.model", "vocab_size=60", "byte_fallback=false")
    for split in ("train", "validation"):
        python(tmp_path, "prepare_data.py", "tokenize", f"input={split}.jsonl", "tokenizer=words.model", f"output={split}")
        assert "already" in python(tmp_path, "prepare_data.py", "tokenize", f"input={split}.jsonl", "tokenizer=words.model", f"output={split}")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(LAUNCHERS / "pretrain.py"))
    settings = (
        "+model=mdlm_tiny", "name=words", "data=custom", "tokenizer=words.model", "data.train.main.path=train",
        "data.validation.main.path=validation", "parallel.tensor=2", "batch.global_sequences=8", "batch.micro_sequences=4", "batch.length=16",
        "backbone.hidden=32", "duration.steps=4",
        "schedule.warmup_steps=1", "telemetry.log_every=2", "telemetry.wandb=off",
    )  # fmt: skip
    first = command(tmp_path, *torchrun, *settings, "duration.stop_after=2")
    assert "step 2/4 | " in first and "ETA 0s" in first, "this start leaves here"
    assert "FutureWarning" not in first
    assert first.count("runs/words: mdlm with ") == 1 and "(dit), TP2 PP1 DP1 ZeRO-1, " in first and "log: runs/words/log.jsonl" in first
    assert "\n4 steps of 8 x 16 = 128 tokens, 512 tokens in all, leaving at step 2\n" in first
    second = command(tmp_path, *torchrun, *settings)
    assert "Resuming" in second and "\nfrom step 2, 4 steps of 8 x 16 = 128 tokens, 512 tokens in all\n" in second
    records = [json.loads(line) for line in (tmp_path / "runs/words/log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "train"] == [2, 4]
    python(tmp_path, "sample.py", "checkpoint=runs/words", "count=2", "output=runs/words/samples.jsonl")
    assert len((tmp_path / "runs/words/samples.jsonl").read_text().splitlines()) == 2
    scored = python(tmp_path, "evaluate.py", "checkpoint=runs/words", "draws=2")
    assert "mdlm with " in scored and " tokens, each 2 times\n" in scored
    assert "mdlm, nelbo | perplexity" in scored and "(bound, 95% CI" in scored
    summary = python(tmp_path, "summary.py", "runs/words", "validation")
    assert "validation (bound)" in summary
    assert "unigram entropy" in summary
    assert "published" in python(tmp_path, "convert.py", "hf", "checkpoint=runs/words", "output=hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "Held-out text of the run at step 4" in card and "label `bound`" in card
    assert "init_from=runs/imported" in python(tmp_path, "convert.py", "checkpoint", "from=hub", "output=runs/imported")
    restarted = [word for word in settings if word not in ("name=words", "parallel.tensor=2")]
    single = (*torchrun[:-2], "--nproc-per-node=1", torchrun[-1])
    said = command(tmp_path, *single, *restarted, "name=second", "init_from=runs/imported", "duration.stop_after=2")
    assert "fresh moments" in said and "step 2/4 | " in said


def test_a_wrong_task_of_a_conversion_is_one_sentence(tmp_path):
    for words, said in (
        (("zip", "output=x"), "there is no task zip"),
        (("hf", "checkpoint=x"), "hf needs output=…"),
        (("hf", "checkpoint=x", "output=y"), "there is no checkpoint at x"),
        (("hf", "checkpoint=x", "output=y", "format=gguf"), "format=gguf must be"),
        (("checkpoint", "from=x", "output=y"), "x/config.json cannot be read"),
    ):
        done = subprocess.run([sys.executable, str(LAUNCHERS / "convert.py"), *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 64 and done.stderr.startswith(f"error: {said}"), done.stderr
