"""Reading across documents and shards, and corpora that are not what they should be."""

import copy
import gc
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.data import corpus as corpus_module
from pretrain.data.config import SourceConfig
from pretrain.data.corpus import Corpus, open_corpora
from pretrain.data.manifest import Manifest, audit, verify
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.data.examples import prepared, sentencepiece_file, text


def stream(tokenizer: Tokenizer, texts: list[str]) -> tuple[list[int], list[int]]:
    """Ids and document numbers of the texts in a row."""
    documents = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode(texts)]
    return sum(documents, []), [number for number, ids in enumerate(documents) for _ in ids]


def test_any_range_equals_the_tokenised_text(corpora: dict[str, Corpus], tokenizer: Tokenizer) -> None:
    texts = [text(1 + seed % 9, seed) for seed in range(60)]
    ids, documents = stream(tokenizer, [*texts[0::3], *texts[1::3], *texts[2::3]])
    corpus = corpora["a"]
    assert len(corpus.manifest.shards) == 3 and corpus.tokens == len(ids)
    for start, count in [(0, corpus.tokens), (0, 1), (corpus.tokens - 1, 1), (7, 300), (100, corpus.tokens - 150)]:
        found, numbers = corpus.read(start, count)
        assert (found.dtype, numbers.dtype) == (np.int64, np.int32)
        assert found.tolist() == ids[start : start + count]
        assert numbers.tolist() == [number - documents[start] for number in documents[start : start + count]]


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 0), (0, 10**6)])
def test_ranges_outside_are_a_programmers_error(corpora: dict[str, Corpus], start: int, count: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        corpora["a"].read(start, count)


def test_open_files_are_bounded(corpora: dict[str, Corpus], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "OPEN_SHARDS", 1)
    corpus = Corpus(corpora["a"].folder)
    before = len(os.listdir("/proc/self/fd"))
    corpus.read(0, corpus.tokens)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_unigram_entropy(corpora: dict[str, Corpus]) -> None:
    counts = np.array(list(Counter(corpora["a"].read(0, corpora["a"].tokens)[0].tolist()).values()))
    share = counts / counts.sum()
    assert corpora["a"].unigram_entropy(block=100) == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)


