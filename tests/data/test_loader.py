"""Samples are a pure function of (seed, number): whatever the layout, the loader or the step it starts at."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain.data.batch import BatchShard
from pretrain.data.corpus import Corpus
from pretrain.data.loader import Loader, build_loader, build_validation_loader
from pretrain.data.samples import TrainingSamples, ValidationSamples, positions
from pretrain.errors import UserError
from tests.data.examples import Batch, corrupt, data_config

Rows = dict[int, dict[str, torch.Tensor]]


BATCH = Batch()


def training(
    corpora: dict[str, Corpus], *, batch: Batch = BATCH, lookahead: int = 1, random_length: bool = True, **data: object
) -> TrainingSamples:
    config = data_config(**data)
    return TrainingSamples(config, corpora, batch, corrupt=corrupt, lookahead=lookahead, random_length=random_length, seed=7)


def rows(shards: list[BatchShard]) -> Rows:
    """Every sample's tensors by its number; `documents` filled in where the micro-batch needed none."""
    found: Rows = {}
    for micro in (micro for shard in shards for micro in shard.micro_batches):
        inputs = {"documents": torch.zeros_like(micro.inputs["ids"], dtype=torch.int32)} | micro.inputs
        columns = inputs | {f"target {key}": value for key, value in micro.targets.items()} | {"count": micro.count_B, "t": micro.t_B}
        for b, number in enumerate(micro.sample_ids):
            found[number] = {key: value[b] for key, value in columns.items()}
    return found


def assert_equal(left: Rows, right: Rows) -> None:
    assert left.keys() == right.keys()
    for number, row in left.items():
        for key, value in row.items():
            assert value.dtype == right[number][key].dtype
            assert torch.equal(value, right[number][key]), (number, key)


def take(loader: Loader, steps: int) -> list[BatchShard]:
    with loader:
        return list(itertools.islice(loader, steps))


def all_ranks(corpora: dict[str, Corpus], dp_size: int, micro: int, *, start: int = 0, steps: int = 3, **data: object) -> Rows:
    batch = Batch(micro_sequences=micro)
    samples = training(corpora, batch=batch, **data)
    found: Rows = {}
    for rank in range(dp_size):
        loader = build_loader(samples, data_config(**data), batch, dp_rank=rank, dp_size=dp_size, start_step=start)
        mine = rows(take(loader, steps))
        assert not mine.keys() & found.keys()
        found |= mine
    return found


def test_the_same_samples_in_every_layout_and_after_a_restart(corpora: dict[str, Corpus]) -> None:
    whole = all_ranks(corpora, 1, 8)
    assert sorted(whole) == list(range(24))
    for dp_size, micro in ((1, 2), (2, 4), (4, 1), (8, 1)):
        assert_equal(all_ranks(corpora, dp_size, micro), whole)
    assert_equal(all_ranks(corpora, 2, 2, start=2, steps=1), {n: row for n, row in whole.items() if n >= 16})


def test_positions_follow_the_contract() -> None:
    assert list(positions(3, global_sequences=8, micro_sequences=2, dp_rank=1, dp_size=2)) == [range(26, 28), range(30, 32)]
    with pytest.raises(ValueError, match="cannot be cut"):
        next(positions(0, global_sequences=8, micro_sequences=3, dp_rank=0, dp_size=1))


@pytest.mark.parametrize("options", [{}, {"document_masks": True}, {"random_length_probability": 0.4}])
def test_dali_and_plain_give_identical_batches(corpora: dict[str, Corpus], options: dict[str, object]) -> None:
    samples = training(corpora, **options)
    plain, dali = (
        take(build_loader(samples, data_config(loader=kind, **options), Batch(), dp_rank=1, dp_size=2, start_step=5), 6) for kind in ("plain", "dali")
    )
    for one, other in zip(plain, dali, strict=True):
        assert one.step == other.step
        for left, right in zip(one.micro_batches, other.micro_batches, strict=True):
            assert left.inputs.keys() == right.inputs.keys() and left.targets.keys() == right.targets.keys()
            assert left.sample_ids == right.sample_ids
    assert_equal(rows(plain), rows(dali))


def test_windows_are_cut_from_the_stream(corpora: dict[str, Corpus]) -> None:
    samples = training(corpora, document_masks=True)
    for number in range(40):
        address = samples.mixture.address(number)
        expected, documents = corpora[address.source].read(16 * address.window, 17)
        found = samples.sample(number).corrupted
        assert np.array_equal(found.targets["ids"], expected) and np.array_equal(found.inputs["documents"], documents)


def test_times_are_stratified_over_the_global_batch(corpora: dict[str, Corpus]) -> None:
    samples = training(corpora)
    for step in range(3):
        times = [samples.sample(8 * step + position).corrupted.t for position in range(8)]
        assert [int(8 * time) for time in times if time is not None] == list(range(8))


