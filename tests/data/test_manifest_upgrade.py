"""Corpora that were prepared before sources had names are read, and recognised, as they are."""

import json
from pathlib import Path

import pytest

from data_prep.config import TokenizeConfig
from data_prep.prepare import prepare
from pretrain.data.corpus import Corpus
from pretrain.data.manifest import Manifest
from pretrain.errors import UserError
from tests.data.examples import prepared, text


def old(manifest: Path) -> None:
    """Rewrite a manifest as version 1 had it."""
    raw = json.loads(manifest.read_text())
    for shard in raw["shards"]:
        del shard["source"]
    source = raw["request"].pop("sources")["main"]
    raw["request"] |= {"format_version": 1, "text_key": source["text_key"], "inputs": source["inputs"]}
    del raw["sources"], raw["code"], raw["counts"]["filtered"]
    manifest.write_text(json.dumps(raw | {"format_version": 1}))


def test_a_corpus_of_version_1_is_read_and_not_prepared_again(model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = prepared(tmp_path, model_file, [text(20, seed) for seed in range(6)], files=2)
    new, path = corpus.manifest, corpus.folder / "manifest.json"
    old(path)
    assert "sources" not in path.read_text()
    again = Corpus(corpus.folder).manifest
    assert (again.shards, again.sources, again.request, again.counts) == (new.shards, new.sources, new.request, new.counts)
    assert (again.code.version, again.code.commit) == ("unknown", "unknown")
    config = TokenizeConfig(
        input=str(tmp_path / "text"), tokenizer=str(model_file), output=str(corpus.folder), workers=1, shard_bytes=1
    )  # fmt: skip
    assert prepare(config)["main"] == again and "already prepared" in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["request", "counts", "tokens", "shards", "dtype"])
def test_a_version_1_that_lacks_a_field_is_named(model_file: Path, tmp_path: Path, lost: str) -> None:
    path = prepared(tmp_path, model_file, ["x"]).folder / "manifest.json"
    old(path)
    raw = json.loads(path.read_text())
    del raw[lost]
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match="manifest.json has no field"):
        Manifest.load(path.parent)
