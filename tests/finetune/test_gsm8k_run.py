"""A scripted model whose every verdict is known: scores, rates, files, the card, resumption."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

from finetune import gsm8k_run
from finetune.gsm8k_config import FormatConfig, GSM8KEvaluation
from finetune.gsm8k_run import evaluate_gsm8k
from finetune.gsm8k_samples import SampleFolder
from finetune.gsm8k_scores import Report
from pretrain.checkpoint.lock import RunLock
from pretrain.data.files import file_hash
from pretrain.errors import UserError
from tests.finetune.scripted import Scripted, scripted_model

QUESTIONS = ["one?", "two, longer?", "three?", "four and more words?", "five?", "six?", "seven?", "x" * 90, "nine?", "ten?"]
GOLD = ["18", "7", "$1,000", "3", "3", "3", "0.5", "3", "-4", "25"]
OUTPUTS = [
    "Answer: 9+9=18\n#### 18",  # right by all
    "So the answer is 7, of 9.",  # flexible alone
    "#### 1000 dollars",  # right by all: currency and unit
    "#### 3\nand then 4",  # not by the last number
    "",  # EOS at once
    "I count 1 2 3 ~",  # no EOS, and the last number is right
    "#### 1/2",  # right by all: a fraction
    "never asked",  # the prompt does not fit
    "#### \u22124".replace("\u2212", "-"),
    "#### 24",  # wrong by all
]
VERDICTS = {
    "strict": [1, 0, 1, 1, 0, 0, 1, 0, 1, 0],
    "flexible": [1, 1, 1, 1, 0, 1, 1, 0, 1, 0],
    "last": [1, 0, 1, 0, 0, 1, 1, 0, 1, 0],
}
CONTEXT = 64


def prompt(question: str) -> str:
    return f"Question: {question}\n"


SCRIPT = {prompt(question): output for question, output in zip(QUESTIONS, OUTPUTS, strict=True)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [{"question": q, "answer": f"because\n#### {a}"} for q, a in zip(QUESTIONS, GOLD, strict=True)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "test.jsonl"


def config(data: Path, **fields: Any) -> GSM8KEvaluation:
    given = {"checkpoint": "run", "data": str(data), "throughput_items": 0, "format": FormatConfig(context=CONTEXT)} | fields
    return GSM8KEvaluation(**given)  # type: ignore[arg-type]


def run(folder: Path, chosen: GSM8KEvaluation, *, script: dict[str, str] = SCRIPT, **options: Any) -> tuple[Report, list[str], Scripted]:
    model, network = scripted_model(folder / "runs" / "x", script, **options)
    said: list[str] = []
    report = evaluate_gsm8k(model, chosen, device=torch.device("cpu"), host_memory=lambda: 2.0**30, say=said.append)
    return report, said, network


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_rates_and_samples(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, said, _ = run(tmp_path, config(data, output=str(tmp_path / "out"), batch=4))
    for name, verdicts in VERDICTS.items():
        found = report.accuracy[name]  # type: ignore[index]
        wilson = binomtest(sum(verdicts), 10).proportion_ci(method="wilson")
        assert (found.correct, found.total, found.low, found.high) == (sum(verdicts), 10, wilson.low, wilson.high)
    assert (report.too_long, report.truncated, report.flooded, report.masked) == (1, 1, 1, 0)
    assert report.unanswered == {"strict": 4, "flexible": 2, "last": 2} and report.disagreeing == 3
    assert (report.baseline.answer, report.baseline.accuracy.correct) == ("3", 4)
    records = lines(tmp_path / "out/samples.jsonl")
    assert sorted(record["item"] for record in records) == list(range(10))
    for record in records:
        item = record["item"]
        assert [record["correct"][name] for name in VERDICTS] == [bool(verdicts[item]) for verdicts in VERDICTS.values()]
        assert record["prompt"] == prompt(QUESTIONS[item]) and record["gold"] == GOLD[item] and record["id"] == f"test-{item + 1}"
        if item == 7:
            assert not record["fits"] and record["output"] == "" and record["nfe"] == 0
        elif item == 5:
            assert not record["ended"] and record["output"] == OUTPUTS[5] + "~" * (CONTEXT - len(record["prompt"]) - len(OUTPUTS[5]))
            assert record["tokens"] == record["nfe"] == CONTEXT - len(record["prompt"])
        else:
            assert record["ended"] and record["output"] == OUTPUTS[item] and record["tokens"] == record["nfe"] == len(OUTPUTS[item]) + 1
    apart = lines(tmp_path / "out/disagreements.jsonl")
    assert [one["item"] for one in apart] == [1, 3, 5] and apart[0]["answers"] == {"strict": None, "flexible": "7", "last": "9"}
    text = "\n".join(said)
    assert "strict   50.0% (5 of 10; 95% Wilson interval 23.7-76.3%)" in text and "test-2: strict none, flexible 7, last 9; right is 7" in text
    assert "always 3, the most frequent answer of the test problems themselves" in text
    notes = capsys.readouterr().err
    assert "prompts follow the default format, with format.context as given: the model was not fine-tuned with one" in notes
    assert f"1 of 10 prompts leave no room in context={CONTEXT} and count as wrong" in notes
    assert "problem 10/10 |" in notes and "ETA" in notes and "strict so far 50.0%" in notes


def test_an_evaluation_that_can_ask_nothing_is_refused(tmp_path: Path, data: Path) -> None:
    """A score of 0% would be about the context, not about the model."""
    shots = tmp_path / "shots.jsonl"
    shots.write_text("".join(json.dumps({"question": f"another {number}?", "answer": "so\n#### 5"}) + "\n" for number in range(9)))
    with pytest.raises(UserError, match=r"the shortest prompt has 15 tokens, and context=15 leaves no room .*; set a larger format.context=$"):
        run(tmp_path, config(data, output=str(tmp_path / "out"), format=FormatConfig(context=15)))
    with pytest.raises(UserError, match="no room for an answer to any of the problems; set a larger format.context=, or fewer shots="):
        run(tmp_path, config(data, output=str(tmp_path / "out"), shots=9, shots_data=str(shots)))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_sentence(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the folder is free for the next start, which goes on."""
    opened = SampleFolder._open

    def full(folder: SampleFolder) -> None:
        opened(folder)
        folder._file.close()
        folder._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115

    chosen = config(data, output=str(tmp_path / "out"))
    monkeypatch.setattr(SampleFolder, "_open", full)
    with pytest.raises(UserError, match=r"cannot write .*samples.jsonl \(No space left on device\)"):
        run(tmp_path, chosen)
    monkeypatch.setattr(SampleFolder, "_open", opened)
    assert run(tmp_path, chosen)[0].problems == 10


