"""Text as its publishers ship it: filters, columns inside columns, several sources, saved datasets, and files read in parts."""

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import zstandard

from data_prep import inputs
from data_prep.config import InputConfig, TokenizeConfig
from data_prep.prepare import prepare
from launchers.prepare_data import main
from pretrain.command_line import run_command
from pretrain.data.corpus import Corpus
from pretrain.data.manifest import Manifest, audit
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.data.examples import text, write_jsonl
from tests.data_prep.test_prepare import read_back, run

SETS = ["RedPajamaCommonCrawl", "RedPajamaGithub", "RedPajamaC4", "RedPajamaGithub", "RedPajamaBook"]


def records(sets: list[str | None]) -> list[dict[str, Any]]:
    return [{"text": f"the king of {number}", "meta": {"redpajama_set_name": name}} for number, name in enumerate(sets)]


def write_slimpajama(folder: Path) -> Path:
    """train/chunk1 and chunk2 with two files each, as the dataset has them."""
    for chunk in (1, 2):
        for number in (0, 1):
            path = folder / f"train/chunk{chunk}/example_train_{number}.jsonl.zst"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(record) + "\n" for record in records([*SETS]))
            path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    return folder / "train"


def launched(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *arguments])
    return run_command(main, when_memory_is_full="")


def test_slimpajama_without_github(tmp_path: Path, model_file: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    train, output = write_slimpajama(tmp_path), tmp_path / "out"
    assert launched(monkeypatch, "slimpajama_llama2", f"input={train}", f"tokenizer={model_file}", f"output={output}", "workers=1") == 0
    manifest = Manifest.load(output)
    assert manifest.counts == {"documents": 12, "empty": 0, "bad": 0, "filtered": 8}
    assert manifest.sources["main"].filtered == {"meta.redpajama_set_name=RedPajamaGithub": 8}
    assert read_back(output, tokenizer) == tokenizer.encode(["the king of 0", "the king of 2", "the king of 4"]) * 4
    assert not (output / "quarantine.jsonl").exists()


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(arrow.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def as_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = arrow.Table.from_pylist(rows)
    with arrow.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table)
    return path.with_suffix(".arrow")


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_arrow])
@pytest.mark.parametrize(
    ("filters", "kept", "filtered"),
    [
        ({"drop": {"meta.redpajama_set_name": "RedPajamaGithub"}}, [0, 2, 4, 5], {"RedPajamaGithub": 2}),
        ({"keep": {"meta.redpajama_set_name": ["RedPajamaC4", None]}}, [2, 5], {"RedPajamaBook": 1, "RedPajamaCommonCrawl": 1, "RedPajamaGithub": 2}),
        ({"drop": {"meta.redpajama_set_name": None}}, [0, 1, 2, 3, 4], {"null": 1}),
    ],
)
def test_filters_look_inside(
    write: Any, filters: dict[str, Any], kept: list[int], filtered: dict[str, int], tmp_path: Path, model_file: Path, tokenizer: Tokenizer
) -> None:
    source = write(tmp_path / "a.jsonl", records([*SETS, None]))
    manifest = run(source, tmp_path / "out", model_file, **filters)
    assert read_back(tmp_path / "out", tokenizer) == tokenizer.encode([f"the king of {number}" for number in kept])
    assert manifest.sources["main"].filtered == {f"meta.redpajama_set_name={name}": count for name, count in filtered.items()}
    with pytest.raises(UserError, match="holds a preparation with other (keep|drop)"):
        run(source, tmp_path / "out", model_file)


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_arrow])
def test_text_inside_and_keys_with_dots(write: Any, tmp_path: Path, model_file: Path, tokenizer: Tokenizer) -> None:
    rows = [{"content": {"body": {"text": "the king"}}, "a.b": {"c": 5}, "flag": True}]
    manifest = run(write(tmp_path / "a.jsonl", rows), tmp_path / "out", model_file, text_key="content.body.text", keep={"a.b.c": 5, "flag": [True]})
    assert manifest.documents == 1 and read_back(tmp_path / "out", tokenizer) == tokenizer.encode(["the king"])


