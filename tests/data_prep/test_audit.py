"""The audit: every byte read, every damaged shard named."""

import shutil
from pathlib import Path

import pytest

from data_prep.audit import audit_corpora
from data_prep.config import AuditConfig
from pretrain.data.corpus import Corpus
from pretrain.errors import UserError
from tests.data.examples import prepared, text


@pytest.fixture(scope="module")
def corpus(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Three shards of 30,000 tokens and more, so that a shard has bytes that no sampled block covers."""
    return prepared(tmp_path_factory.mktemp("audit"), model_file, [text(20_000, seed) for seed in range(3)], files=3)


def test_a_whole_corpus_is_one_line_per_shard_and_a_sum(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    audit_corpora(AuditConfig(corpus=str(corpus.folder)))
    lines = capsys.readouterr().err.splitlines()
    assert [f"[{n}/3] {corpus.folder}/shard_0000{n - 1}: whole (" in line for n, line in enumerate(lines[:3], start=1)] == [True] * 3
    assert "(100%, " in lines[2] and lines[3].startswith(f"{corpus.folder} is as it was prepared: {corpus.tokens:,} tokens in 3 documents")


def test_changed_and_missing_shards_of_all_corpora_are_named(corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (Path(shutil.copytree(corpus.folder, tmp_path / name)) for name in ("first", "second"))
    changed = bytearray((first / "shard_00001.bin").read_bytes())
    changed[6000] ^= 1
    (first / "shard_00001.bin").write_bytes(changed)
    (second / "shard_00002.idx").unlink()
    named = f"2 shards changed or went missing after preparation: {first}/shard_00001, {second}/shard_00002; "
    with pytest.raises(UserError, match=f"^{named}"):
        audit_corpora(AuditConfig(corpus=[str(first), str(second)]))
    said = capsys.readouterr().err
    assert f"{first}/shard_00001: {first}/shard_00001.bin changed after preparation (its hash differs from the manifest)" in said
    assert f"{second}/shard_00002.idx cannot be read (No such file or directory)" in said
    assert said.count(": whole (") == 4 and "is as it was prepared" not in said


def test_a_broken_manifest_stops_the_audit_before_it_reads(corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json is not JSON"):
        audit_corpora(AuditConfig(corpus=[str(corpus.folder), str(tmp_path)]))
    assert capsys.readouterr().err == ""


def test_a_folder_of_several_sources_means_each_of_them(corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("web", "code"):
        shutil.copytree(corpus.folder, tmp_path / name)
    audit_corpora(AuditConfig(corpus=str(tmp_path)))
    said = capsys.readouterr().err
    assert said.count("is as it was prepared") == 2 and f"{tmp_path}/code is" in said and f"{tmp_path}/web is" in said