def copied(corpora: dict[str, Corpus], folder: Path) -> Path:
    return Path(shutil.copytree(corpora["a"].folder, folder / "copy"))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_change_in_a_sampled_block_is_found_at_the_start(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    folder = copied(corpora, tmp_path)
    verify(folder, Manifest.load(folder))
    flip(folder / "shard_00001.bin", 0)
    with pytest.raises(UserError, match=r"shard_00001\.bin changed"):
        verify(folder, Manifest.load(folder))


def test_the_audit_finds_a_change_between_the_samples(tokenizer: Tokenizer, model_file: Path, tmp_path: Path) -> None:
    corpus = prepared(tmp_path, model_file, [text(20000, 1), "short", "short"], files=3)
    assert [problem for _, problem in audit(corpus.folder, corpus.manifest)] == ["", "", ""]
    flip(corpus.folder / "shard_00000.bin", 6000)
    verify(corpus.folder, corpus.manifest)
    (corpus.folder / "shard_00002.bin").unlink()
    changed, whole, missing = (problem for _, problem in audit(corpus.folder, corpus.manifest))
    assert "shard_00000.bin changed" in changed and whole == "" and "shard_00002.bin cannot be read (No such file" in missing


def test_a_shard_exchanged_for_another_is_named(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    folder = copied(corpora, tmp_path)
    for suffix in (".bin", ".idx"):
        shutil.copy(folder / f"shard_00000{suffix}", folder / f"shard_00002{suffix}")
    with pytest.raises(UserError, match=r"shard_00002\.idx holds .* but the manifest says"):
        verify(folder, Manifest.load(folder))
    with pytest.raises(UserError, match=r"shard_00002\.bin holds"):
        Corpus(folder).read(0, corpora["a"].tokens)


def test_an_id_outside_the_vocabulary_is_found_while_reading(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    folder = copied(corpora, tmp_path)
    path = folder / "shard_00000.bin"
    path.write_bytes(np.full(path.stat().st_size // 2, 320, np.uint16).tobytes())
    with pytest.raises(UserError, match=r"shard_00000\.bin holds id 320, but the tokenizer has 320 ids"):
        Corpus(folder).read(0, 5)


def sources(path: Path | str) -> dict[str, SourceConfig]:
    return {"mine": SourceConfig(path=str(path))}


def test_open_corpora_refuses_what_is_missing_or_foreign(corpora: dict[str, Corpus], tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert open_corpora(sources(corpora["a"].folder), tokenizer)["mine"].tokens == corpora["a"].tokens
    with pytest.raises(UserError, match="'mine': no prepared corpus in .*nowhere.*prepare_data.py"):
        open_corpora(sources(tmp_path / "nowhere"), tokenizer)
    with pytest.raises(UserError, match="no data source is configured"):
        open_corpora({}, tokenizer)
    other = Tokenizer(sentencepiece_file(tmp_path, byte_fallback=False))
    with pytest.raises(UserError, match="'mine': .* was prepared with tokenizer small.model"):
        open_corpora(sources(corpora["a"].folder), other)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"), ("[]", "format version None"), ('{"format_version": 9}', "format version 9"), ("", "is empty"), ("\0", "is not JSON"),
        ("[" * 100_000, "is not JSON"), ('{"format_version": 1}', "has no field tokenizer"),
    ],
)
def test_manifests_that_are_none(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=f"manifest.json.*{sentence}"):
        Corpus(tmp_path)


def test_what_is_no_folder_of_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("{}")
    for folder, sentence in [(tmp_path / "text.jsonl", "Not a directory"), (tmp_path / ("a" * 300), "File name too long"), (tmp_path, "is missing")]:
        with pytest.raises(UserError, match=f"{sentence}.*prepare_data.py"):
            Corpus(folder)


def changed(raw: Any, path: str, value: object) -> Any:
    """A copy with the field at a dotted path set, or removed where `value` is KeyError."""
    raw = copy.deepcopy(raw)
    *outer, last = (int(part) if part.isdigit() else part for part in path.split("."))
    record = raw
    for part in outer:
        record = record[part]
    if value is KeyError:
        del record[last]
    else:
        record[last] = value
    return raw


HASH = "0" * 64


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("tokens", "x", "says tokens='x', which must be a valid integer"),
        ("tokens", 1, "says tokens=1, which must be the [0-9]+ tokens of its shards"),
        ("tokens", 10**40, "which must be the [0-9]+ tokens"),
        ("documents", 3, "says documents=3, which must be the 60 documents of its shards"),
        ("documents", 60.0, "says documents=60.0, which must be a valid integer"),
        ("shards", [], r"says shards=\[\], which must name at least one shard"),
        ("shards", 5, "says shards=5, which must be a valid array"),
        ("shards.1", None, r"says shards\[1\]=None, which must be an object"),
        ("shards.1.file", 5, r"says shards\[1\].file=5, which must be a valid string"),
        ("shards.1.file", "../shard", r"says shards\[1\].file='../shard', which must be the name of a file"),
        ("shards.1.file", "shard_00000", "must name each file once"),
        ("shards.1.tokens", -1, r"says shards\[1\].tokens=-1, which must be at least 1"),
        ("shards.1.documents", 10**6, r"shards\[1\].documents=1000000, which must lie between 1 and the shard's"),
        ("shards.1.bin_bytes", 7, r"shards\[1\].bin_bytes=7, which must be [0-9]+, its tokens in uint16"),
        ("shards.1.idx_bytes", 0, r"shards\[1\].idx_bytes=0, which must be at least 1"),
        ("shards.1.bin_hash", 5, r"shards\[1\].bin_hash=5, which must be a valid string"),
        ("shards.1.idx_hash", "abc", r"shards\[1\].idx_hash='abc', which must be 64 hexadecimal digits"),
        ("shards.1.sample", HASH, r"shards\[1\].sample='.*', which must be 32 hexadecimal digits"),
        ("shards.1.bin_hash", KeyError, r"has no field shards\[1\].bin_hash"),
        ("shards.1.hash", HASH, r"has the unknown field shards\[1\].hash"),
        ("tokenizer", "small.model", "says tokenizer='small.model', which must be an object"),
        ("tokenizer.name", " ", "tokenizer.name=' ', which must name the tokenizer's file"),
        ("tokenizer.hash", 5, "tokenizer.hash=5, which must be a valid string"),
        ("tokenizer.hash", HASH[1:], "tokenizer.hash='.*', which must be 64 hexadecimal digits"),
        ("tokenizer.size", "a", "tokenizer.size='a', which must be a valid integer"),
        ("tokenizer.size", True, "tokenizer.size=True, which must be a valid integer"),
        ("tokenizer.size", 10**6, "tokenizer.size=1000000, which must lie between 1 and what uint16 holds"),
        ("tokenizer.eos_id", 99999, "tokenizer.eos_id=99999, which must be one of the tokenizer's 320 ids"),
        ("dtype", "float32", "dtype='float32', which must be uint16 or int32"),
        ("counts", {}, "counts={}, which must count documents, empty, bad"),
        ("counts.documents", 3, "counts.documents=3, which must be the 60 documents"),
        ("counts.bad", -1, "counts.bad=-1, which must be the 0 bad of the sources"),
        ("sources.main.bad", -1, "sources.main.bad=-1, which must not be negative"),
        ("sources", {}, "sources={}, which must count the sources that were asked for, main"),
        ("sources.main.tokens", 1, "sources=.*, which must count the tokens of each source's shards"),
        ("sources.main.documents", 1, "sources=.*, which must count the documents of each source's shards"),
        ("sources.main.filtered", {"a=b": 1}, "sources=.*, which must count, at least once each, values of the keys"),
        ("shards.1.source", "other", r"shards\[1\].source='other', which must be one of the sources main"),
        ("code.commit", "abc", "code.commit='abc', which must be the 40 hexadecimal digits"),
        ("code.version", " ", "code.version=' ', which must name the version"),
        ("request", [], r"request=\[\], which must be an object"),
        ("request.tokenizer", HASH, "request.tokenizer='.*', which must be tokenizer.hash"),
        ("request.shard_bytes", 0, "request.shard_bytes=0, which must be at least 1"),
        ("request.sources", {}, r"request.sources={}, which must name at least one source"),
        ("request.sources.main.inputs", [], r"request.sources.main.inputs=\[\], which must name at least one file"),
        ("request.sources.main.inputs.0.bytes", -1, r"request.sources.main.inputs\[0\].bytes=-1, which must not be negative"),
        ("comment", "mine", "has the unknown field comment='mine'"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_hold_names_file_field_value_rule_and_way_out(
    corpora: dict[str, Corpus], tmp_path: Path, field: str, value: object, sentence: str
) -> None:
    raw = json.loads((corpora["a"].folder / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(changed(raw, field, value)))
    with pytest.raises(UserError, match=f"^{tmp_path}/manifest.json .*{sentence}.* remove {tmp_path} and prepare the corpus again with: python"):
        Manifest.load(tmp_path)


def test_every_field_of_a_manifest_has_a_type_and_is_needed(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    raw = json.loads((corpora["a"].folder / "manifest.json").read_text())

    def paths(record: Any, before: str = "") -> Iterator[str]:
        for key, value in record.items() if isinstance(record, dict) else enumerate(record):
            yield f"{before}{key}"
            if isinstance(value, dict | list):
                yield from paths(value, f"{before}{key}.")

    for path in paths(raw):
        for value in (None, True, 1.5, [[]], {"a": 1}, KeyError):
            (tmp_path / "manifest.json").write_text(json.dumps(changed(raw, path, value)))
            if path.rpartition(".")[0] != "request.sources.main.inputs" or value is not KeyError:  # which any number of files may have been
                with pytest.raises(UserError, match="manifest.json"):
                    Manifest.load(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("tokenizer.eos_id", 5), ("tokenizer.size", 321)])
def test_a_manifest_must_agree_with_the_tokenizer_of_the_run(
    corpora: dict[str, Corpus], tokenizer: Tokenizer, tmp_path: Path, field: str, value: int
) -> None:
    folder = copied(corpora, tmp_path)
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(changed(raw, field, value)))
    with pytest.raises(UserError, match=f"'mine': .*manifest.json says {field}={value}, and that tokenizer has"):
        open_corpora(sources(folder), tokenizer)


def test_an_index_of_another_size_than_remembered_is_named(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    folder = copied(corpora, tmp_path)
    with (folder / "shard_00001.idx").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(UserError, match=r"shard_00001\.idx changed after preparation \([0-9]+ bytes"):
        verify(folder, Manifest.load(folder))


def test_the_way_out_of_a_damaged_corpus_works(model_file: Path, tmp_path: Path) -> None:
    corpus = prepared(tmp_path, model_file, [text(20, 1)])
    (corpus.folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=f"remove {corpus.folder} and prepare the corpus again"):
        prepared(tmp_path, model_file, [text(20, 1)])
    shutil.rmtree(corpus.folder)
    assert prepared(tmp_path, model_file, [text(20, 1)]).manifest == corpus.manifest


def test_a_shard_that_shrinks_under_the_run_is_one_sentence(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    """A memory map would end the process with SIGBUS."""
    corpus = Corpus(copied(corpora, tmp_path))
    corpus.read(0, 20)
    shard = corpus.folder / "shard_00000.bin"
    os.truncate(shard, shard.stat().st_size - 8)
    with pytest.raises(UserError, match=r"shard_00000\.bin was cut off while it was read"):
        corpus.read(0, corpus.tokens)


def test_few_shards_are_open_whatever_the_number_of_corpora(corpora: dict[str, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.data.corpus.OPEN_SHARDS", 4)

    def descriptors() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{name}").startswith(str(tmp_path)) for name in os.listdir("/proc/self/fd"))

    opened = [Corpus(shutil.copytree(corpora["a"].folder, tmp_path / str(number))) for number in range(5)]
    whole = corpora["a"].read(0, corpora["a"].tokens)
    for corpus in opened:
        ids, documents = corpus.read(0, corpus.tokens)
        assert np.array_equal(ids, whole[0]) and np.array_equal(documents, whole[1])
        assert descriptors() <= 2 * 4
    del opened, corpus
    gc.collect()
    assert descriptors() == 0, "a corpus that is gone leaves nothing open"


def test_verification_is_shared_out(corpora: dict[str, Corpus], tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Each share finds the damage of its own shards, and together they find all."""
    folder = copied(corpora, tmp_path)
    flip(folder / "shard_00001.bin", 0)
    sources = {"a": SourceConfig(path=str(folder))}
    for share, damaged in (((0, 2), False), ((1, 2), True), ((0, 1), True), ((4, 8), False)):
        if damaged:
            with pytest.raises(UserError, match=r"shard_00001\.bin changed"):
                open_corpora(sources, tokenizer, share)
        else:
            open_corpora(sources, tokenizer, share)


@pytest.mark.parametrize("part", ["length", "offset", "document"])
def test_large_indexes_are_looked_at_without_their_hash(
    corpora: dict[str, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    folder = copied(corpora, tmp_path)
    manifest = Manifest.load(folder)
    monkeypatch.setattr("pretrain.data.manifest.WHOLE_INDEX_BYTES", 0)
    verify(folder, manifest)
    documents = manifest.shards[1].documents
    place = {"length": 34, "offset": 34 + 4 * documents, "document": 34 + 12 * documents}[part] + (8 if part == "document" else 0)
    flip(folder / "shard_00001.idx", place + (1 if part == "document" else 0))
    with pytest.raises(UserError, match=r"shard_00001\.idx contradicts itself"):
        verify(folder, manifest)
