"""A hundred broken inputs: each handled as stated, counted, nothing lost silently, and never a hang. And places and processes that fail."""

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep import readers, steps
from data_prep.lock import only_writer
from pretrain.data.manifest import audit
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.data.examples import text, write_jsonl
from tests.data.tokenizer_examples import tiktoken_ranks
from tests.data_prep.bad_inputs import CASES, Case
from tests.data_prep.test_prepare import read_back, run

SECONDS = 60


@pytest.fixture(autouse=True)
def never_a_hang() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_there_are_a_hundred() -> None:
    assert len(CASES) >= 100 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, tmp_path: Path, model_file: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "text").mkdir()
    for name, content in case.files.items():
        (tmp_path / "text" / name).write_bytes(content)
    options = {"max_bad_fraction": 0.9} | case.options
    if case.counts is None:
        with pytest.raises(UserError, match=case.says):
            run(tmp_path / "text", tmp_path / "out", model_file, **options)
        assert not (tmp_path / "out/manifest.json").exists() and not list(tmp_path.rglob("*.tmp"))
        return
    manifest = run(tmp_path / "text", tmp_path / "out", model_file, **options)
    documents, empty, bad = case.counts
    assert manifest.counts == {"documents": documents, "empty": empty, "bad": bad, "filtered": 0}
    if bad:
        entries = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
        assert len(entries) == bad and all(any(part in entry["reason"] for part in case.says.split("|")) for entry in entries)
        assert all(entry["file"].startswith("text/a.") and entry["line"] >= 1 for entry in entries)
    if case.texts is not None:
        assert read_back(tmp_path / "out", tokenizer) == tokenizer.encode(case.texts)
    assert not any(problem for _, problem in audit(tmp_path / "out", manifest))


def test_ids_beyond_uint16_take_int32(tmp_path: Path) -> None:
    path = tiktoken_ranks(tmp_path, "wide", "gpt2")
    settings = json.loads(Path(f"{path}.json").read_text())
    for largest, dtype in ((65533, "uint16"), (65534, "uint16"), (65535, "int32"), (131071, "int32")):
        Path(f"{path}.json").write_text(json.dumps(settings | {"special_tokens": {"<|end|>": largest}}))
        manifest = run(write_jsonl(tmp_path / "a.jsonl", ["the king"]), tmp_path / f"out{largest}", path)
        assert manifest.dtype == dtype, "the mask comes after the largest id"
        assert read_back(tmp_path / f"out{largest}", Tokenizer(path)) == Tokenizer(path).encode(["the king"])


@pytest.mark.parametrize("kind", ["pipe", "link to nothing", "loop", "link to itself"])
def test_things_that_are_no_files(tmp_path: Path, model_file: Path, kind: str) -> None:
    folder = write_jsonl(tmp_path / "text/inner/a.jsonl", ["x"]).parents[1]
    if kind == "pipe":
        os.mkfifo(folder / "b.jsonl")
    elif kind == "loop":
        (folder / "inner/back").symlink_to(folder)
    else:
        (folder / "b.jsonl").symlink_to(tmp_path / "nothing" if kind == "link to nothing" else folder / "b.jsonl")
    with pytest.raises(UserError, match=r"is no regular file|is a link to a folder above it|cannot be read \(Too many levels"):
        run(folder, tmp_path / "out", model_file)
    if kind != "loop":
        with pytest.raises(UserError, match=r"is neither a file nor a folder|is of no known kind|Too many levels"):
            run(folder / "b.jsonl", tmp_path / "out", model_file)
    assert not (tmp_path / "out").exists()


def test_a_folder_named_like_a_file_is_a_folder(tmp_path: Path, model_file: Path) -> None:
    write_jsonl(tmp_path / "text/a.jsonl/b.jsonl", ["x"])
    (tmp_path / "text/linked").symlink_to(write_jsonl(tmp_path / "elsewhere/c.jsonl", ["y"]).parent)
    write_jsonl(tmp_path / "text/.hidden/d.jsonl", ["z"])
    assert run(tmp_path / "text", tmp_path / "out", model_file).documents == 2


@pytest.mark.parametrize("happens", ["vanishes", "grows", "shrinks", "unreadable"])
def test_files_that_change_during_the_run(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch, happens: str) -> None:
    write_jsonl(tmp_path / "text/a.jsonl", ["x"])
    later = write_jsonl(tmp_path / "text/b.jsonl", ["y", "z"])
    original = readers.read_records

    def meanwhile(piece: Any, wanted: Any) -> Any:
        if piece.name.endswith("b.jsonl"):
            if happens == "vanishes":
                later.unlink()
            elif happens == "unreadable":
                later.unlink()
                later.mkdir()
            else:
                later.write_bytes(later.read_bytes() * 2 if happens == "grows" else later.read_bytes()[:17])
        return original(piece, wanted)

    monkeypatch.setattr(readers, "read_records", meanwhile)
    with pytest.raises(UserError, match=r"b\.jsonl (cannot be read \((No such file|Is a directory)|changed while it was read)"):
        run(tmp_path / "text", tmp_path / "out", model_file)
    assert not list((tmp_path / "out").glob("shard_*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("place", ["pretrain.data.indexed.os.fsync", "pretrain.data.files.os.fsync"])
def test_a_disk_that_fails(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch, number: int, place: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x"] * 3)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, pytest.raises(UserError, match=f"cannot write .*{os.strerror(number)}"):
        patch.setattr(place, fail)
        run(source, tmp_path / "out", model_file)
    assert not list((tmp_path / "out").rglob("shard_*.bin")) and not list((tmp_path / "out").rglob("*.tmp"))
    assert run(source, tmp_path / "out", model_file).documents == 3


def test_a_read_only_output(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.outputs.os.access", lambda place, mode: place != tmp_path)
    with pytest.raises(UserError, match=r"cannot write .*\(Permission denied\): choose an output that you may write to"):
        run(write_jsonl(tmp_path / "a.jsonl", ["x"]), tmp_path / "out", model_file)


def test_a_second_preparation_of_the_same_output_is_refused(tmp_path: Path, model_file: Path) -> None:
    source, output = write_jsonl(tmp_path / "a.jsonl", ["x"]), tmp_path / "out"
    with only_writer(output), pytest.raises(UserError, match=rf"output {output} is being written by process {os.getpid()} on .*; wait for it"):
        run(source, output, model_file)
    assert run(source, output, model_file).documents == 1


def test_a_long_document_that_cannot_be_tokenised_is_listed(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise steps.TooLong("a document of 60 characters that can neither be cut nor be tokenised")
        yield

    monkeypatch.setattr(steps, "CUT_CHARACTERS", 50)
    monkeypatch.setattr(steps, "encode_long", refuse)
    manifest = run(write_jsonl(tmp_path / "a.jsonl", ["x", "y" * 60, text(2, 1)]), tmp_path / "out", model_file, max_bad_fraction=0.9)
    assert (manifest.documents, manifest.counts["bad"]) == (2, 1)
    [entry] = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert (entry["file"], entry["line"]) == ("a.jsonl", 2) and "neither be cut" in entry["reason"]
