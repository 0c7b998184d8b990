"""launchers/evaluate.py as one types it: tasks with keys of their own, help, and a whole evaluation in a process that is killed and goes on."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.gsm8k_config import FORMAT_TEXTS, FormatConfig, GSM8KEvaluation
from pretrain.compose import compose_arguments, resolved
from pretrain.errors import UserError
from pretrain.evaluation.config import EvaluationConfig
from pretrain.evaluation.tasks import COMPOSED, TASKS, choose_task
from pretrain.hf_model.sampling_settings import SETTINGS
from pretrain.sampling.config import quoted
from tests.convert.trained import write_run

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launchers" / "evaluate.py"
TREES = {task: yaml.safe_load((ROOT / "configs/evaluate" / f"{task}.yaml").read_text()) for task in TASKS}
HELP = yaml.safe_load((ROOT / "configs/evaluate.yaml").read_text())["hydra"]["help"]["template"]


def composed(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *quoted(choose_task(list(words)), FORMAT_TEXTS)])
    found = compose_arguments("evaluate")
    assert found is not None
    return resolved(found)


def test_yaml_has_every_key_with_its_default() -> None:
    for task, kind, required in [("likelihood", EvaluationConfig, ["checkpoint"]), ("gsm8k", GSM8KEvaluation, ["checkpoint", "data"])]:
        fields = {item.name: item.default for item in dataclasses.fields(kind) if item.name not in (*required, "format")}
        format = {"format": dict.fromkeys(item.name for item in dataclasses.fields(FormatConfig))} if task == "gsm8k" else {}
        rest = {key: value for key, value in TREES[task].items() if key not in ("task", "checkpoint", COMPOSED)}
        assert rest == fields | format and TREES[task]["task"] == task


def test_help_names_the_keys() -> None:
    for task, tree in TREES.items():
        keys = [key for key in tree if key not in ("task", COMPOSED, "format", "top_k") and (task == "likelihood" or key not in SETTINGS)]
        assert all(f"{key}=" in HELP or f"{key} " in HELP for key in keys), [key for key in keys if f"{key}=" not in HELP]
    assert all(f"format.{item.name}=" in HELP for item in dataclasses.fields(FormatConfig)) and "data=FILE" in HELP


def test_tasks_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert composed(monkeypatch, "checkpoint=x")["task"] == "likelihood"
    assert composed(monkeypatch, "checkpoint=x", "task=gsm8k", "data=a.jsonl")[COMPOSED] == "a.jsonl"
    assert composed(monkeypatch, "gsm8k", "checkpoint=x")["shots"] == 0
    for words, sentence in [
        (["checkpoint=x", "shots=3"], "^unknown key shots; known: batch, checkpoint"),
        (["task=gsm8k", "draws=3"], "^unknown key draws"),
        (["task=gsm8k", "itmes=3"], r"^unknown key itmes; did you mean items"),
        (["task=gms8k"], r"^there is no task=gms8k; did you mean gsm8k\?"),
    ]:
        with pytest.raises(UserError, match=sentence):
            composed(monkeypatch, *words)


def test_templates_arrive_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = composed(monkeypatch, "task=gsm8k", "checkpoint=x", "data=d", r"format.question=Q's: {question}, [a]\n", "format.answer=$ {answer}")
    assert FormatConfig(**tree["format"]).given() == {"question": "Q's: {question}, [a]\n", "answer": "$ {answer}"}


@pytest.mark.slow
def test_a_whole_evaluation_from_another_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mdlm", words=["Question", ":", "one", "two", "3", "4"])
    rows = [{"question": f"one {'two ' * (i % 3)}", "answer": "#### 3"} for i in range(6)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def evaluate(*words: str) -> subprocess.CompletedProcess[str]:
        given = ["task=gsm8k", "checkpoint=a/tiny", "data=test.jsonl", "format.context=12", *words]
        return subprocess.run([sys.executable, str(LAUNCHER), *given], cwd=tmp_path, capture_output=True, text=True, timeout=300)

    done = evaluate("throughput_items=1")
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "a/tiny/gsm8k").iterdir()
    assert {path.name for path in folder.iterdir()} == {"card.json", "card.md", "disagreements.jsonl", "samples.jsonl", "settings.json"}
    assert "95% Wilson interval" in done.stdout and "generated tokens/s at batch 1 (1 problems" in done.stdout and "problem 6/6" in done.stderr
    wrong = evaluate("sampler=ddpm")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (64, 1)
    assert wrong.stderr.startswith("error: sampler=ddpm cannot sample a model trained with objective=mdlm; use ancestral")
