"""With and without DALI, with one thread or several: the same batches, for every objective, over phases."""

import threading
from functools import partial

import pytest
import torch

from pretrain.build import build_objective
from pretrain.data.batch import BatchShard
from pretrain.data.config import DataConfig, PhaseConfig, SourceConfig
from pretrain.data.corpus import Corpus
from pretrain.data.loader import build_loader
from pretrain.data.samples import NumberedSample, TrainingSamples
from pretrain.data.tokenizer import Tokenizer, vocabulary_for
from pretrain.errors import UserError
from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig
from tests.data.examples import Batch

OBJECTIVES = {
    "ar": ObjectiveConfig(name="ar"),
    "mdlm": ObjectiveConfig(name="mdlm"),
    "duo": ObjectiveConfig(name="duo"),
    "duo_curriculum": ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk", top_k=4, curriculum_end=5)),
    "esolm": ObjectiveConfig(name="esolm"),
    "esolm_mixed": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "replaid": ObjectiveConfig(name="replaid"),
    "mdm_prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=9)),
}
BATCH = Batch(global_sequences=8, micro_sequences=2, length=16)


def config(corpora: dict[str, Corpus], **values: object) -> DataConfig:
    phases = [PhaseConfig(until=3 * 8 * 16, mix={"a": 0.5, "b": 0.5}), PhaseConfig(mix={"b": 1.0})]
    train = {name: SourceConfig(path=str(corpus.folder)) for name, corpus in corpora.items()}
    return DataConfig(train=train, phases=phases, random_length_probability=0.2, **values)  # type: ignore[arg-type]


def samples_of(corpora: dict[str, Corpus], tokenizer: Tokenizer, objective: ObjectiveConfig, data: DataConfig) -> TrainingSamples:
    made = build_objective(objective, vocabulary_for(tokenizer, objective.has_mask, 128, None))
    return TrainingSamples(
        data, corpora, BATCH, corrupt=partial(made.corrupt, evaluation=False), lookahead=made.lookahead, random_length=made.random_length, seed=3,
        parts=made.parts,
    )  # fmt: skip


def taken(samples: TrainingSamples, data: DataConfig, steps: int, start: int = 0) -> list[BatchShard]:
    """The batches of data-parallel rank 1 of 2."""
    with build_loader(samples, data, BATCH, dp_rank=1, dp_size=2, start_step=start) as loader:
        return [next(loader) for _ in range(steps)]


def assert_same(some: list[BatchShard], others: list[BatchShard]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.step == other.step and len(one.micro_batches) == len(other.micro_batches)
        for left, right in zip(one.micro_batches, other.micro_batches, strict=True):
            assert left.sample_ids == right.sample_ids
            for mine, its in ((left.inputs, right.inputs), (left.targets, right.targets), ({"": left.count_B}, {"": right.count_B})):
                assert mine.keys() == its.keys()
                assert all(value.dtype == its[key].dtype and torch.equal(value, its[key]) for key, value in mine.items())
            assert torch.equal(left.t_B.nan_to_num(-1), right.t_B.nan_to_num(-1))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("document_masks", [False, True])
def test_dali_and_plain_give_identical_batches(corpora: dict[str, Corpus], tokenizer: Tokenizer, name: str, document_masks: bool) -> None:
    """Over the change of phase after step 3 and, for Duo's curriculum, that of the arrays after step 5."""
    of = {kind: config(corpora, loader=kind, document_masks=document_masks) for kind in ("plain", "dali")}
    plain, dali = (taken(samples_of(corpora, tokenizer, OBJECTIVES[name], data), data, 7, 1) for data in of.values())
    assert_same(plain, dali)


@pytest.mark.parametrize("kind", ["plain", "dali"])
def test_threads_change_nothing(corpora: dict[str, Corpus], tokenizer: Tokenizer, kind: str) -> None:
    found = []
    for workers in (1, 4):
        data = config(corpora, loader=kind, workers=workers)
        found.append(taken(samples_of(corpora, tokenizer, OBJECTIVES["mdlm"], data), data, 12))
    assert_same(*found)


@pytest.mark.parametrize("kind", ["plain", "dali"])
def test_the_first_error_in_order_comes_after_the_batches_before_it(corpora: dict[str, Corpus], tokenizer: Tokenizer, kind: str) -> None:
    """Sample 50 fails at once, sample 38 only after a while: the loop gets steps 0 to 3, then 38's error."""
    data = config(corpora, loader=kind, workers=4)
    inner = samples_of(corpora, tokenizer, OBJECTIVES["mdlm"], data)
    failed = threading.Event()

    class Failing:
        skips = inner.skips

        def sample(self, number: int) -> NumberedSample:
            if number == 50:
                failed.set()
            if number == 38:
                failed.wait(0.5)
            if number in (38, 50):
                raise UserError(f"sample {number} cannot be read")
            return inner.sample(number)

    with build_loader(Failing(), data, BATCH, dp_rank=1, dp_size=2) as loader:  # type: ignore[arg-type]
        assert [next(loader).step for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(UserError, match="sample 38 cannot be read"):
            next(loader)
