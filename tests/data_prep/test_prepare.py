"""Text in, tokens out: round trips, bad input, interruptions."""

import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.config import TokenizeConfig
from data_prep.prepare import prepare
from pretrain.data.corpus import Corpus
from pretrain.data.manifest import Manifest, audit
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.data.examples import text, write_jsonl

TEXTS = ["To be,\nor not", "", " \n\t", "\x00 NUL", "日本語 \N{SLIGHTLY SMILING FACE}", text(50, 1), "</s>"]


def run(given: object, output: Path, model: Path, **options: Any) -> Manifest:
    inputs = [str(path) for path in given] if isinstance(given, list) else str(given)
    return prepare(TokenizeConfig(input=inputs, output=str(output), tokenizer=str(model), **({"workers": 1} | options)))["main"]


def read_back(folder: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Documents of a corpus, each without its end-of-document id."""
    corpus = Corpus(folder)
    ids, documents = corpus.read(0, corpus.tokens)
    rows = [ids[documents == number].tolist() for number in range(documents[-1] + 1)]
    assert all(row[-1] == tokenizer.eos_id for row in rows)
    return [row[:-1] for row in rows]


def kept(texts: list[str]) -> list[str]:
    return [document for document in texts if document.strip()]


documents = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(documents=documents.filter(kept), shards=st.integers(1, 3))
def test_what_is_read_back_is_the_tokenisation_of_what_was_written(
    documents: list[str], shards: int, model_file: Path, tokenizer: Tokenizer
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(shards):
            write_jsonl(Path(folder) / f"text/{number}.jsonl", documents)
        manifest = run(Path(folder) / "text", Path(folder) / "out", model_file, shard_bytes=1)
        assert read_back(Path(folder) / "out", tokenizer) == tokenizer.encode(kept(documents)) * shards
        empty = shards * (len(documents) - len(kept(documents)))
        assert manifest.counts == {"documents": shards * len(kept(documents)), "empty": empty, "bad": 0, "filtered": 0}
        assert not any(problem for _, problem in audit(Path(folder) / "out", manifest))


def write_as(kind: str, folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    lines = b"".join(json.dumps({"text": document, "meta": {"a": 1}}).encode() + b"\n" for document in texts)
    if kind in (".txt", ".md"):
        for number, document in enumerate(texts):
            (folder / f"{number:03d}{kind}").write_bytes(document.encode())
    elif kind == ".parquet":
        parquet.write_table(arrow.table({"id": range(len(texts)), "text": texts}), folder / "a.parquet", row_group_size=2)
    elif kind == ".jsonl.zst":  # two frames, the second without its content size
        half, compressor = lines.find(b"\n", len(lines) // 2) + 1, zstandard.ZstdCompressor()
        (folder / "a.jsonl.zst").write_bytes(compressor.compress(lines[:half]) + compressor.compressobj().compress(b"") + stream_zstd(lines[half:]))
    elif kind == ".jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    else:
        (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n") + b"\n\n")
    return folder


def stream_zstd(content: bytes) -> bytes:
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(content) + stream.flush()


@pytest.mark.parametrize("kind", [".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_every_kind_of_file(kind: str, tmp_path: Path, model_file: Path, tokenizer: Tokenizer) -> None:
    manifest = run(write_as(kind, tmp_path / "text", TEXTS), tmp_path / "out", model_file)
    assert read_back(tmp_path / "out", tokenizer) == tokenizer.encode(kept(TEXTS))
    assert manifest.counts["empty"] == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "shard_00000.bin", "shard_00000.idx"]


def test_manifest_says_what_is_there(tmp_path: Path, model_file: Path, tokenizer: Tokenizer) -> None:
    manifest = run(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", model_file)
    assert Manifest.load(tmp_path / "out") == manifest
    assert (manifest.dtype, manifest.tokenizer.size, manifest.tokenizer.eos_id) == ("uint16", tokenizer.size, 2)
    assert manifest.tokenizer.hash == tokenizer.hash
    assert manifest.tokens == sum(len(ids) + 1 for ids in tokenizer.encode(kept(TEXTS))) == manifest.shards[0].bin_bytes // 2


def test_workers_change_nothing(tmp_path: Path, model_file: Path) -> None:
    for number in range(4):
        write_jsonl(tmp_path / f"text/{number}.jsonl", [text(20, 10 * number + i) for i in range(5)])
    one, two = (run(tmp_path / "text", tmp_path / f"out{workers}", model_file, shard_bytes=1, workers=workers) for workers in (1, 2))
    assert one == two and len(one.shards) == 4


def test_running_again_does_nothing_and_says_so(tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = run(source, tmp_path / "out", model_file)
    os.utime(source)
    assert run(source, tmp_path / "out", model_file, workers=2, max_bad_fraction=0.5) == first
    assert "already prepared" in capsys.readouterr().err
    with (tmp_path / "out/shard_00000.bin").open("r+b") as stream:
        stream.truncate(4)
    with pytest.raises(UserError, match="cut off"):
        run(source, tmp_path / "out", model_file)
    write_jsonl(source, [*TEXTS, "more"])
    with pytest.raises(UserError, match="other inputs"):
        run(source, tmp_path / "out", model_file)


def test_foreign_outputs_are_left_alone(tmp_path: Path, model_file: Path) -> None:
    source = write_jsonl(tmp_path / "text/a.jsonl", TEXTS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and was not written by prepare_data"):
        run(source, tmp_path / "out", model_file)
    for blocked in (source, source / "out", tmp_path / "link" / "out"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "nothing")
        with pytest.raises(UserError, match=rf"^cannot write {blocked} \(Not a directory\): a file is in the way"):
            run(source, blocked, model_file)
    with pytest.raises(UserError, match=r"\(File name too long\): choose a shorter name"):
        run(source, tmp_path / ("a" * 300), model_file)
    with pytest.raises(UserError, match="inside the input folder"):
        run(tmp_path / "text", tmp_path / "text/out", model_file)


BAD_LINES = [
    (b"{broken", "not JSON"),
    (b'{"text": "\xff"}', "not UTF-8: byte 0xff"),
    (b'["text"]', "a JSON list where an object"),
    (b'{"content": "x"}', "no key 'text'; it has 'content'"),
    (b'{"text": null}', "the text is null"),
    (b'{"text": {"a": 1}}', "the text is a dict"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b"[" * 100_000, "not JSON"),
]


def test_bad_lines_go_to_quarantine(tmp_path: Path, model_file: Path, tokenizer: Tokenizer) -> None:
    lines = [line for bad, _ in BAD_LINES for line in (b'{"text": "good"}', bad)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"8 of 16 records are unreadable, more than max_bad_fraction=0\.001, .*not JSON.*; see .*quarantine\.jsonl"):
        run(tmp_path / "a.jsonl", tmp_path / "out", model_file)
    manifest = run(tmp_path / "a.jsonl", tmp_path / "out", model_file, max_bad_fraction=0.5)
    assert manifest.counts == {"documents": 8, "empty": 0, "bad": 8, "filtered": 0}
    assert read_back(tmp_path / "out", tokenizer) == tokenizer.encode(["good"] * 8)
    found = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in found] == [("a.jsonl", 2 * n) for n in range(1, 9)]
    for entry, (_, reason) in zip(found, BAD_LINES, strict=True):
        assert reason in entry["reason"]


def test_text_that_is_not_utf8_and_null_parquet_rows(tmp_path: Path, model_file: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_bytes(b"one\ntwo\xfe")
    parquet.write_table(arrow.table({"text": ["x", None, ""]}), tmp_path / "text/b.parquet")
    manifest = run(tmp_path / "text", tmp_path / "out", model_file, max_bad_fraction=1.0)
    assert manifest.counts == {"documents": 1, "empty": 1, "bad": 2, "filtered": 0}
    entries = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in entries] == [("text/a.txt", 2), ("text/b.parquet", 2)]


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("damage", ["cut", "nonsense"])
def test_damaged_files_stop_with_their_name(kind: str, damage: str, tmp_path: Path, model_file: Path) -> None:
    path = next(write_as(kind, tmp_path / "text", [text(300, seed) for seed in range(20)]).iterdir())
    path.write_bytes(path.read_bytes()[:-20] if damage == "cut" else b"nonsense" * 50)
    with pytest.raises(UserError, match=f"a{kind} is damaged"):
        run(tmp_path / "text", tmp_path / "out", model_file)
    assert not list((tmp_path / "out").glob("shard_*"))


def test_inputs_that_do_not_serve(tmp_path: Path, model_file: Path) -> None:
    source = write_jsonl(tmp_path / "text/a.jsonl", ["x"])
    empty = write_jsonl(tmp_path / "empty.jsonl", ["", "  "])
    (tmp_path / "text/notes.pdf").touch()
    (tmp_path / "nothing").mkdir()
    parquet.write_table(arrow.table({"content": ["x"]}), tmp_path / "b.parquet")
    cases = [
        (tmp_path / "missing", "does not exist"),
        (tmp_path / "nothing", "holds none of"),
        (tmp_path / "text/notes.pdf", "of no known kind"),
        ([source, tmp_path / "text"], "given twice"),
        ([], "empty list"),
        (empty, "holds no text: 2 empty"),
        (tmp_path / "b.parquet", "has no column 'text'; it has content"),
    ]
    for number, (given_input, sentence) in enumerate(cases):
        with pytest.raises(UserError, match=sentence):
            run(given_input, tmp_path / f"out{number}", model_file)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("max_bad_fraction", 2.0, r"lie in \[0, 1\]"), ("max_bad_fraction", float("nan"), r"lie in \[0, 1\]"), ("shard_bytes", 0, "be at least 1"),
        ("shard_bytes", 10**20, "lie in"), ("workers", -1, r"lie in \[1, "), ("workers", 10**9, r"lie in \[1, "),
    ],
)  # fmt: skip
def test_values_out_of_range(tmp_path: Path, model_file: Path, key: str, value: float, rule: str) -> None:
    with pytest.raises(UserError, match=f"^{key}={value} must {rule}"):
        run(write_jsonl(tmp_path / "a.jsonl", ["x"]), tmp_path / "out", model_file, **{key: value})


@pytest.mark.parametrize("key", ["input", "tokenizer", "output"])
def test_an_empty_path_does_not_mean_the_working_directory(key: str) -> None:
    with pytest.raises(UserError, match=f"{key}='' holds an empty path"):
        TokenizeConfig(**({"input": "a", "tokenizer": "b", "output": "c"} | {key: ""}))  # type: ignore[arg-type]


def test_when_nothing_can_be_read_more_tolerance_is_not_advised(tmp_path: Path, model_file: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    said = "2 of 2 records are unreadable.*no key 'body'; it has 'text'; see .*, then mend the input or text_key and remove .*out$"
    with pytest.raises(UserError, match=said):
        run(source, tmp_path / "out", model_file, text_key="body")


def test_a_full_disk_leaves_no_half_shard(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left on device"):
        patch.setattr("pretrain.data.indexed.os.fsync", full)
        run(source, tmp_path / "out", model_file)
    assert not list((tmp_path / "out").rglob("shard_*"))
    assert run(source, tmp_path / "out", model_file).documents == 5