def test_the_card_says_everything(tmp_path: Path, data: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"question": f"q{i}", "answer": f"#### {a}"}) + "\n" for i, a in enumerate(["25", "25.0", "9"])))
    chosen = config(data, output=str(tmp_path / "out"), items=9, train=str(train), throughput_items=2, confidence=0.9, temperature=0.0, seed=3)
    report, _, network = run(tmp_path, chosen)
    card, text = json.loads((tmp_path / "out/card.json").read_text()), (tmp_path / "out/card.md").read_text()
    assert card["majority_baseline"]["answer"] == "25" and card["majority_baseline"]["correct"] == 0 and "25 (most frequent" in text
    assert card["majority_baseline"]["counted_in"] == "the training problems"
    settings = card["settings"]
    assert settings["data"] == file_hash(data) and settings["checkpoint"] == file_hash(tmp_path / "runs/x/checkpoints/step_00000007/manifest.json")
    assert (settings["sampler"], settings["temperature"], settings["seed"], settings["shots"]) == ("left_to_right", 0.0, 3, 0)
    assert settings["format"]["context"] == CONTEXT and settings["format"]["question"] == "Question: {question}\n"
    assert card["counts"]["problems"] == 9 and card["counts"]["problems_in_file"] == 10 and not card["counts"]["whole_file"]
    assert card["scores"]["strict"] == {"accuracy": 5 / 9, **asdict(report.accuracy["strict"])} and card["scores"]["strict"]["confidence"] == 0.9
    assert {"python", "torch", "pretrain"} <= set(card["versions"]) and card["model"]["step"] == 7 and card["files"]["train"] == str(train)
    # Two problems once more, one at a time, after one that is not counted: tokens with EOS, and nothing of the prompt.
    throughput = card["throughput"]
    assert (throughput["items"], throughput["tokens"]) == (2, len(OUTPUTS[0]) + 1 + len(OUTPUTS[1]) + 1)
    assert throughput["tokens_per_second"] == pytest.approx(throughput["tokens"] / throughput["seconds"])
    assert network.asked[-3:] == [prompt(QUESTIONS[0]), prompt(QUESTIONS[0]), prompt(QUESTIONS[1])]
    assert "the first 9 of 10 problems" in text and "90% Wilson interval" in text and "| settings.seed | `3` |" in text
    assert f"{100 * 5 / 9:.1f}%" in text and "generated tokens/s at batch 1 (2 problems" in text


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    whole, _, _ = run(tmp_path, config(data, output=str(tmp_path / "whole")))
    answers: Callable[..., Any] = gsm8k_run.answers

    def interrupted(*words: Any, **named: Any) -> Any:
        for number, batch in enumerate(answers(*words, **named)):
            if number == 2:
                raise KeyboardInterrupt
            yield batch

    chosen = config(data, output=str(tmp_path / "out"), batch=2)
    with monkeypatch.context() as patch:
        patch.setattr(gsm8k_run, "answers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, chosen)
    samples = tmp_path / "out/samples.jsonl"
    before = samples.read_text()
    assert len(before.splitlines()) == 5 and not (tmp_path / "out/card.json").exists()  # four answers, and the prompt that does not fit
    samples.write_text(before + before.splitlines()[0][:50])  # killed in the middle of a line
    report, _, network = run(tmp_path, config(data, output=str(tmp_path / "out"), batch=3))
    assert "5 of 10 problems were answered before, with equal settings" in capsys.readouterr().err
    assert samples.read_text().startswith(before) and len(samples.read_text().splitlines()) == 10
    assert {prompt(QUESTIONS[item]) for item in (4, 5, 6, 8, 9)} == set(network.asked)
    assert report.accuracy == whole.accuracy
    found, wanted = ([record | {"seconds": 0} for record in lines(tmp_path / name / "samples.jsonl")] for name in ("out", "whole"))
    assert sorted(found, key=lambda record: record["item"]) == sorted(wanted, key=lambda record: record["item"])
    _, _, again = run(tmp_path, chosen)
    assert again.asked == [], "nothing is asked twice"


def test_more_problems_later(tmp_path: Path, data: Path) -> None:
    few, _, _ = run(tmp_path, config(data, output=str(tmp_path / "out"), items=3))
    more, _, network = run(tmp_path, config(data, output=str(tmp_path / "out"), items=5))
    assert (few.problems, more.problems) == (3, 5) and set(network.asked) == {prompt(QUESTIONS[3]), prompt(QUESTIONS[4])}
    fewer, _, network = run(tmp_path, config(data, output=str(tmp_path / "out"), items=2))
    assert fewer.problems == 2 and network.asked == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": 2}, r"holds an evaluation with other settings \(seed=1, now 2\); choose another output=, or use those settings"),
        ({"temperature": 0.5}, r"\(temperature=0, now 0.5\)"),
        ({"format": FormatConfig(context=CONTEXT, question="{question}\\n")}, r"\(format.question=Question: \{question\}\\n, now \{question\}\\n\)"),
    ],
)
def test_other_settings_in_the_same_folder(tmp_path: Path, data: Path, changes: dict[str, Any], sentence: str) -> None:
    run(tmp_path, config(data, output=str(tmp_path / "out")))
    before = (tmp_path / "out/samples.jsonl").read_bytes()
    with pytest.raises(UserError, match=sentence):
        run(tmp_path, config(data, output=str(tmp_path / "out"), **changes))
    assert (tmp_path / "out/samples.jsonl").read_bytes() == before
    run(tmp_path, config(data, **changes))  # without output= every setting has a folder of its own
    run(tmp_path, config(data))
    assert len(list((tmp_path / "runs/x/gsm8k").glob("left_to_right-*"))) == 2


