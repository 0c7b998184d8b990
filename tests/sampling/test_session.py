"""The sampling command, inside the process and as a subprocess."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pretrain.convert.plain_network import open_trained
from pretrain.errors import UserError
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.output import text_of
from pretrain.sampling.session import choose_device, run_sampling
from tests.convert.trained import WORDS, write_run

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launchers" / "sample.py"


def sample(run: Path, **fields: Any) -> list[dict[str, Any]]:
    config = SamplingConfig(checkpoint=str(run), **fields)
    trained = open_trained(run)
    output = run / "samples.jsonl"
    run_sampling(
        trained.network(device=torch.device("cpu"), dtype=torch.float32), trained.tokenizer, config, vocabulary=trained.vocabulary,
        trained_length=trained.run.batch.length, step=trained.step, output=output,
    )  # fmt: skip
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "objective", "sampler"),
    [("dit", "mdlm", "ancestral"), ("dit", "mdlm", "first_hitting"), ("llama", "ar", "ar"), ("dit", "ar", "ar")],
)
def test_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, objective: str, sampler: str) -> None:
    run, _ = write_run(tmp_path, objective, kind=kind)
    records = sample(run, sampler="auto" if sampler == "ancestral" else sampler, count=5, prompt="the king")
    assert [record["sequence"] for record in records] == [0, 1, 2, 3, 4]
    for record in records:
        assert len(record["ids"]) == 12 and record["ids"][:2] == [WORDS.index("the"), WORDS.index("king")]
        assert all(0 <= token < len(WORDS) + 2 for token in record["ids"])
        assert record["text"].startswith("the king") and 1 <= record["nfe"] <= 10
        assert record["settings"]["sampler"] == sampler and record["settings"]["step"] == 7
    again = sample(run, sampler=sampler, count=5, prompt="the king", batch=2)
    assert [record["ids"] for record in again] == [record["ids"] for record in records]
    out = capsys.readouterr().out
    assert records[0]["text"] in out and "tokens/s" in out and "NFE" in out


def test_greedy_samples_are_all_the_same(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "ar", kind="llama")
    assert len({record["text"] for record in sample(run, temperature=0.0)}) == 1


def test_documents_of_a_text() -> None:
    def decode(ids: list[list[int]]) -> list[str]:
        return ["".join(chr(token) for token in row) for row in ids]

    assert text_of([9, *b"ab", 9, 9, *b"c"], decode, eos_id=9) == "ab\n\nc"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sampler": "ar"}, "sampler=ar cannot sample a masked diffusion model; use ancestral or first_hitting"),
        ({"prompt": "the queen and the king", "length": 5}, "5 tokens and leaves nothing to draw in length=5"),
        ({"count": 0}, "count=0 is too small"),
        ({"top_p": 0.0}, "top_p=0.0 is no share"),
        ({"sampler": "first_hitting", "steps": 4}, "steps=4 means nothing to sampler=first_hitting"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    run, _ = write_run(tmp_path, "mdlm")
    with pytest.raises(UserError, match=sentence):
        sample(run, **fields)


def test_unknown_devices_are_refused() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("gpu", "cuda:77"):
        with pytest.raises(UserError, match=f"device={name} cannot be used here"):
            choose_device(name)


def test_yaml_has_every_key_with_its_default() -> None:
    tree = yaml.safe_load((ROOT / "configs" / "sample.yaml").read_text())
    fields = {item.name: item.default for item in dataclasses.fields(SamplingConfig) if item.name != "checkpoint"}
    assert {key: value for key, value in tree.items() if key not in ("defaults", "hydra", "checkpoint")} == fields


def test_launcher_from_another_directory(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "mdlm")
    command = [sys.executable, str(LAUNCHER), f"checkpoint={run}", "count=2", "steps=4", "temperature=0.5", "output=out/texts.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.count("--- sample") == 2
    records = [json.loads(line) for line in (tmp_path / "out" / "texts.jsonl").read_text().splitlines()]
    assert len(records) == 2 and all(record["nfe"] <= 4 for record in records)
    wrong = subprocess.run([sys.executable, str(LAUNCHER), f"checkpoint={run}", "count=0"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 64 and wrong.stderr.count("\n") == 1 and "count=0 is too small" in wrong.stderr
