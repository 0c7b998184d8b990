"""GSM8K's published forms and generated problems: what is read, set aside, refused."""

import json
from fractions import Fraction
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from data_prep.gsm8k import write_gsm8k
from data_prep.gsm_symbolic import write_symbolic
from data_prep.problem_config import Gsm8kConfig, GsmSymbolicConfig
from data_prep.symbolic_templates import BROKEN, load_templates
from pretrain.data.gsm8k_readers import read_problems
from pretrain.data.problems import Problem, answer_value, problem_lines, read_problem_file
from pretrain.errors import UserError

QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did she sell altogether?"
ANSWER = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"


def original(path: Path, *pairs: tuple[str, str]) -> Path:
    path.write_text("".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in pairs), encoding="utf-8")
    return path


def test_the_original_form(tmp_path: Path) -> None:
    source = original(tmp_path / "train.jsonl", (QUESTION, ANSWER), ("And $5?", "#### -1,234.50"))
    write_gsm8k(Gsm8kConfig(input=str(source), output=str(tmp_path / "out.jsonl")))
    assert read_problem_file(tmp_path / "out.jsonl") == [
        Problem(id="train-1", source="train", question=QUESTION, rationale=ANSWER.removesuffix("\n#### 72"), answer="72"),
        Problem(id="train-2", source="train", question="And $5?", rationale="", answer="-1,234.50"),
    ]
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["problems"], report["bad_lines"], report["different_questions"]) == (2, 0, 2)


def test_parquet_reads_as_json_lines_do(tmp_path: Path) -> None:
    source = original(tmp_path / "train.jsonl", (QUESTION, ANSWER), ("b", "c #### 3"))
    parquet.write_table(arrow.table({"question": [QUESTION, "b"], "answer": [ANSWER, "c #### 3"]}), tmp_path / "train.parquet")
    found, expected = (list(read_problems(path, "original")) for path in (tmp_path / "train.parquet", source))
    assert [line.problem for line in found] == [line.problem for line in expected]