def test_folders_that_cannot_be_used(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "samples.jsonl").write_text("mine\n")
    with pytest.raises(UserError, match=r"samples.jsonl is not from an evaluation; choose another output="):
        run(tmp_path, config(data, output=str(out)))
    lock = RunLock(tmp_path / "busy")
    lock.acquire()
    try:
        with pytest.raises(UserError, match="is in use by process .*; stop that one first, or choose another output="):
            run(tmp_path, config(data, output=str(tmp_path / "busy")))
    finally:
        lock.release()
    run(tmp_path, config(data, output=str(tmp_path / "whole")))
    with (tmp_path / "whole/samples.jsonl").open("a") as file:
        file.write('{"item": 3}\n')
    with pytest.raises(UserError, match="line 11 of .*samples.jsonl has no field id; remove the line, and its problem is answered again"):
        run(tmp_path, config(data, output=str(tmp_path / "whole")))


def test_two_examples_per_problem_are_asked_in_two_stages(tmp_path: Path, data: Path) -> None:
    """The rationale ends with EOS; the answer is asked for after question and rationale, unless it is there already, or no room is left."""
    rationale, full = "Answer: 9+9=18\n", "z" * (CONTEXT - len(prompt("three?")) - 1)
    wanted = {"one?": rationale, "two, longer?": "on and on ~", "three?": full, "four and more words?": "3 it is\n#### 3"}
    script = {prompt(question): text for question, text in wanted.items()}
    later = {prompt("one?") + rationale: "#### 18", prompt("four and more words?") + wanted["four and more words?"]: "#### 4"}
    chosen = config(data, output=str(tmp_path / "out"), items=4, format=FormatConfig())
    report, _, network = run(tmp_path, chosen, script=script, later=later, sft={"format": {"examples": "two", "context": CONTEXT}})
    one, two, three, four = sorted(lines(tmp_path / "out/samples.jsonl"), key=lambda record: record["item"])
    assert one["output"] == rationale + "#### 18" and one["ended"] and one["tokens"] == one["nfe"] == len(one["output"]) + 2
    assert not two["ended"] and two["output"].startswith("on and on")
    assert three["output"] == full and three["ended"] and three["tokens"] == len(full) + 2
    assert four["output"] == wanted["four and more words?"] and four["tokens"] == len(four["output"]) + 1
    assert report.accuracy["strict"].correct == 2 and prompt("one?") + rationale in network.asked


