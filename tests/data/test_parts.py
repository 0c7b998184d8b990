"""Objectives that noise parts of a batch in different ways: who is in which part, and that no micro-batch mixes them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pretrain.data.corpus import Corpus
from pretrain.data.loader import Loader, build_validation_loader
from pretrain.data.parts import part_of, part_sizes
from pretrain.data.samples import NumberedSample, TrainingSamples, ValidationOrder, ValidationSamples
from pretrain.objectives.base import Corrupted
from pretrain.parallel.noise import Noise
from tests.data.examples import Batch, corrupt, data_config


def recorded(tokens: np.ndarray, documents: np.ndarray, noise: Noise) -> Corrupted:
    """The noise that a sample was given, as targets; the second part's samples are twice as long."""
    plain = corrupt(tokens, documents, noise)
    facts = np.array([noise.part, noise.position, noise.batch, noise.step, noise.index], np.int64)
    inputs = {key: np.concatenate([value, value]) if noise.part and value.ndim else value for key, value in plain.inputs.items()}
    return replace(plain, inputs=inputs, targets={"facts": facts, "share": np.array(noise.share)})


@pytest.mark.parametrize(("shares", "sizes"), [((1.0,), [8]), ((0.5, 0.5), [4, 4]), ((0.25, 0.75), [2, 6]), ((0.3, 0.3, 0.4), [2, 3, 3])])
def test_parts_cover_the_batch(shares: tuple[float, ...], sizes: list[int]) -> None:
    assert part_sizes(shares, 8) == sizes
    places = [part_of(position, sizes) for position in range(8)]
    assert places == [(part, place) for part, size in enumerate(sizes) for place in range(size)]
    with pytest.raises(ValueError, match="1 beyond"):
        part_of(8, sizes)


def test_training_samples_know_their_part(corpora: dict[str, Corpus]) -> None:
    samples = TrainingSamples(data_config(), corpora, Batch(), corrupt=recorded, lookahead=0, random_length=False, seed=7, parts=(0.25, 0.75))
    for number in range(24):
        noised = samples.sample(number).corrupted
        step, position = divmod(number, 8)
        part, place, size = (0, position, 2) if position < 2 else (1, position - 2, 6)
        assert noised.targets["facts"].tolist() == [part, place, size, step, number]
        assert noised.targets["share"] == size / 8


@pytest.mark.parametrize(("draws", "dp_size"), [(1, 1), (3, 2)])
def test_validation_draws_every_sequence_in_every_part(corpora: dict[str, Corpus], draws: int, dp_size: int) -> None:
    """Micro-batches hold one part each (stacking would fail otherwise), and `sequences` says what each position scores."""
    batch = Batch(micro_sequences=4)
    samples = ValidationSamples(data_config(), corpora, batch, corrupt=recorded, lookahead=0, draws=draws, seed=1, parts=2)
    windows = sum(-(-corpus.tokens // 16) for corpus in corpora.values())
    seen: list[tuple[int, int]] = []
    for rank in range(dp_size):
        with build_validation_loader(samples, data_config(), batch, dp_rank=rank, dp_size=dp_size) as loader:
            micro_batches = [micro for shard in loader for micro in shard.micro_batches]
        for micro in micro_batches:
            assert len(set(micro.targets["facts"][:, 0].tolist())) == 1 and (micro.targets["share"] == 0.5).all()
            parts = micro.targets["facts"][:, 0].tolist()
            seen += [(number, part) for number, part in zip(micro.sample_ids, parts, strict=True) if number >= 0]
    sequences = samples.sequences(len(samples) + 5)
    assert (sequences[len(samples) :] == -1).all() and (sequences >= 0).sum() == len(seen) == 2 * windows * draws
    counted = sorted((int(sequences[number]), part) for number, part in seen)
    assert counted == sorted((window, part) for window in range(windows) for part in range(2) for _ in range(draws))


def test_a_sequences_noise_does_not_depend_on_the_micro_batch(corpora: dict[str, Corpus]) -> None:
    def facts(micro: int) -> dict[tuple[int, int], list[int]]:
        samples = ValidationSamples(
            data_config(), corpora, Batch(micro_sequences=micro), corrupt=recorded, lookahead=0, draws=1, seed=1, parts=2
        )  # fmt: skip
        found = (samples.sample(number) for number in range(len(samples)))
        rows = [(sample.number, sample.corrupted.targets["facts"].tolist()) for sample in found if sample.number >= 0]
        return {(int(samples.sequences(number + 1)[number]), row[0]): row for number, row in rows}

    assert facts(1) == facts(8)


class Changing:
    """Samples whose arrays change their number of axes and their names after three steps, as when a curriculum ends."""

    def sample(self, number: int) -> NumberedSample:
        soft = number < 24
        ids = np.full((16, 3) if soft else (16,), number)
        inputs = {"ids": np.asfortranarray(ids), "documents": np.zeros(16, np.int32)}
        if soft:
            inputs["weights"] = np.full((16, 3), 0.5, np.float32)
        return NumberedSample(number, Corrupted(inputs=inputs, targets={"ids": ids}, count=16))


@pytest.mark.parametrize("loader", ["plain", "dali"])
def test_arrays_may_change_between_steps(loader: str) -> None:
    config, batch = data_config(loader=loader), Batch()
    with Loader(Changing(), config, batch, dp_rank=0, dp_size=1, steps=iter(range(6)), device="cpu") as batches:
        shards = list(batches)
    assert [shard.step for shard in shards] == list(range(6))
    for shard in shards:
        numbers = [number for micro in shard.micro_batches for number in micro.sample_ids]
        assert numbers == list(range(shard.step * 8, shard.step * 8 + 8))
        for micro in shard.micro_batches:
            assert ("weights" in micro.inputs) == (shard.step < 3) == (micro.inputs["ids"].dim() == 3)
            assert (micro.inputs["ids"].flatten(1)[:, 0].tolist()) == list(micro.sample_ids)


def test_the_text_of_a_validation_is_not_tied_to_times() -> None:
    """Cells of the time axis, in the order of the text: each once in a part, and unordered. The rank correlation of 600 shuffled pairs has a
    standard deviation of 1 / sqrt(599)."""
    order = ValidationOrder(200, draws=3, parts=2, micro_sequences=8, seed=5, key="validation")
    drawn = [order.draw(number) for number in range(len(order))]
    assert [item for item, _ in drawn] == [number // 3 for number in range(600)] * 2 == list(order.items(len(order)))
    for part in (drawn[:600], drawn[600:]):
        cells = [noise.position for _, noise in part]
        assert sorted(cells) == list(range(600))
        assert abs(np.corrcoef(cells, np.arange(600))[0, 1]) < 5 / math.sqrt(599)
