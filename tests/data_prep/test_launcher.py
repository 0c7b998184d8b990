"""launchers/prepare_data.py as a subprocess from another directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.tasks import TASKS
from launchers.prepare_data import main
from pretrain.audit.tasks import RUN_TASKS
from pretrain.command_line import run_command
from tests.data.examples import prepared, text, write_jsonl

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
        (["tokenise"], "there is no task tokenise; did you mean tokenize"),
        (["task=foo"], "there is no task foo; known: " + ", ".join(sorted(TASKS | RUN_TASKS))),
        (["++task=foo", "output=x"], "there is no task foo"),
        (["tokenize", "task=plays"], "tokenize and plays are two tasks; give one"),
        (["tokenize", "input=a"], "tokenize needs tokenizer=… and output=…"),
        (["task=plays", "output=x", "+foo=1"], "unknown key foo"),
        (["tokenize", "input=missing.txt", "tokenizer=missing.model", "output=x"], "tokenizer missing.model cannot be read"),
        (["tokenize", "input=a", "tokenizer=b", "output=c", "workers=many"], "workers=many must be"),
        (["tokenize", "input=[1]", "tokenizer=a", "output=x"], "input=[1] must be a path, or a list of them"),
        (["tokenize", "input=${oc.env:NOWHERE}", "tokenizer=a", "output=x"], "NOWHERE"),
        (["tokenize", "input=''", "tokenizer=a", "output=x"], "input='' holds an empty path"),
        (["audit", "corpus=nowhere"], "no prepared corpus in nowhere"),
        (["audit", "step=3"], "audit_step needs run=…"),
        (["audit", "step=3", "run=nowhere"], "there is no run at nowhere"),
        (["audit", "step=3", "run=nowhere", "corpus=x"], "unknown key corpus"),
        (["show", "step=0", "run=nowhere"], "step=0 must be at least 1"),
        (["show", "step=one", "run=nowhere"], "step=one must be a valid integer"),
        (["--cfg", "foo"], "invalid choice: 'foo'"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *arguments])
    assert run_command(main, when_memory_is_full="") == 64
    said = capsys.readouterr().err
    assert said.startswith("error: ") and sentence in said and len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    result = launch(tmp_path, "task=foo")
    assert (result.returncode, result.stderr) == (64, f"error: there is no task foo; known: {', '.join(sorted(TASKS | RUN_TASKS))}\n")


def test_audit_of_a_changed_corpus(tmp_path: Path, model_file: Path) -> None:
    folder = prepared(tmp_path, model_file, ["x", "y"], files=2).folder
    assert launch(tmp_path, "task=audit", "corpus=corpus").returncode == 0
    (folder / "shard_00001.bin").write_bytes(b"\0\0")
    result = launch(tmp_path, "audit", "corpus=corpus")
    assert result.returncode == 64 and "\nerror: 1 shard changed or went missing after preparation: corpus/shard_00001; " in result.stderr


def test_hydra_prints_the_configuration(tmp_path: Path) -> None:
    result = launch(tmp_path, "plays", "output=x", "--cfg", "job")
    assert result.returncode == 0 and "task: plays" in result.stdout
