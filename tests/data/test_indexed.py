"""The .bin/.idx format against megatron-core's own reader and writer, and damaged files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from pretrain.data.indexed import IndexedShard, ShardWriter, dtype_for
from pretrain.errors import UserError

DOCUMENTS = [[5, 6, 2], [2], [7, 65535, 1, 2], [9, 2]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: type = np.uint16) -> Path:
    with ShardWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(document)
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_reads_what_we_write(tmp_path: Path, dtype: type) -> None:
    theirs = IndexedDataset(str(write(tmp_path / "shard.v1", dtype=dtype)))
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert theirs[0].dtype == dtype


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_what_megatron_writes_and_the_bytes_are_equal(tmp_path: Path, dtype: type) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    shard = IndexedShard(tmp_path / "theirs")
    assert shard.read(0, shard.tokens).tolist() == sum(DOCUMENTS, [])
    write(tmp_path / "ours", dtype=dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_documents_of_several_sequences_count_as_one(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "s.bin"), dtype=np.uint16)
    builder.add_document(torch.tensor([1, 2, 3, 4]), [3, 1])
    builder.add_document(torch.tensor([5, 6]), [1, 1])
    builder.finalize(str(tmp_path / "s.idx"))
    assert IndexedShard(tmp_path / "s").document_numbers(0, 6).tolist() == [0, 0, 0, 0, 1, 1]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=12), data=st.data())
def test_document_numbers_of_any_range(tmp_path: Path, lengths: list[int], data: st.DataObject) -> None:
    shard = IndexedShard(write(tmp_path / "shard", [[1] * length for length in lengths]))
    expected = np.repeat(np.arange(len(lengths)), lengths)
    start = data.draw(st.integers(0, shard.tokens - 1))
    count = data.draw(st.integers(1, shard.tokens - start))
    assert shard.document_numbers(start, count).tolist() == expected[start : start + count].tolist()


def test_dtype_counts_the_largest_id() -> None:
    assert dtype_for(65535) == np.uint16
    assert dtype_for(65536) == np.int32


def test_ids_beyond_the_dtype_are_a_programmers_error_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="65536"):
        write(tmp_path / "shard", [[1, 65536]])
    assert list(tmp_path.iterdir()) == []


def damage(prefix: Path, kind: str) -> None:
    bin_path, idx_path = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    raw = idx_path.read_bytes()
    changes = {
        "bin cut": lambda: bin_path.write_bytes(bin_path.read_bytes()[:-2]),
        "bin longer": lambda: bin_path.write_bytes(bin_path.read_bytes() + b"\0\0"),
        "bin missing": bin_path.unlink,
        "idx missing": idx_path.unlink,
        "idx cut": lambda: idx_path.write_bytes(raw[:-8]),
        "idx without header": lambda: idx_path.write_bytes(raw[:20]),
        "idx of another kind": lambda: idx_path.write_bytes(b"LITPKDS" + raw[7:]),
        "idx of another version": lambda: idx_path.write_bytes(raw[:9] + b"\7" + raw[10:]),
        "idx of another dtype": lambda: idx_path.write_bytes(raw[:17] + b"\6" + raw[18:]),
    }
    changes[kind]()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("bin cut", r"shard\.bin is cut off: 18 bytes where shard\.idx says 20"),
        ("bin longer", r"shard\.bin .*disagree"),
        ("bin missing", r"shard\.bin cannot be read"),
        ("idx missing", r"shard\.idx cannot be read"),
        ("idx cut", r"shard\.idx is cut off"),
        ("idx without header", r"shard\.idx is not a Megatron index"),
        ("idx of another kind", r"shard\.idx is not a Megatron index"),
        ("idx of another version", r"shard\.idx has version 7"),
        ("idx of another dtype", r"shard\.idx has version 1 and type code 6"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, kind: str, sentence: str) -> None:
    damage(write(tmp_path / "shard"), kind)
    with pytest.raises(UserError, match=sentence):
        IndexedShard(tmp_path / "shard")


def test_an_id_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"shard\.bin holds id 65535, but the tokenizer has 100 ids"):
        IndexedShard(write(tmp_path / "shard")).check_ids(100)
