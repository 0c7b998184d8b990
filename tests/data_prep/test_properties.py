"""Any list of documents, prepared and read back, is the tokenisation of the list: for each family of tokenizers, shards and cuts of any size."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep import inputs, steps
from pretrain.data.manifest import audit
from pretrain.data.tokenizer import Tokenizer
from tests.data.examples import text
from tests.data.tokenizer_examples import PROVEN, UNPROVEN
from tests.data_prep.test_prepare import kept, read_back, run

FAMILIES = ["sentencepiece bpe, plain", "sentencepiece bpe, Llama 2", "byte-level, NFC", "Llama 2", "tiktoken, cl100k", "sentencepiece unigram"]
words = st.lists(st.sampled_from(["the", "king", " ", "  ", "\n", "é", "日本", "e\u0301", "\x00", "</s>", "1e5", "\u2028"]), max_size=25).map(
    " ".join
)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
documents = st.lists(st.one_of(words, any_text, st.integers(1, 40).map(lambda count: text(count, count))), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: (PROVEN | UNPROVEN)[name](folder, f"t{number}") for number, name in enumerate(FAMILIES)}


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=documents.filter(kept), shard_bytes=st.integers(1, 400), cut=st.integers(1, 60), batch=st.integers(1, 5), escape=st.booleans())
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_read_back_is_what_was_written(
    name: str, documents: list[str], shard_bytes: int, cut: int, batch: int, escape: bool, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "CUT_CHARACTERS", cut)
    monkeypatch.setattr(steps, "_BATCH_DOCUMENTS", batch)
    monkeypatch.setattr(inputs, "_LEAST_SPLIT", 64)
    tokenizer = Tokenizer(files[name])
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps({"text": document}, ensure_ascii=escape) for document in documents]
        (Path(folder) / "a.jsonl").write_text("\n".join(lines), encoding="utf-8", newline="")
        manifest = run(Path(folder) / "a.jsonl", Path(folder) / "out", files[name], shard_bytes=shard_bytes)
        assert read_back(Path(folder) / "out", tokenizer) == tokenizer.encode(kept(documents))
        empty = len(documents) - len(kept(documents))
        assert manifest.counts == {"documents": len(kept(documents)), "empty": empty, "bad": 0, "filtered": 0}
        assert not any(problem for _, problem in audit(Path(folder) / "out", manifest))
