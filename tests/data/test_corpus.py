"""Reading across documents and shards, and corpora that are not what they should be."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

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


def copy(corpora: dict[str, Corpus], folder: Path) -> Path:
    return Path(shutil.copytree(corpora["a"].folder, folder / "copy"))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_change_in_a_sampled_block_is_found_at_the_start(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    folder = copy(corpora, tmp_path)
    verify(folder, Manifest.load(folder))
    flip(folder / "shard_00001.bin", 0)
    with pytest.raises(UserError, match=r"shard_00001\.bin changed"):
        verify(folder, Manifest.load(folder))


def test_the_audit_finds_a_change_between_the_samples(tokenizer: Tokenizer, model_file: Path, tmp_path: Path) -> None:
    corpus = prepared(tmp_path, model_file, [text(20000, 1)])
    audit(corpus.folder, corpus.manifest)
    flip(corpus.folder / "shard_00000.bin", 6000)
    verify(corpus.folder, corpus.manifest)
    with pytest.raises(UserError, match=r"shard_00000\.bin changed"):
        audit(corpus.folder, corpus.manifest)


def test_a_shard_exchanged_for_another_is_named(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    folder = copy(corpora, tmp_path)
    for suffix in (".bin", ".idx"):
        shutil.copy(folder / f"shard_00000{suffix}", folder / f"shard_00002{suffix}")
    with pytest.raises(UserError, match=r"shard_00002\.idx holds .* but the manifest says"):
        verify(folder, Manifest.load(folder))
    with pytest.raises(UserError, match=r"shard_00002\.bin holds"):
        Corpus(folder).read(0, corpora["a"].tokens)


def test_an_id_outside_the_vocabulary_is_found_while_reading(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    folder = copy(corpora, tmp_path)
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
    with pytest.raises(UserError, match="'mine' .* was prepared with tokenizer small.model"):
        open_corpora(sources(corpora["a"].folder), other)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "cannot be read"), ("[]", "format version None"), ('{"format_version": 9}', "format version 9"), ("", "cannot be read")],
)
def test_manifests_that_are_none(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=f"manifest.json.*{sentence}"):
        Corpus(tmp_path)


def test_manifest_without_a_field_and_with_no_tokens(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    folder = copy(corpora, tmp_path)
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(raw | {"tokens": 0, "shards": []}))
    with pytest.raises(UserError, match="is empty"):
        Corpus(folder)
    del raw["shards"][0]["bin_hash"]
    (folder / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="does not have the fields"):
        Corpus(folder)
