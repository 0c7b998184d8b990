"""Planted evaluation items in raw and prepared corpora: found where they were put, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from data_prep.contamination import report_contamination
from data_prep.report_config import ContaminationConfig
from pretrain.errors import UserError
from tests.data.examples import prepared, write_jsonl

LAUNCHER = Path(__file__).resolve().parents[2] / "launchers/prepare_data.py"


def sentence(start: int, count: int) -> str:
    return " ".join(f"w{number}" for number in range(start, start + count))


def noise(seed: int, words: int = 50) -> str:
    return " ".join(f"n{number}" for number in np.random.default_rng(seed).integers(0, 300, words))


ITEMS = [
    {"question": sentence(0, 20) + "?", "answer": sentence(100, 5) + " <<1+1=2>>2\n#### 2"},  # planted whole
    {"question": sentence(200, 30), "answer": "#### 7"},  # planted in part: words 10 to 24
    {"question": sentence(300, 20), "answer": "#### 7"},  # one word short of an n-gram
    {"question": sentence(400, 9), "answer": "#### 7"},  # shorter than an n-gram, planted whole
    {"question": sentence(500, 9), "answer": "#### 7"},  # shorter than an n-gram, planted but for a word
    {"question": "too short", "answer": "#### 7"},
]
PLANTED = {
    3: f"{noise(3)} {sentence(0, 20).upper()}!!! {noise(4)}",
    7: f"{sentence(210, 15)} {noise(7)}",
    8: f"{noise(8)} {sentence(304, 12)}",
    11: f"{noise(9)} ({sentence(400, 9)})",
    12: f"{noise(10)} {sentence(500, 8)}",
    15: f"{noise(11)} {sentence(0, 14)}",
}


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """20 documents; numbers 3, 7, 8, 11, 12 and 15 hold what is planted."""
    return [PLANTED.get(number, noise(number)) for number in range(20)]


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    path = tmp_path / "eval" / "test.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    return path


def check(report: dict, output: Path, expected_file: dict[int, tuple[str, int]]) -> None:
    (found,) = report["sets"]
    assert (found["items"], found["items_touched"], found["items_half_found"], found["longest_run"]) == (6, 3, 2, 20)
    # 8 + 18 + 8 + 1 + 1 n-grams; of them 8, 15 - 13 + 1 = 3, and 1 are planted; nothing of "too short" is looked for
    assert (found["ngrams"], found["ngrams_found"], found["items_not_searched"]) == (36, 12, 1)
    by_item = {item["item"]: item for item in found["touched"]}
    assert by_item["1"] == {"item": "1", "share": 1.0, "longest_run": 20, "hits": 2}
    assert by_item["2"] == {"item": "2", "share": pytest.approx(3 / 18), "longest_run": 15, "hits": 1}
    assert by_item["4"] == {"item": "4", "share": 1.0, "longest_run": 9, "hits": 1}
    hits = {(hit["item"], hit["file"], hit["document"]): hit for hit in map(json.loads, (output / "hits.jsonl").read_text().splitlines())}
    assert set(hits) == {(item, *expected_file[number]) for item, number in (("1", 3), ("1", 15), ("2", 7), ("4", 11))}
    assert hits["2", *expected_file[7]]["text"] == sentence(210, 15) and hits["1", *expected_file[15]]["words"] == 14


def test_raw_text(tmp_path: Path, corpus: list[str], evaluation: Path) -> None:
    (tmp_path / "text").mkdir()
    paths = [write_jsonl(tmp_path / "text" / f"{part}.jsonl", corpus[10 * part : 10 * part + 10]) for part in range(2)]
    output = tmp_path / "report"
    config = ContaminationConfig(corpus=str(tmp_path / "text"), against=str(evaluation), output=str(output), workers=1)
    report = report_contamination(config)
    check(report, output, {number: (str(paths[number // 10]), number % 10 + 1) for number in range(20)})
    counts = report["sources"][str(tmp_path / "text")]
    assert (counts["documents"], counts["unreadable"], counts["touched_documents"], counts["items"]) == (20, 0, 4, 3)
    assert counts["words"] == sum(len(text.split()) for text in corpus)
    before = (output / "report.json").read_bytes()
    assert report_contamination(config) == json.loads(before) and (output / "report.json").read_bytes() == before
    with pytest.raises(UserError, match="holds a report with other settings; choose another output"):
        report_contamination(ContaminationConfig(corpus=str(tmp_path / "text"), against=str(evaluation), output=str(output), ngram=8))


def test_a_prepared_corpus_in_two_processes(tmp_path: Path, corpus: list[str], evaluation: Path, model_file: Path) -> None:
    folder = prepared(tmp_path / "c", model_file, corpus, files=2).folder  # document i is number i // 2 of shard i % 2
    output = tmp_path / "report"
    settings = {"corpus": str(folder), "against": str(evaluation), "output": str(output), "workers": 2}
    with pytest.raises(UserError, match="holds token ids, which only its tokenizer can read: add tokenizer=FILE"):
        report_contamination(ContaminationConfig(**settings))  # type: ignore[arg-type]
    report = report_contamination(ContaminationConfig(**settings, tokenizer=str(model_file)))  # type: ignore[arg-type]
    check(report, output, {number: (str(folder / f"shard_{number % 2:05d}"), number // 2) for number in range(20)})


def test_what_was_cut_off_continues(tmp_path: Path, corpus: list[str], evaluation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in range(2):
        write_jsonl(tmp_path / "text" / f"{part}.jsonl", corpus[10 * part : 10 * part + 10])
    output = tmp_path / "report"
    config = ContaminationConfig(corpus=str(tmp_path / "text"), against=str(evaluation), output=str(output), workers=1)
    from data_prep import contamination

    read = []
    documents = contamination.documents

    def failing(unit):  # type: ignore[no-untyped-def]
        read.append(unit.number)
        if unit.number == 1 and len(read) == 2:
            raise KeyboardInterrupt
        return documents(unit)

    monkeypatch.setattr(contamination, "documents", failing)
    with pytest.raises(KeyboardInterrupt):
        report_contamination(config)
    assert not (output / "report.json").exists()
    report = report_contamination(config)
    assert read == [0, 1, 1]
    monkeypatch.undo()
    fresh = report_contamination(ContaminationConfig(**{**vars(config), "output": str(tmp_path / "fresh")}))
    assert fresh["sets"] == report["sets"] and (tmp_path / "fresh" / "hits.jsonl").read_bytes() == (output / "hits.jsonl").read_bytes()
    assert sorted(path.name for path in output.iterdir()) == ["hits.jsonl", "report.json"]


def test_long_documents_are_searched_across_pieces(tmp_path: Path, evaluation: Path) -> None:
    text = " ".join(["filler"] * 149_790) + " " + sentence(0, 20) + " " + " ".join(["filler"] * 1000)
    assert text.index("w0 ") < 1 << 20 and text.index("w19") > (1 << 20) - 60  # the item lies across the end of the first piece
    write_jsonl(tmp_path / "text" / "a.jsonl", [text])
    output = tmp_path / "report"
    report = report_contamination(ContaminationConfig(corpus=str(tmp_path / "text"), against=str(evaluation), output=str(output), workers=1))
    assert report["sets"][0]["longest_run"] == 20


def test_masked_numbers_find_changed_problems(tmp_path: Path) -> None:
    evaluation = tmp_path / "e.jsonl"
    evaluation.write_text(json.dumps({"question": "Tom has 5 apples and buys 12 more, then eats 3. How many apples has Tom left?"}) + "\n")
    write_jsonl(tmp_path / "text" / "a.jsonl", ["Tom has 7 apples and buys 1,000 more, then eats 8. How many apples has Tom left?"])
    touched = []
    for mask in (False, True):
        settings = {"corpus": str(tmp_path / "text"), "against": str(evaluation), "output": str(tmp_path / f"r{mask}"), "workers": 1}
        touched.append(report_contamination(ContaminationConfig(**settings, mask_numbers=mask))["sets"][0]["items_touched"])  # type: ignore[arg-type]
    assert touched == [0, 1]


def test_keys_and_formats_of_evaluation_sets(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "text" / "a.jsonl", [sentence(0, 20), sentence(100, 20)])
    nested = {"id": "x-1", "doc": {"query": sentence(0, 15)}, "choices": ["one", sentence(100, 15)]}
    (tmp_path / "a.jsonl").write_text(json.dumps(nested) + "\n")
    parquet.write_table(arrow.table({"question": [sentence(0, 15)], "answer": ["#### 1"]}), tmp_path / "b.parquet")

    def run(name: str, **settings: object) -> dict:
        paths = {"corpus": str(tmp_path / "text"), "output": str(tmp_path / name), "workers": 1}
        return report_contamination(ContaminationConfig(**paths, **settings))["sets"][0]  # type: ignore[arg-type]

    found = run("r1", against=str(tmp_path / "a.jsonl"), keys=["doc.query", "choices"])
    assert found["touched"] == [{"item": "x-1", "share": 1.0, "longest_run": 15, "hits": 2}] and found["texts_too_short"] == 1
    assert run("r2", against=str(tmp_path / "b.parquet"))["items_touched"] == 1
    with pytest.raises(UserError, match=r"line 1 of .*a.jsonl has none of question, rationale, answer; it has id, doc, choices: set keys="):
        run("r3", against=str(tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match="has no key doc.text; it has id, doc, choices"):
        run("r3", against=str(tmp_path / "a.jsonl"), keys=["doc.text"])
    with pytest.raises(UserError, match="doc in line 1 of .* is neither a string nor a list of strings"):
        run("r3", against=str(tmp_path / "a.jsonl"), keys=["doc"])
    (tmp_path / "bad.jsonl").write_text("{}\n{")
    (tmp_path / "none.jsonl").write_text("\n")
    for name, said in (("bad.jsonl", "has none of"), ("none.jsonl", "holds no item"), ("missing.jsonl", "cannot be read")):
        with pytest.raises(UserError, match=said):
            run("r3", against=str(tmp_path / name))
    assert not (tmp_path / "r3").exists()
    with pytest.raises(UserError, match="shortest=9 must not exceed ngram=8"):
        run("r3", against="a", ngram=8, shortest=9)


def test_the_launcher(tmp_path: Path, corpus: list[str], evaluation: Path) -> None:
    write_jsonl(tmp_path / "text" / "a.jsonl", corpus)
    arguments = ["contamination", "corpus=text", f"against=[{evaluation}]", "output=report"]
    result = subprocess.run([sys.executable, str(LAUNCHER), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "12 of 36 (33.33%)" in result.stdout, result.stderr
    assert (tmp_path / "report" / "hits.jsonl").exists()
