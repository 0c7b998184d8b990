"""What launchers/summary.py says of logs that are whole, that diverged, and that somebody edited."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from launchers.summary import main
from pretrain.command_line import run_command
from tests.data.examples import prepared, sentencepiece_file, text

RECORDS: list[dict[str, Any]] = [
    {"kind": "run", "step": 0, "run_name": "words", "total_steps": 4, "parameters": 1234, "config": {"objective": {"name": "mdlm"}}},
    {"kind": "train", "step": 2, "tokens": 64, "tokens_per_second": 100.0},
    {"kind": "train", "step": 4, "tokens": 128, "tokens_per_second": 300.0},
    {"kind": "train", "step": 4, "tokens": 128, "tokens_per_second": 200.0},
    {"kind": "validation", "step": 4, "nelbo_nats_per_token": 2.0, "ci95_nats_per_token": 0.25, "nelbo_label": "bound"},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held_out")
    return prepared(folder, sentencepiece_file(folder), [text(20, 1)]).folder


def write_log(folder: Path, records: list[dict[str, Any]]) -> Path:
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def summary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    monkeypatch.setattr(sys, "argv", ["summary.py", *map(str, arguments)])
    code = run_command(main, when_memory_is_full="")
    said = capsys.readouterr()
    return code, said.out, said.err


def test_figures_and_samples(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_log(tmp_path, RECORDS)
    (run / "samples.jsonl").write_text("".join(json.dumps({"text": words}, ensure_ascii=False) + "\n" for words in ("one\u2028two", "three")))
    code, out, err = summary(monkeypatch, capsys, run, corpus)
    assert (code, err) == (0, "")
    for words in (
        "Run words", "mdlm, 1,234 parameters, 128 tokens in 4 steps", "validation (bound)", "2.0000 nats per token (perplexity 7.39) ± 0.2500 (95%)",
        "200 tokens/s", "--- sample 1\none\u2028two", "--- sample 2\nthree",
    ):  # fmt: skip
        assert words in out


def test_scores_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a corpus there is no entropy to compare with; every evaluation card below gsm8k/ is told."""
    run = write_log(tmp_path, RECORDS)
    figures = {"accuracy": 0.75, "low": 0.657, "high": 0.825, "confidence": 0.95, "correct": 75, "total": 100}
    baseline = figures | {"answer": "27", "accuracy": 0.05}
    tree = {"settings": {"sampler": "left_to_right"}, "scores": {"strict": figures}, "majority_baseline": baseline}
    (run / "gsm8k/mine").mkdir(parents=True)
    (run / "gsm8k/mine/card.json").write_text(json.dumps(tree))
    code, out, _ = summary(monkeypatch, capsys, run)
    assert code == 0 and "unigram" not in out
    for words in ("left_to_right, after ####", "75 of 100 right: 75.0% (95% interval 65.7% to 82.5%)", "always 27", "right: 5.0%"):
        assert words in out, words


def test_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_log(tmp_path, RECORDS)
    assert summary(monkeypatch, capsys, "--finished", run) == (0, "", "")
    write_log(tmp_path, [RECORDS[0], RECORDS[-1] | {"step": 3}])
    assert summary(monkeypatch, capsys, "--finished", run) == (1, "", "")
    assert summary(monkeypatch, capsys, "--finished", tmp_path / "nowhere") == (1, "", "")


def test_a_run_that_diverged(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = [RECORDS[1] | {"tokens_per_second": "nan"}]
    figures = {"nelbo_nats_per_token": "nan", "ci95_nats_per_token": "nan"}
    code, out, err = summary(monkeypatch, capsys, write_log(tmp_path, [RECORDS[0], *speeds, RECORDS[-1] | figures]), corpus)
    assert (code, err) == (0, "") and "nan nats per token: diverged, no interval" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: RUN_DIR"),
        (["scored"], "card.json is no evaluation card ('settings'); run launchers/evaluate.py task=gsm8k again with another output="),
        (["run", "corpus", "more"], "unrecognized arguments: more"),
        (["--cfg", "foo"], "unrecognized arguments: --cfg"),
        (["--finished"], "the following arguments are required: RUN_DIR"),
        (["nowhere", "corpus"], "nowhere holds no validated run yet"),
        (["run", "nowhere"], "no prepared corpus in nowhere"),
        (["run/log.jsonl", "corpus"], "holds no validated run yet"),
    ],
)
def test_mistakes_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    for name in ("run", "scored"):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name, RECORDS)
    (tmp_path / "scored/gsm8k").mkdir()
    (tmp_path / "scored/gsm8k/card.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    code, out, err = summary(monkeypatch, capsys, *arguments)
    assert (code, out) == (64, "") and err.startswith("error: ") and sentence in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "change", "sentence"),
    [
        (0, {"total_steps": "many"}, "the run record of step 0 in .*log.jsonl says total_steps='many', which must be a number"),
        (0, {"parameters": None}, "parameters=None, which must be a number"),
        (0, {"step": "zero"}, "line 1 of .*log.jsonl says step='zero'"),
        (2, {"tokens_per_second": []}, r"the train record of step 4 .*tokens_per_second=\[\]"),
        (3, {"tokens": "all"}, "tokens='all'"),
        (4, {"nelbo_nats_per_token": None}, "the validation record of step 4 .*nelbo_nats_per_token=None"),
        (4, {"ci95_nats_per_token": "wide"}, "ci95_nats_per_token='wide'"),
    ],
)
def test_edited_records(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    number: int, change: dict[str, Any], sentence: str,
) -> None:
    records = [record | change if place == number else record for place, record in enumerate(RECORDS)]
    run = write_log(tmp_path, records)
    arguments = ("--finished", run) if "total_steps" in change else (run, corpus)
    code, _, err = summary(monkeypatch, capsys, *arguments)
    assert code == 64 and err.startswith("error: ") and err.count("\n") == 1
    assert re.search(sentence, err), err


@pytest.mark.parametrize("content", ["{", "[]\n", '{"text": 5}\n', "\xff"])
def test_edited_samples(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str) -> None:
    run = write_log(tmp_path, RECORDS)
    (run / "samples.jsonl").write_bytes(content.encode("latin-1"))
    code, _, err = summary(monkeypatch, capsys, run, corpus)
    assert code == 64 and f"error: {run}/samples.jsonl cannot be read" in err and err.count("\n") == 1
