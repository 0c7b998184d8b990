"""Data of every form, formats of every origin, settings, baseline and the line of progress."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.gsm8k_config import FormatConfig, GSM8KEvaluation
from finetune.gsm8k_data import majority_baseline, read_evaluation_problems
from finetune.gsm8k_progress import EvaluationDisplay
from finetune.gsm8k_prompts import PromptMaker, prompt_format
from finetune.gsm8k_run import checkpoint_hash
from pretrain.data.problems import Problem, problem_lines
from pretrain.data.sft_format import SFTFormat
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.finetune.scripted import Letters, scripted_model

PROBLEM = Problem(id="p-1", source="p", question="How many?", rationale="1+1=2", answer="2")


def test_every_form_of_data(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"question": "How many?", "answer": "1+1=2\\n#### 2"}\n')
    (tmp_path / "train.txt").write_text("How many?||1+1=2 #### 2\n")
    (tmp_path / "problems.jsonl").write_bytes(problem_lines([PROBLEM]))
    for name in ("test.jsonl", "train.txt", "problems.jsonl"):
        [found] = read_evaluation_problems(tmp_path / name)
        assert (found.question, found.rationale, found.answer) == ("How many?", "1+1=2", "2")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"question": "a", "answer": "b"}\n', "^line 1 of data=.*a.jsonl is not a problem: no #### before a final answer; mend"),
        ("a.jsonl", '{"question": "a", "answer": "#### two"}\n', "is not a problem: the answer 'two' is not a number; mend"),
        ("a.jsonl", '{"text": "a"}\n', "is not a problem: no key 'question'; it has 'text'; mend the line, or give GSM8K's test.jsonl"),
        ("a.jsonl", "", "a.jsonl holds no problem; give GSM8K's test.jsonl"),
        ("a.csv", "question,answer\n", "a.csv is no file of problems; give GSM8K's"),
        ("a.txt", "no separator\n", "0 times"),
        ("a.jsonl", problem_lines([replace(PROBLEM, answer="two")]).decode(), "the answer 'two' of problem p-1 in data=.* is not a number"),
    ],
)
def test_data_that_is_none(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=sentence):
        read_evaluation_problems(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^train=.*none.jsonl cannot be read \(No such file or directory\)"):
        read_evaluation_problems(tmp_path / "none.jsonl", "train")


def test_majority_baseline() -> None:
    def problems(answers: list[str]) -> list[Problem]:
        return [Problem(id=str(i), source="x", question="?", rationale="", answer=answer) for i, answer in enumerate(answers)]

    answer, found = majority_baseline(problems(["4", "3", "3.0", "9"]), problems(["9", "3", "$3", "9.0", "1"]), 0.95)
    assert (answer, found.correct, found.total) == ("3", 2, 4), "of equally frequent answers the smallest"


def test_formats(tmp_path: Path) -> None:
    model, _ = scripted_model(tmp_path / "a", {}, sft={"format": {"question": "Q {question}", "context": 32, "padding": "unscored"}})
    found = prompt_format(model.folder, FormatConfig(context=48, answer="A\\n{answer}"))
    assert found.format == SFTFormat(question="Q {question}", context=48, padding="unscored", answer="A\n{answer}") and found.fine_tuned
    assert found.origin == f"the format of {model.folder / 'config.yaml'}, with format.answer, format.context as given"
    plain = prompt_format(scripted_model(tmp_path / "b", {})[0].folder, FormatConfig())
    assert plain.format == SFTFormat() and not plain.fine_tuned and plain.origin == "the default format: the model was not fine-tuned with one"
    default = prompt_format(scripted_model(tmp_path / "c", {}, sft={})[0].folder, FormatConfig())
    assert default.format == SFTFormat() and default.fine_tuned
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps({"model_type": "x", "prompt_format": {"examples": "two"}}))
    assert prompt_format(hub, FormatConfig()).format == SFTFormat(examples="two")
    for bad, sentence in [
        ({"shape": 1}, r"the prompt format in .*config.json has the unknown field shape=1; its fields are examples, question"),
        ({"context": "long"}, "says context='long', which must be a valid integer"),
        ({"answer": "####"}, r"answer='####' must hold \{answer\} once"),
        ([], "where the prompt format must be a mapping"),
    ]:
        (hub / "config.json").write_text(json.dumps({"prompt_format": bad}))
        with pytest.raises(UserError, match=sentence):
            prompt_format(hub, FormatConfig())


def test_prompts_are_tokenised_by_segments(tokenizer: Tokenizer) -> None:
    """As in fine-tuning: with BOS before each segment where the format says so; a tokenizer without one is refused."""
    format = SFTFormat(question="Question: {question}", rationale=" {rationale}", segment_bos=True)
    bos = tokenizer.special_ids["bos"]
    first, second, third = tokenizer.encode(["Question: How many?", " 1+1=2", "#### 2"])
    shot = Problem(id="s", source="s", question="How many?", rationale="1+1=2", answer="2")
    asked = Problem(id="t", source="t", question="And how?", rationale="", answer="3")
    maker = PromptMaker(format, tokenizer, tokenizer.eos_id, [shot])
    before = [bos, *first, bos, *second, bos, *third, tokenizer.eos_id]
    assert maker.ids(asked) == [*before, bos, *tokenizer.encode(["Question: And how?"])[0]]
    with pytest.raises(UserError, match="format.segment_bos=true needs a tokenizer with a BOS token, which this model's has not"):
        PromptMaker(format, Letters(), 0, [])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"items": 0}, r"items=0 must lie in \[1, 1000000000\]; leave it out for all"),
        ({"shots": 3}, "shots=3 needs shots_data=FILE"),
        ({"shots_data": "x"}, "shots_data=x is read for shots only; add shots=N"),
        ({"confidence": 1.0}, r"confidence=1.0 must lie in \[0.5, 1\)"),
        ({"sampler": "greedy"}, "there is no sampler=greedy"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0"),
        ({"data": " "}, "data is empty; give the test problems"),
        ({"temperature": 0.0, "top_p": 0.5}, "top_p=0.5 means nothing at temperature=0"),
        ({"seed": -1}, "seed=-1 must lie in"),
        ({"throughput_items": -1}, "throughput_items=-1 must lie in"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        GSM8KEvaluation(**{"checkpoint": "runs/x", "data": "test.jsonl"} | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [({}, 0.0), ({"temperature": 0.2}, 0.2), ({"sampler": "ancestral"}, 1.0), ({"top_p": 0.9}, 1.0), ({"sampler": "psi", "temperature": 0.0}, 0.0)],
)
def test_the_temperature_that_is_not_given(fields: dict[str, Any], temperature: float) -> None:
    config = GSM8KEvaluation(checkpoint="runs/x", data="test.jsonl", **fields)
    assert config.sampling(config.sampler).temperature == temperature


def test_left_to_right_of_every_objective() -> None:
    config = GSM8KEvaluation(checkpoint="runs/x", data="test.jsonl")
    names = {objective: config.sampler_of(objective) for objective in ("ar", "mdlm", "duo", "esolm", "replaid", "mdm_prime")}
    assert names == {"ar": "ar"} | dict.fromkeys(("mdlm", "duo", "esolm", "replaid", "mdm_prime"), "left_to_right")


def test_hashes_of_models(tmp_path: Path) -> None:
    """Another weight or another configuration is another model; where the folder lies does not matter."""
    hashes = set()
    for folder, weights, text in [("a", b"1", "{}"), ("b", b"1", "{}"), ("c", b"2", "{}"), ("d", b"1", "{ }")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(weights)
        (tmp_path / folder / "config.json").write_text(text)
        hashes.add(checkpoint_hash(tmp_path / folder))
    assert len(hashes) == 3


def test_the_line_of_progress() -> None:
    now, stream = [0.0], io.StringIO()
    with EvaluationDisplay(100, 20, stream, clock=lambda: now[0]) as display:
        now[0] = 30.0
        display.show(24, 6, 100)
        now[0] = 80.0
        display.show(40, 10, 800)
        now[0] = 320.0
        display.show(100, 50, 8000)
    assert stream.getvalue().splitlines() == [
        "problem 40/100 | 0.25 problems/s, 10 tokens/s | ETA 4m00s | strict so far 25.0%",
        "problem 100/100 | 0.25 problems/s, 25 tokens/s | ETA 0s | strict so far 50.0%",
    ]