def test_the_augmented_form(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\xef\xbb\xbfOut of 600?||<<600*30/100=180>> <<180*2=360>> #### 360\n\nNo steps?||#### .5\n")
    problems = [line.problem for line in read_problems(path, "augmented")]
    assert problems == [
        Problem(id="train-1", source="train", question="Out of 600?", rationale="<<600*30/100=180>> <<180*2=360>>", answer="360"),
        Problem(id="train-3", source="train", question="No steps?", rationale="", answer=".5"),
    ]


BAD_ORIGINAL = [
    (b'{"question": "a", "answer": "no mark"}', "no #### before a final answer"),
    (b'{"question": "a", "answer": "#### 1 #### 2"}', "2 times ####, where one must be"),
    (b'{"question": "a", "answer": "b ####  "}', "nothing after ####"),
    (b'{"question": "a", "answer": "b #### many"}', "the answer 'many' is not a number"),
    (b'{"question": "a", "answer": "b #### 1/0"}', "the answer '1/0' is not a number"),
    (b'{"question": "a", "answer": "b #### 1,23"}', "the answer '1,23' is not a number"),
    (b'{"question": "a", "answer": "b #### ' + b"9" * 500 + b'"}', "is not a number"),
    (b'{"question": "  ", "answer": "b #### 1"}', "the question is empty"),
    (b'{"question": null, "answer": "b #### 1"}', "'question' is null, not a string"),
    (b'{"question": "a", "answer": 72}', "'answer' is a int, not a string"),
    (b'{"question": "a"}', "no key 'answer'; it has 'question'"),
    (b"{}", "no key 'question'; it has none"),
    (b"[1, 2]", "a JSON list, where an object"),
    (b"{'question': 1}", "not JSON: "),
    (b'{"question": "a", "answer": "b #### 1"', "not JSON: "),
    (b"[" * 5000, "not JSON: "),
    (b'{"question": "\xff", "answer": "b #### 1"}', "not UTF-8: byte 0xff at offset 14"),
    (b'{"question": "\\ud800", "answer": "b #### 1"}', "lone surrogate"),
    (b"\x00", "not JSON: "),
]
BAD_AUGMENTED = [
    (b"no separator #### 1", "0 times '||'"),
    (b"a||b||c #### 1", "2 times '||'"),
    (b"a||b", "no #### before a final answer"),
    (b"||b #### 1", "the question is empty"),
    (b"a||b #### x", "the answer 'x' is not a number"),
    (b"a||\xc3 #### 1", "not UTF-8"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_ORIGINAL, ids=range(len(BAD_ORIGINAL)))
def test_bad_lines_of_the_original_form(tmp_path: Path, line: bytes, reason: str) -> None:
    _check_bad(tmp_path / "train.jsonl", json.dumps({"question": QUESTION, "answer": ANSWER}).encode(), line, reason, "original")


@pytest.mark.parametrize(("line", "reason"), BAD_AUGMENTED, ids=range(len(BAD_AUGMENTED)))
def test_bad_lines_of_the_augmented_form(tmp_path: Path, line: bytes, reason: str) -> None:
    _check_bad(tmp_path / "train.txt", b"a||b #### 1", line, reason, "augmented")


def _check_bad(path: Path, good: bytes, line: bytes, reason: str, kind: str) -> None:
    """A bad line between two good ones: quarantined with its place and reason within the budget, refused above it, with nothing written."""
    path.write_bytes(good + b"\n" + line + b"\n" + good)
    output = path.with_name("out.jsonl")
    with pytest.raises(UserError) as refused:
        write_gsm8k(Gsm8kConfig(input=str(path), output=str(output), kind=kind))  # type: ignore[arg-type]
    said = str(refused.value)
    assert said.startswith("1 of 3 lines cannot be read as a problem, more than max_bad_fraction=0.001; ") and reason in said
    assert f"the first is line 2 of {path}: " in said
    assert "accept them with max_bad_fraction=0.37" in said and not output.exists()
    write_gsm8k(Gsm8kConfig(input=str(path), output=str(output), kind=kind, max_bad_fraction=0.37))  # type: ignore[arg-type]
    assert [problem.id for problem in read_problem_file(output)] == ["train-1", "train-3"]
    (entry,) = [json.loads(text) for text in output.with_name("out.jsonl.quarantine.jsonl").read_text().splitlines()]
    assert (entry["file"], entry["line"]) == (str(path), 2) and reason in entry["reason"]


def test_files_that_are_none(tmp_path: Path) -> None:
    def refused(**settings: object) -> str:
        with pytest.raises(UserError) as error:
            write_gsm8k(Gsm8kConfig(output=str(tmp_path / "out.jsonl"), **settings))  # type: ignore[arg-type]
        return str(error.value)

    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "prose.txt").write_bytes(b"once upon a time\n")
    assert "missing.jsonl cannot be read (No such file or directory)" in refused(input=str(tmp_path / "missing.jsonl"))
    assert "holds no line; give a file with problems" in refused(input=str(tmp_path / "empty.jsonl"))
    assert "is damaged or not Parquet" in refused(input=str(tmp_path / "a.parquet"))
    assert "is not a file of the kind original, which ends in .jsonl or .json or .parquet" in refused(input="train.jsonl.gz")
    assert "or set another kind= than augmented" in refused(input=str(tmp_path / "prose.txt"), kind="augmented")
    assert "output=out must end in .jsonl, for example out.jsonl" in str(pytest.raises(UserError, Gsm8kConfig, input="a", output="out").value)
    assert not (tmp_path / "out.jsonl").exists()


def test_overlap_with_held_out_problems_is_refused(tmp_path: Path) -> None:
    inside = " ".join(f"word{number}" for number in range(40))
    test = original(
        tmp_path / "test.jsonl",
        (QUESTION.upper().replace(",", " ,"), "#### 72"),  # equal after normalisation
        (inside + "?", "#### 1"),  # its words stand inside a training problem
        (inside[: len(inside) // 4] + " other words that nobody else has written down here at all, and so on and so forth?", "#### 1"),
        *((f"Some question of its own, number {number}?", "#### 1") for number in range(17)),
    )
    train = original(tmp_path / "train.jsonl", (QUESTION, ANSWER), (f"Before. {inside} And after.", "#### 1"))
    config = Gsm8kConfig(input=str(train), output=str(tmp_path / "out.jsonl"), against=str(test))
    with pytest.raises(UserError, match=r"2 of 20 held-out .* max_overlap=0.01: test-1 in train-1 \(equal\), test-2 in train-2 \(100%\); .*=0.11"):
        write_gsm8k(config)
    assert not (tmp_path / "out.jsonl").exists()
    write_gsm8k(Gsm8kConfig(input=str(train), output=str(tmp_path / "out.jsonl"), against=str(test), max_overlap=0.1))
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["held_out_problems"], report["held_out_contained"], report["held_out_equal"]) == (20, 2, 1)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_bytes(problem_lines([line.problem for line in read_problems(test, "original") if line.problem]))
    with pytest.raises(UserError, match="2 of 20 held-out problems"):
        write_gsm8k(Gsm8kConfig(input=str(train), output=str(tmp_path / "again.jsonl"), against=str(held_out)))


def test_an_output_is_written_once(tmp_path: Path) -> None:
    source, output = original(tmp_path / "train.jsonl", (QUESTION, ANSWER)), tmp_path / "out.jsonl"
    config = Gsm8kConfig(input=str(source), output=str(output))
    assert write_gsm8k(config) == write_gsm8k(config) == output
    output.write_text("mine\n")
    with pytest.raises(UserError, match="exists and holds something else"):
        write_gsm8k(config)
    assert output.read_text() == "mine\n"
    with pytest.raises(UserError, match="line 1 of .* is not JSON"):
        read_problem_file(output)


def test_templates_are_100_without_the_broken_ones() -> None:
    assert sorted({*load_templates(), *BROKEN}) == list(range(100)) and not set(load_templates()) & BROKEN


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="reasoning-gym, which is not installed here; install it: pip install --no-deps reasoning-gym=="):
        load_templates()


def test_symbolic_problems(tmp_path: Path) -> None:
    config = GsmSymbolicConfig(output=str(tmp_path), count=300, test_count=60, text_count=50, easiest=10)
    write_symbolic(config)
    train, test = (read_problem_file(tmp_path / f"{split}.jsonl") for split in ("train", "test"))
    texts = [json.loads(line)["text"] for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    assert (len(train), len(test), len(texts)) == (300, 60, 50)
    assert len({problem.template for problem in train}) == 10 and {problem.template for problem in test} == {problem.template for problem in train}
    questions = {problem.question for problem in train}
    held_out = {problem.question for problem in test}
    assert len(questions) == 300 and len(held_out) == 60 and not questions & held_out
    assert not any(question in text for question in held_out for text in texts)
    assert len({problem.id for problem in train + test}) == 360
    before = (tmp_path / "train.jsonl").read_bytes()
    write_symbolic(config)
    assert (tmp_path / "train.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="train.jsonl exists and holds something else"):
        write_symbolic(GsmSymbolicConfig(output=str(tmp_path), count=300, seed=1))


def test_a_templates_last_equation_is_its_answer(tmp_path: Path) -> None:
    """Template 10 (ages: two equations) worked out again from the numbers of its question."""
    write_symbolic(GsmSymbolicConfig(output=str(tmp_path), count=50, test_count=5, templates=[10]))
    for problem in read_problem_file(tmp_path / "train.jsonl"):
        age, years, times = (int(word) for word in problem.question.split() if word.isdigit())
        assert answer_value(problem.answer) == age * times - years


def test_more_problems_than_the_templates_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 template cannot make more than [\d,]+ different train questions, and 100,000 are wanted"):
        write_symbolic(GsmSymbolicConfig(output=str(tmp_path), count=100_000, test_count=0, templates=[43]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"templates": [32]}, "template 32 is marked as broken"),
        ({"templates": [100]}, "there is no template 100; templates have the numbers 0 to 99"),
        ({"templates": [1, 1]}, "must name at least one template, and each once"),
        ({"templates": [1], "easiest": 2}, "both choose templates"),
        ({"easiest": 90}, "easiest=90 is more than the 85 templates"),
        ({"difficulty": 0.5}, "difficulty=0.5 must"),
        ({"count": 0}, "count=0 must"),
    ],
)
def test_symbolic_mistakes(tmp_path: Path, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        write_symbolic(GsmSymbolicConfig(output=str(tmp_path), **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "value"),
    [("72", 72), ("-3", -3), ("1,234", 1234), ("$5.50", Fraction(11, 2)), ("25%", 25), ("3/4", Fraction(3, 4)), (".5", Fraction(1, 2)), ("", None),
     ("-", None), ("$", None), ("1,23", None), ("1/0", None), ("1.2.3", None), ("12a", None), ("٣", None)],
)  # fmt: skip
def test_answers_of_data_sets(answer: str, value: object) -> None:
    assert answer_value(answer) == value
