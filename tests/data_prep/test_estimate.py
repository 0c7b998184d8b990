"""What --dry-run says, against what the preparation then makes."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from data_prep import estimate, inputs
from data_prep.config import InputConfig, TokenizeConfig
from data_prep.estimate import estimate_source
from data_prep.inputs import find_inputs
from data_prep.prepare import prepare
from pretrain.data.tokenizer import Tokenizer
from tests.data.examples import text, write_jsonl
from tests.data_prep.test_prepare import run


def write_many(folder: Path, seed: int) -> None:
    """Forty files of different sizes and lengths of documents."""
    generator = np.random.default_rng(seed)
    for number in range(40):
        documents = [text(int(generator.integers(1, 60)), int(generator.integers(10**6))) for _ in range(int(generator.integers(2, 30)))]
        write_jsonl(folder / f"{number:02d}.jsonl", documents)


def test_nothing_is_written_and_everything_is_said(tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_many(tmp_path / "text", 1)
    before = sorted(tmp_path.rglob("*"))
    config = TokenizeConfig(input=str(tmp_path / "text"), tokenizer=str(model_file), output=str(tmp_path / "out/a/b"), shard_bytes=4000, dry_run=True)
    assert prepare(config) == {} and sorted(tmp_path.rglob("*")) == before
    said = capsys.readouterr().err
    for part in (r"dry run: 40 files, .* MB; sampled 2\d parts, .* MB \(\d+\.\d\d%\)",
                 r"[\d,]+ tokens \([\d,]+ to [\d,]+: 95% interval\); [\d,]+ documents",
                 rf"are free at {tmp_path}\n", r"time: about .* with \d+ workers, at [\d,]+ tokens/s each", "nothing was written"):  # fmt: skip
        assert re.search(part, said), said
    shards = len(run(tmp_path / "text", tmp_path / "made", model_file, shard_bytes=4000).shards)
    assert f"{shards} shards of uint16" in said


def test_the_interval_holds_the_truth_about_as_often_as_it_says(tmp_path: Path, tokenizer: Tokenizer) -> None:
    held, seeds = 0, 40
    for seed in range(seeds):
        write_many(tmp_path / str(seed), seed)
        files = find_inputs(str(tmp_path / str(seed)), tmp_path / "out")
        found = estimate_source(InputConfig(input="-"), tokenizer, files)
        texts = [json.loads(line)["text"] for file in files for line in file.path.read_text().splitlines()]
        tokens = sum(map(len, tokenizer.encode(texts))) + len(texts)
        held += abs(found.tokens - tokens) <= found.half
        assert abs(found.tokens / tokens - 1) < 0.2 and abs(found.documents / len(texts) - 1) < 0.5
    assert held >= 34


def test_a_sample_of_everything_is_exact(tmp_path: Path, model_file: Path, tokenizer: Tokenizer) -> None:
    for number in range(5):
        write_jsonl(tmp_path / f"text/{number}.jsonl", [text(5, number), "", text(9, number)])
    (tmp_path / "text/note.txt").write_text("the king\n")
    found = estimate_source(InputConfig(input="-"), tokenizer, find_inputs(str(tmp_path / "text"), tmp_path / "out"))
    truth = run(tmp_path / "text", tmp_path / "out", model_file)
    assert (found.tokens, found.documents, found.half) == (pytest.approx(truth.tokens), truth.documents, 0)


def test_large_files_are_entered_in_the_middle(tmp_path: Path, tokenizer: Tokenizer, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that become longer along the file: its start alone would mislead."""
    monkeypatch.setattr(estimate, "_LEAST_PART", 2000)
    monkeypatch.setattr(inputs, "_LEAST_SPLIT", 1)
    documents = [text(1 + number // 20, number) for number in range(1200)]
    write_jsonl(tmp_path / "a.jsonl", documents)
    parquet.write_table(arrow.table({"text": documents}), tmp_path / "a.parquet", row_group_size=300)
    truth = run(tmp_path / "a.jsonl", tmp_path / "out", model_file).tokens
    for name, error in (("a.jsonl", 0.05), ("a.parquet", 0.5)):
        found = estimate_source(InputConfig(input="-"), tokenizer, find_inputs(str(tmp_path / name), tmp_path / "out"))
        assert abs(found.tokens / truth - 1) < error, name


def test_unreadable_records_are_said_and_whether_they_would_stop_the_preparation(
    tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(5, seed) for seed in range(90)])
    source.write_bytes(source.read_bytes() + b"no JSON\n" * 10)
    settings = {"input": str(source), "tokenizer": str(model_file), "output": str(tmp_path / "out"), "dry_run": True}
    prepare(TokenizeConfig(**settings, max_bad_fraction=0.05))
    assert "unreadable: 10 of 100 sampled records: more than max_bad_fraction=0.05, so the preparation would fail" in capsys.readouterr().err
    prepare(TokenizeConfig(**settings, max_bad_fraction=0.2))
    assert "unreadable: 10 of 100 sampled records\n" in capsys.readouterr().err
    filtered = tmp_path / "filtered.jsonl"
    filtered.write_text("".join(json.dumps({"text": text(5, seed), "set": "ab"[seed % 2]}) + "\n" for seed in range(90)))
    prepare(TokenizeConfig(**settings | {"input": str(filtered)}, drop={"set": "b"}))
    assert "unreadable:" not in capsys.readouterr().err