def test_shots_come_before_the_question(tmp_path: Path, data: Path) -> None:
    shots = tmp_path / "train.jsonl"
    rows = [("a?", "1+1=2\n#### 2"), ("b?", "2+2=4\n#### 4"), ("one?", "no\n#### 1")]
    shots.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    before = "Question: a?\nAnswer: 1+1=2\n#### 2\0Question: b?\nAnswer: 2+2=4\n#### 4\0"
    chosen = config(data, output=str(tmp_path / "out"), items=2, shots=2, shots_data=str(shots), format=FormatConfig(context=200))
    report, _, network = run(tmp_path, chosen, script={before + key: value for key, value in SCRIPT.items()})
    assert set(network.asked) == {before + prompt(QUESTIONS[0]), before + prompt(QUESTIONS[1])} and report.accuracy["flexible"].correct == 2
    assert lines(tmp_path / "out/samples.jsonl")[0]["prompt"] == prompt(QUESTIONS[0])
    with pytest.raises(UserError, match="problem test-1 is also one of the shots, which show its answer"):
        run(tmp_path, config(data, output=str(tmp_path / "other"), shots=3, shots_data=str(shots)))
    with pytest.raises(UserError, match=r"shots=4 asks for more problems than the 3 of shots_data="):
        run(tmp_path, config(data, output=str(tmp_path / "other"), shots=4, shots_data=str(shots)))