@pytest.mark.parametrize(
    ("value", "kept"),
    [(0.5, [1, 2, 3]), (2, [0, 1, 3]), ([2.0, 0.25], [0, 3]), (1000000, [0, 1, 2]), ("0.5", [1, 2, 3])],
)  # fmt: skip
def test_numbers_are_compared_by_their_value(value: Any, kept: list[int], tmp_path: Path, model_file: Path, tokenizer: Tokenizer) -> None:
    scores = [0.5, 0.25, 2.0, 1e6]
    rows = [{"text": f"the king of {number}", "score": score} for number, score in enumerate(scores)]
    for write, rows_as in ((as_jsonl, rows), (as_parquet, rows), (as_parquet, [row | {"score": Decimal(str(row["score"]))} for row in rows])):
        folder = tmp_path / f"{write.__name__}_{type(rows_as[0]['score']).__name__}"
        folder.mkdir()
        run(write(folder / "a.jsonl", rows_as), folder / "out", model_file, drop={"score": value})
        assert read_back(folder / "out", tokenizer) == tokenizer.encode([f"the king of {number}" for number in kept])


def test_a_filter_that_looks_at_nothing_is_no_filter(tmp_path: Path, model_file: Path) -> None:
    """A mistyped key would let everything through: each record without it is unreadable, and a column that is missing is refused."""
    rows = records(SETS)
    with pytest.raises(UserError, match=r"5 of 5 records are unreadable.*no key 'meta.set'; it has 'text', 'meta', and inside 'redpajama_set_name'"):
        run(as_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out", model_file, drop={"meta.set": "x"})
    with pytest.raises(UserError, match=r"has no column 'meta.set'; it has text, meta: mend keep or drop"):
        run(as_parquet(tmp_path / "b.jsonl", rows), tmp_path / "out2", model_file, drop={"meta.set": "x"})
    with pytest.raises(UserError, match="is plain text and has no key 'a' to filter by"):
        (tmp_path / "c.txt").write_text("x")
        run(tmp_path / "c.txt", tmp_path / "out3", model_file, drop={"a": "x"})


def test_a_saved_dataset(tmp_path: Path, model_file: Path, tokenizer: Tokenizer) -> None:
    """By the library itself, with two files, beside its JSON and a cache that it left."""
    datasets = pytest.importorskip("datasets")
    rows = [text(3, seed) for seed in range(30)]
    datasets.Dataset.from_dict({"content": rows}).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    (tmp_path / "saved/cache-0123.arrow").write_bytes(b"left over")
    run(tmp_path / "saved", tmp_path / "out", model_file, text_key="content")
    assert read_back(tmp_path / "out", tokenizer) == tokenizer.encode(rows)


def test_several_sources_are_a_corpus_each(tmp_path: Path, model_file: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    as_parquet(tmp_path / "math.jsonl", [{"content": "one and one"}])
    write_jsonl(tmp_path / "web.jsonl", ["the king", "wakes"])
    sources = {
        "math": InputConfig(input=str(tmp_path / "math.parquet"), text_key="content"),
        "web": InputConfig(input=str(tmp_path / "web.jsonl")),
    }
    config = TokenizeConfig(sources=sources, tokenizer=str(model_file), output=str(tmp_path / "out"), workers=1)
    made = prepare(config)
    assert {name: manifest.documents for name, manifest in made.items()} == {"math": 1, "web": 2}
    assert made["math"].sources.keys() == {"math"} and {shard.source for shard in made["math"].shards} == {"math"}
    for name, manifest in made.items():
        assert not any(problem for _, problem in audit(tmp_path / "out" / name, manifest))
        assert Corpus(tmp_path / "out" / name).tokens == manifest.tokens
    assert read_back(tmp_path / "out/web", tokenizer) == tokenizer.encode(["the king", "wakes"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["math", "web"]
    assert prepare(config) == made and "already prepared" in capsys.readouterr().err


def test_mistakes_about_sources(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    common = (f"tokenizer={model_file}", f"output={tmp_path}/out")
    for arguments, sentence in (
        ((f"input={path}", "sources={a: {input: b}}"), "input and sources are both set"),
        (("sources={a/b: {input: b}}",), "sources.a/b must be named with letters"),
        ((f"sources={{a: {{input: {path}}}, b: {{input: {path}}}}}",), "belongs to the sources a and b"),
        ((), "no text is named; give input=PATH"),
        ((f"input={path}", "keep={a: []}"), "must map a key"),
        ((f"input={path}", "keep={a: 1}", "drop={a: 2}"), "keep and drop both look at a"),
        ((f"input={path}", "drop={score: [0.5, {b: 1}]}"), "drop={score: {b: 1}} must map score to text, a number, true, false or null, or to a"),
        ((f"input={path}", "drop={score: nan}"), "drop={score: nan} must map score to"),
        ((f"input={path}", "text_key=' '"), "text_key=' ' is empty"),
    ):
        assert launched(monkeypatch, "tokenize", *common, *arguments) == 64
        assert sentence in capsys.readouterr().err
    assert launched(monkeypatch, "tokenize", *common, f"sources.web.input={path}", "workers=1") == 0
    assert Manifest.load(tmp_path / "out/web").documents == 1


def test_a_source_without_text_is_named(tmp_path: Path, model_file: Path) -> None:
    sources = {
        "a": InputConfig(input=str(write_jsonl(tmp_path / "a.jsonl", ["x"]))),
        "b": InputConfig(input=str(write_jsonl(tmp_path / "b.jsonl", [""]))),
    }
    with pytest.raises(UserError, match="the source b holds no text: 1 empty"):
        prepare(TokenizeConfig(sources=sources, tokenizer=str(model_file), output=str(tmp_path / "out"), workers=1))


@pytest.mark.parametrize("phase", ["nemotron_phase1", "nemotron_phase2"])
def test_nemotrons_subsets(phase: str, tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    common = (f"tokenizer={model_file}", f"output={tmp_path}/out", "workers=1")
    assert launched(monkeypatch, phase, *common) == 64 and f"{phase} needs root=…" in capsys.readouterr().err
    assert launched(monkeypatch, phase, *common, f"root={tmp_path}/down") == 64
    assert f"input {tmp_path}/down/Nemotron-CC-v2/High-Quality does not exist" in capsys.readouterr().err
    names = ["CC-v2/High-Quality", "CC-v2/High-Quality-Synthetic", "CC-v2/Diverse-QA", "CC-v2/Translated-Diverse-QA", "CC-Math-v1/4plus",
             "CC-Math-v1/4plus_MIND", "CC-v2/Medium-High-Quality", "CC-v2/Medium-Quality", "CC-Math-v1/3"]  # fmt: skip
    for name in names:
        (tmp_path / f"down/Nemotron-{name}").mkdir(parents=True)
        as_parquet(tmp_path / f"down/Nemotron-{name}/part_000000.x", [{"text": name, "id": 5}])
    absent = [f"~sources.{name}" for name in ("code_synthetic", "sft_code", "sft_general", "sft_math")]
    assert launched(monkeypatch, phase, *common, f"root={tmp_path}/down", *absent) == 0, capsys.readouterr().err
    assert len(list((tmp_path / "out").iterdir())) == (9 if phase == "nemotron_phase1" else 6)
    assert Manifest.load(tmp_path / "out/math_4plus_mind").documents == 1


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_large_file_is_read_in_parts(kind: str, tmp_path: Path, model_file: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line once, in order, wherever the cuts fall; bad ones with their line in the whole file."""
    monkeypatch.setattr(inputs, "_LEAST_SPLIT", 1)
    texts = [text(1 + seed % 7, seed) for seed in range(40)]
    lines: list[bytes] = [json.dumps({"text": document}).encode() for document in texts]
    for place in (33, 20, 3):
        lines.insert(place, b"{broken")
    if kind == ".jsonl":
        (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    else:
        rows: list[str | None] = [*texts]
        for place in (33, 20, 3):
            rows.insert(place, None)
        parquet.write_table(arrow.table({"text": rows}), tmp_path / "a.parquet", row_group_size=4)
    for shard_bytes in (23, 100, 1000) if kind == ".jsonl" else (1, 300):
        output = tmp_path / f"out{shard_bytes}"
        manifest = run(tmp_path / f"a{kind}", output, model_file, shard_bytes=shard_bytes, max_bad_fraction=0.5)
        assert read_back(output, tokenizer) == tokenizer.encode(texts)
        entries = [json.loads(line) for line in (output / "quarantine.jsonl").read_text().splitlines()]
        assert [(entry["file"], entry["line"]) for entry in entries] == [(f"a{kind}", line) for line in (4, 22, 36)]
        assert len(manifest.shards) > 1 and not any("from" in entry for entry in entries)
