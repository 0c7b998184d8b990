"""Schedules of mixtures: exact in every phase, no window twice before an epoch is complete, and a past that cannot change."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.config import DataConfig, PhaseConfig, SourceConfig
from pretrain.data.mixture import BLOCK, Mixture, largest_remainder
from pretrain.data.phases import Phase, begun, check_phases, continued, first_step, from_record, planned_phases, to_record
from pretrain.errors import UserError

WINDOWS = {"a": 137, "b": 41, "c": 300}
GLOBAL, LENGTH = 8, 16
STEP = GLOBAL * LENGTH


def config(*phases: tuple[float | None, dict[str, float]], **weights: float) -> DataConfig:
    sources = {name: SourceConfig(path=name, weight=weights.get(name, 1.0)) for name in WINDOWS if not weights or name in weights}
    return DataConfig(train=sources, phases=[PhaseConfig(until=until, mix=mix) for until, mix in phases])


def planned(data: DataConfig) -> list[Phase]:
    return planned_phases(data, global_sequences=GLOBAL, length=LENGTH)


def goes_on(past: list[Phase], data: DataConfig, *, step: int) -> list[Phase]:
    return continued(past, planned(data), at=GLOBAL * step, declared=bool(data.phases), length=LENGTH)


def mixture(phases: list[Phase]) -> Mixture:
    return Mixture(phases, WINDOWS, seed=3)


def assert_epochs_are_whole(found: Mixture, samples: int) -> None:
    """Each source is read window by window: pass after pass, each window once in each, from the first to one that may not be complete.

    Only a block that is not complete (1024 samples, shuffled) may hold what belongs before what was read already.
    """
    visits: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number in range(samples):
        address = found.address(number)
        visits[address.source].append((address.epoch, address.window))
    counts = found.counts(samples)
    for name, seen in visits.items():
        per_epoch = Counter(epoch for epoch, _ in seen)
        assert len(set(seen)) == len(seen) == counts[name], f"a window of {name} came twice in one pass"
        complete = (len(seen) - BLOCK) // WINDOWS[name]
        assert all(per_epoch[epoch] == WINDOWS[name] for epoch in range(complete)), name
        assert max(per_epoch) <= (len(seen) + BLOCK) // WINDOWS[name]


mixes = st.dictionaries(st.sampled_from(sorted(WINDOWS)), st.floats(0.01, 10), min_size=1)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.tuples(st.integers(1, 200), mixes), min_size=1, max_size=4))
def test_every_phase_is_exact_and_every_epoch_whole(parts: list[tuple[int, dict[str, float]]]) -> None:
    ends = [sum(steps for steps, _ in parts[: i + 1]) for i in range(len(parts))]
    phases = planned(config(*((STEP * end, mix) for end, (_, mix) in zip(ends, parts, strict=True)), (None, {"a": 1.0})))
    found = mixture(phases)
    for phase, (steps, mix) in zip(phases, parts, strict=False):
        assert phase.end is not None and phase.end - phase.start == GLOBAL * steps
        before, after = found.counts(phase.start), found.counts(phase.end)
        names = list(mix)
        assert [after[name] - before[name] for name in names] == largest_remainder([mix[name] for name in names], GLOBAL * steps)
    total = GLOBAL * ends[-1]
    listed = Counter(found.address(number).source for number in range(total))
    assert {name: count for name, count in found.counts(total).items() if count} == listed
    assert_epochs_are_whole(found, total)


@settings(deadline=None, max_examples=12)
@given(first=mixes, second=mixes, third=mixes, switches=st.lists(st.integers(1, 300), min_size=2, max_size=2, unique=True))
def test_switching_at_any_step_keeps_the_past_and_the_positions(
    first: dict[str, float], second: dict[str, float], third: dict[str, float], switches: list[int]
) -> None:
    one, two = sorted(switches)
    phases = planned(config(**first))
    history = [phases]
    for step, mix in ((one, second), (two, third)):
        phases = goes_on(phases, config(**mix), step=step)
        history.append(phases)
    end = GLOBAL * (two + 150)
    for earlier, later, step in ((history[0], history[1], one), (history[1], history[2], two)):
        old, new = mixture(earlier), mixture(later)
        assert [old.address(number) for number in range(GLOBAL * step)] == [new.address(number) for number in range(GLOBAL * step)]
        assert old.counts(GLOBAL * step) == {name: new.counts(GLOBAL * step)[name] for name in old.counts(GLOBAL * step)}
    assert_epochs_are_whole(mixture(phases), end)
    assert goes_on(phases, config(**third), step=two + 1) == phases, "nothing changes where nothing is changed"
    assert from_record(to_record(phases)) == phases


def test_a_step_belongs_to_the_phase_of_its_first_token() -> None:
    assert [first_step(tokens, STEP) for tokens in (1, STEP, STEP + 1, 2 * STEP)] == [1, 1, 2, 2]
    assert first_step(1.4e12, 256 * 2048) == 2670289
    phases = planned(config((10.5 * STEP, {"a": 1}), (None, {"b": 1})))
    assert [mixture(phases).address(GLOBAL * 11 + offset).source for offset in (-1, 0)] == ["a", "b"]


def test_a_phase_is_announced_at_its_first_step_only() -> None:
    """Steps of 4 samples of 16 tokens; phases of 2 steps, 1 step and the rest. After a step is left out (its text is), the next one announces."""
    phases = [Phase(start=0, end=8, mix={"a": 1.0}, laid_out=8), Phase(start=8, end=12, mix={"a": 1.0, "b": 3.0}, laid_out=12)]
    phases.append(Phase(start=12, end=None, mix={"b": 1.0}, laid_out=None))
    said = [begun(phases, 4 * step, 4 * step - 4 if step else None, length=16) for step in range(5)]
    assert said == [
        "phase 1 of 3 begins at 0 tokens, to 128: a 100%", None, "phase 2 of 3 begins at 128 tokens, to 192: a 25%, b 75%",
        "phase 3 of 3 begins at 192 tokens, to the end: b 100%", None,
    ]  # fmt: skip
    assert "phase 3 of 3 begins at 256 tokens" in str(begun(phases, 16, 8, length=16))
    assert begun(phases[:1], 0, None, length=16) is None and begun((), 0, None, length=16) is None


def test_a_weight_of_zero_is_not_read_and_continues_later() -> None:
    phases = planned(config((20 * STEP, {"a": 1, "b": 1}), (40 * STEP, {"a": 1, "b": 0}), (None, {"b": 1})))
    found = mixture(phases)
    assert {found.address(number).source for number in range(20 * GLOBAL, 40 * GLOBAL)} == {"a"}
    assert found.counts(40 * GLOBAL) == {"a": 240, "b": 80}
    seen = [found.address(number) for number in (*range(20 * GLOBAL), *range(40 * GLOBAL, 40 * GLOBAL + BLOCK))]
    passes = Counter((address.epoch, address.window) for address in seen if address.source == "b")
    assert set(passes.values()) == {1} and len(passes) == 80 + BLOCK
    assert sum(epoch == 1 for epoch, _ in passes) == 41, "the second pass, half read in the first phase, was completed in the third"


A, B, C = {"a": 3.0, "b": 1.0}, {"b": 1.0}, {"c": 2.0, "a": 1.0}


def test_only_the_future_of_a_declared_schedule_may_change() -> None:
    past = planned(config((100 * STEP, A), (None, B)))
    longer = goes_on(past, config((150 * STEP, A), (None, B)), step=50)
    assert [(phase.start, phase.end) for phase in longer] == [(0, 400), (400, 1200), (1200, None)]
    shorter = goes_on(past, config((60 * STEP, A), (None, B)), step=50)
    assert [(phase.start, phase.end, phase.laid_out) for phase in shorter] == [(0, 480, 800), (480, None, None)], "what was laid out stays"
    other = goes_on(past, config((100 * STEP, A), (200 * STEP, C), (None, B)), step=50)
    assert [phase.mix for phase in other] == [A, C, B] and other[0] == past[0]
    assert goes_on(past, config((50 * STEP, A), (None, C)), step=50)[-1].start == 400, "from here on"
    with pytest.raises(UserError, match=r"now reads b 100% in tokens 5,120 to 6,400, which this run has read as a 75%, b 25%.*until 6,400"):
        goes_on(past, config((40 * STEP, A), (None, B)), step=50)
    with pytest.raises(UserError, match="what is past cannot change"):
        goes_on(past, config((100 * STEP, C), (None, B)), step=50)
    scaled = {name: 10 * weight for name, weight in A.items()}
    assert goes_on(past, config((100 * STEP, scaled), (None, B)), step=50) == past, "shares count, not how they are written"


def test_phases_take_over_from_weights() -> None:
    past = planned(config(**A))
    now = goes_on(past, config((100 * STEP, A), (None, C)), step=50)
    assert [(phase.start, phase.end, phase.mix) for phase in now] == [(0, 800, A), (800, None, C)]
    with pytest.raises(UserError, match="what is past cannot change"):
        goes_on(past, config((100 * STEP, C), (None, A)), step=50)


def test_a_source_that_is_gone_is_named_when_its_samples_are_asked_for() -> None:
    phases = goes_on(planned(config(**A)), config(**C), step=3)
    without = Mixture(phases, {"a": 137, "c": 300}, seed=3)
    assert without.address(GLOBAL * 3).source in C
    with pytest.raises(UserError, match="was read from source 'b', which data.train no longer names"):
        [without.address(number) for number in range(GLOBAL * 3)]


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        ([(100, {"x": 1})], r"data.phases\[0\].mix names x, which is not a source of data.train; known: a, b, c"),
        ([(100, {"a": -1})], r"data.phases\[0\].mix.a=-1 must be a share of at least 0"),
        ([(100, {"a": float("nan")})], r"mix.a=nan must be a share"),
        ([(100, {"a": 0})], r"data.phases\[0\].mix reads nothing"),
        ([(100, {})], r"data.phases\[0\].mix reads nothing"),
        ([(None, A), (100, B)], r"data.phases\[0\].until=null has no end, and another phase follows it"),
        ([(50, A), (50, B), (None, A)], r"data.phases\[1\].until=6400 must be more than the 6,400 tokens at which it begins; use for example 6528"),
        ([(50, A), (20, B)], r"data.phases\[1\].until=2560 must be more"),
        ([(50, A), (99, B)], r"data.phases\[1\].until=12672 ends the last phase before the run, which reads 12,800 tokens"),
    ],
)
def test_impossible_schedules(phases: list[tuple[float | None, dict[str, float]]], sentence: str) -> None:
    data = config(*((until and until * STEP, mix) for until, mix in phases))
    with pytest.raises(UserError, match=sentence):
        check_phases(data, tokens_per_step=STEP, steps=100)


def test_legal_schedules_and_weights_beside_them() -> None:
    check_phases(config((50 * STEP, A), (100 * STEP, B)), tokens_per_step=STEP, steps=100)
    check_phases(config(), tokens_per_step=STEP, steps=100)
    weighted = replace(config((50 * STEP, A), (None, B)), train={name: SourceConfig(path=name, weight=2) for name in WINDOWS})
    with pytest.raises(UserError, match="data.train.a.weight has no effect beside data.phases"):
        check_phases(weighted, tokens_per_step=STEP, steps=100)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_impossible_weights(weight: float) -> None:
    with pytest.raises(UserError, match="'b' has weight"):
        planned(config(a=1, b=weight))


def test_nothing_to_mix() -> None:
    with pytest.raises(UserError, match="no data source has a weight above 0"):
        planned(config(a=0))


def test_a_phase_shorter_than_a_block() -> None:
    phases = planned(config((STEP, A), (2 * STEP, B), (None, C)))
    assert phases[1].end is not None and phases[1].end < BLOCK
    assert mixture(phases).counts(2 * GLOBAL) == {"a": 6, "b": 10, "c": 0}
