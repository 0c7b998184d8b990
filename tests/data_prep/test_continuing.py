"""A preparation that was cut off: what it left continues, and what is no longer whole is said to be so or made again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep import readers
from data_prep.inputs import Piece
from pretrain.data.manifest import audit
from pretrain.errors import UserError
from tests.data.examples import text, write_jsonl
from tests.data_prep.test_prepare import run


def begun(tmp_path: Path, model: Path) -> tuple[Path, Path]:
    """Text of three shards, and a preparation of it that was cut off in the third."""
    for number in range(3):
        write_jsonl(tmp_path / f"text/{number}.jsonl", [text(20, number)])
    original = readers.read_records

    def cut_off(piece: Piece, wanted: readers.Wanted) -> Any:
        if piece.name.endswith("2.jsonl"):
            raise KeyboardInterrupt
        return original(piece, wanted)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(readers, "read_records", cut_off)
        run(tmp_path / "text", tmp_path / "out", model, shard_bytes=1)
    return tmp_path / "text", tmp_path / "out"


def test_a_preparation_that_was_cut_off_continues(tmp_path: Path, model_file: Path) -> None:
    source, output = begun(tmp_path, model_file)
    assert not (output / "manifest.json").exists() and not list(output.rglob("*.tmp"))
    finished = (output / "shard_00000.bin").stat().st_mtime_ns
    with pytest.raises(UserError, match="other shard_bytes"):
        run(source, output, model_file)
    assert run(source, output, model_file, shard_bytes=1).documents == 3
    assert (output / "shard_00000.bin").stat().st_mtime_ns == finished


@pytest.mark.parametrize("content", ["{", "", "[]", "5", "null", '{"inputs": 5}', '{"format_version": "1"}'])
def test_a_broken_request_is_named_with_the_way_out(tmp_path: Path, model_file: Path, content: str) -> None:
    source, output = begun(tmp_path, model_file)
    (output / "prepare.json").write_text(content)
    with pytest.raises(UserError, match=f"^{output}/prepare.json .*, so nobody knows what was begun .*; choose another output, or remove {output}$"):
        run(source, output, model_file, shard_bytes=1)
    shutil.rmtree(output)
    assert run(source, output, model_file, shard_bytes=1).documents == 3


@pytest.mark.parametrize("damage", ["half-written", "wrong type", "other shard", "miscounted", "shard gone", "shard cut"])
def test_a_damaged_part_is_made_again(tmp_path: Path, model_file: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = begun(tmp_path, model_file)
    part, shard = output / "parts/shard_00001.json", output / "shard_00001.bin"
    raw = json.loads(part.read_text())
    if damage == "half-written":
        part.write_text(part.read_text()[:50])
    elif damage == "wrong type":
        part.write_text(json.dumps(raw | {"lines": "1"}))
    elif damage == "other shard":
        part.write_text((output / "parts/shard_00000.json").read_text())
    elif damage == "miscounted":
        part.write_text(json.dumps(raw | {"counts": raw["counts"] | {"documents": 2}}))
    elif damage == "shard gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-2])
    capsys.readouterr()
    made = run(source, output, model_file, shard_bytes=1)
    said = capsys.readouterr().err
    assert "shard_00001 is made again" in said and "continuing: 1 of 3" in said
    assert made == run(source, tmp_path / "afresh", model_file, shard_bytes=1)
    assert not any(problem for _, problem in audit(output, made))