def test_documents_are_handed_on_only_where_a_mask_is_needed(corpora: dict[str, Corpus]) -> None:
    def micro_batches(**options: object) -> Iterator[tuple[bool, torch.Tensor]]:
        samples = training(corpora, **options)
        for shard in take(build_loader(samples, data_config(**options), Batch(), dp_rank=0, dp_size=1), 4):
            for micro in shard.micro_batches:
                yield "documents" in micro.inputs, micro.inputs.get("documents", torch.zeros(1, 1))

    assert not any(present for present, _ in micro_batches())
    assert any(present and (documents > 0).any() for present, documents in micro_batches(document_masks=True))
    cut = list(micro_batches(random_length_probability=0.2))
    assert {present for present, _ in cut} == {True, False}
    assert all(bool((documents == -1).any()) == present for present, documents in cut)


def test_random_length_rule(corpora: dict[str, Corpus]) -> None:
    batch = Batch(length=16)
    counts = [training(corpora, batch=batch, lookahead=0, random_length_probability=0.3).sample(n).corrupted.count for n in range(1500)]
    cut = [count for count in counts if count < 16]
    assert abs(len(cut) / 1500 - 0.3 * 15 / 16) < 0.05  # 4 standard deviations
    assert set(cut) == set(range(1, 16)) and abs(np.mean(cut) - 8) < 1
    off = training(corpora, batch=batch, lookahead=0, random_length=False, random_length_probability=1.0)
    assert all(off.sample(n).corrupted.count == 16 for n in range(20))


@pytest.mark.parametrize(("dp_size", "draws", "lookahead"), [(1, 1, 0), (2, 3, 1), (4, 1, 1)])
def test_validation_reads_everything_once(corpora: dict[str, Corpus], dp_size: int, draws: int, lookahead: int) -> None:
    batch = Batch()
    samples = ValidationSamples(data_config(), corpora, batch, corrupt=corrupt, lookahead=lookahead, draws=draws, seed=1)
    ranks = [list(build_validation_loader(samples, data_config(), batch, dp_rank=r, dp_size=dp_size)) for r in range(dp_size)]
    assert len({len(shards) for shards in ranks}) == 1
    found = rows([shard for shards in ranks for shard in shards])
    filler = found.pop(-1, None)
    assert filler is None or int(filler["count"]) == 0
    assert sorted(found) == list(range(len(samples)))
    text = [row["target ids"][:16][row["documents"][:16] >= 0] for _, row in sorted(found.items())[::draws]]
    expected = np.concatenate([corpus.read(0, corpus.tokens)[0] for corpus in corpora.values()])
    if lookahead == 0:
        assert torch.cat(text).tolist() == expected.tolist()
    assert sorted(int(float(row["t"]) * len(samples)) for row in found.values()) == list(range(len(samples)))  # one t in each cell


def test_ar_validation_scores_every_token_but_a_sources_first(corpora: dict[str, Corpus]) -> None:
    samples = ValidationSamples(data_config(), corpora, Batch(), corrupt=corrupt, lookahead=1, draws=1, seed=1)
    targets = 0
    for number in range(len(samples)):
        documents = samples.sample(number).corrupted.inputs["documents"]
        targets += int((documents[1:] >= 0).sum())
    assert targets == sum(corpus.tokens - 1 for corpus in corpora.values())


def test_fingerprint_and_audit(corpora: dict[str, Corpus]) -> None:
    samples = training(corpora)
    assert samples.fingerprint(3) == training(corpora).fingerprint(3) != samples.fingerprint(4)
    assert samples.addresses(3) == [samples.mixture.address(n) for n in range(24, 32)]
    address, touched = samples.documents(3)[0]
    file, first, last = touched[0]
    assert file.startswith("shard_") and 0 <= first <= last and address.source in corpora


def test_a_corpus_shorter_than_one_sample(corpora: dict[str, Corpus]) -> None:
    tokens = corpora["b"].tokens
    training(corpora, batch=Batch(length=tokens - 1))
    with pytest.raises(UserError, match=f"'b' .* has {tokens} tokens, fewer than one sample of {tokens + 1}"):
        training({"b": corpora["b"]}, batch=Batch(length=tokens))


class Failing:
    """Samples that fail from number 16 on."""

    def __init__(self, samples: TrainingSamples) -> None:
        self._samples, self.skips = samples, samples.skips

    def sample(self, number: int) -> object:
        if number >= 16:
            raise UserError("shard_00007.bin is cut off")
        return self._samples.sample(number)


@pytest.mark.parametrize("kind", ["plain", "dali"])
def test_errors_of_the_thread_reach_the_loop_and_nothing_hangs(corpora: dict[str, Corpus], kind: str) -> None:
    config = replace(data_config(), loader=kind)
    loader = build_loader(Failing(training(corpora)), config, Batch(), dp_rank=0, dp_size=1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^shard_00007\.bin is cut off$"), loader:
        for _ in range(3):
            next(loader)
    assert not [thread for thread in threading.enumerate() if thread.name == "data loader"]


@pytest.mark.parametrize("kind", ["plain", "dali"])
def test_loaders_stop_when_closed_or_forgotten(corpora: dict[str, Corpus], kind: str) -> None:
    samples, config = training(corpora), replace(data_config(), loader=kind)
    loader = build_loader(samples, config, Batch(), dp_rank=0, dp_size=1)
    next(loader)
    del loader
    closed = build_loader(samples, config, Batch(), dp_rank=0, dp_size=1)
    closed.close()
    with pytest.raises(StopIteration):
        for _ in range(9):
            next(closed)
    assert not [thread for thread in threading.enumerate() if thread.name == "data loader"]
