"""launchers/prepare_data.py as a subprocess from another directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.examples import text, write_jsonl

LAUNCHER = Path(__file__).resolve().parents[2] / "launchers/prepare_data.py"


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(LAUNCHER), *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_text_to_tokenizer_to_corpus(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [text(200, seed) for seed in range(4)])
    trained = launch(tmp_path, "train_tokenizer", "input=a.jsonl", "output=small.model", "vocab_size=60", "byte_fallback=false")
    assert trained.returncode == 0, trained.stderr
    made = launch(tmp_path, "input=[a.jsonl]", "tokenizer=small.model", "output=corpus", "workers=1")
    assert made.returncode == 0 and "4 documents" in made.stderr, made.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "corpus", "small.model", "small.model.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tokenise"], "no prepare_data=tokenise; did you mean tokenize"),
        (["tokenize", "input=a"], "tokenize needs tokenizer=… and output=…"),
        (["plays", "output=x", "+foo=1"], "unknown key foo"),
        (["tokenize", "input=missing.txt", "tokenizer=missing.model", "output=x"], "tokenizer missing.model cannot be read"),
        (["tokenize", "input=a", "tokenizer=b", "output=c", "workers=many"], "workers=many must be"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    result = launch(tmp_path, *arguments)
    assert result.returncode == 64
    assert result.stderr.startswith("error: ") and sentence in result.stderr and len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_hydra_prints_the_configuration(tmp_path: Path) -> None:
    result = launch(tmp_path, "plays", "output=x", "--cfg", "job")
    assert result.returncode == 0 and "task: plays" in result.stdout
