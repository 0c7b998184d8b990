"""Spikes at equal diffusion time, on sequences whose law is known."""

import json

import numpy as np
import pytest

from pretrain.telemetry.spikes import Running, SpikeDetector

BINS, SAMPLES, LENGTH = 10, 256, 64


def batch(generator: np.random.Generator, *, level: float = 1.0, low: float = 0.0, samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Summed losses and tokens by bin, of samples whose loss per token is heavy-tailed in t: masked tokens weighted by 1/t, of mean `level`."""
    t = generator.uniform(0, 1, samples)
    if low:
        t[: int(low * samples)] = generator.uniform(0, 0.1, int(low * samples))
    masked = generator.binomial(LENGTH, t)
    # A hard sequence is hard all along; and let low t cost more per token, as for a model that has learnt the high ones first.
    hardness = generator.lognormal(-0.02, 0.2, samples) * level
    loss = hardness * (3 - 2 * t) * masked / np.maximum(t, 1e-3)
    row = np.minimum((t * BINS).astype(int), BINS - 1)
    return np.bincount(row, loss, BINS), np.bincount(row, minlength=BINS) * float(LENGTH)


class Unconditional:
    """What a detector without bins sees: one loss per token."""

    def __init__(self) -> None:
        self.detector = SpikeDetector(threshold=6, warmup=200)

    def judge(self, losses: np.ndarray, tokens: np.ndarray) -> float | None:
        return self.detector.judge(losses.sum(keepdims=True), tokens.sum(keepdims=True))


def warmed(generator: np.random.Generator) -> tuple[SpikeDetector, Unconditional]:
    conditional, unconditional = SpikeDetector(threshold=6, warmup=200), Unconditional()
    for _ in range(1000):
        losses, tokens = batch(generator)
        conditional.judge(losses, tokens)
        unconditional.judge(losses, tokens)
    return conditional, unconditional


@pytest.mark.parametrize("samples", [SAMPLES, 16])
def test_no_false_alarm_in_ten_thousand_stationary_steps(samples):
    """Also where a batch is so small that bins are empty or hold one sample."""
    generator = np.random.default_rng(1)
    detector = SpikeDetector(threshold=6, warmup=200)
    assert [step for step in range(10_000) if detector.judge(*batch(generator, samples=samples)) is not None] == []


def test_a_falling_loss_is_no_spike_and_neither_is_its_end():
    generator = np.random.default_rng(2)
    detector = SpikeDetector(threshold=6, warmup=200)
    levels = [1 + 9 * np.exp(-step / 300) for step in range(4000)]
    assert [step for step, level in enumerate(levels) if detector.judge(*batch(generator, level=level)) is not None] == []


def test_a_jump_is_found_that_an_unconditional_detector_misses():
    """The t of a batch moves its mean loss more than the jump does: only at equal t does it stand out."""
    generator = np.random.default_rng(3)
    conditional, unconditional = SpikeDetector(threshold=6, warmup=200), Unconditional()
    for _ in range(1000):
        drawn = batch(generator, low=generator.uniform(0.1, 0.9))
        conditional.judge(*drawn)
        unconditional.judge(*drawn)
    spikes = [batch(generator, level=1.5, low=0.2) for _ in range(20)]
    found = [conditional.judge(*drawn) is not None for drawn in spikes]
    assert all(found[:5]) and sum(found) > 10, "later ones count as less, since the level may have come to stay"
    assert not any(unconditional.judge(*drawn) for drawn in spikes)


def test_a_batch_of_low_times_is_no_spike_where_an_unconditional_detector_fires():
    """It has a high loss, and nothing is wrong."""
    generator = np.random.default_rng(4)
    conditional, unconditional = warmed(generator)
    losses, tokens = np.zeros(BINS), np.zeros(BINS)
    while tokens[:3].sum() < SAMPLES * LENGTH:
        more, seen = batch(generator)
        losses[:3] += more[:3]
        tokens[:3] += seen[:3]
    assert unconditional.judge(losses, tokens) is not None
    assert conditional.judge(losses, tokens) is None


def test_one_extreme_bin_decides_nothing():
    generator = np.random.default_rng(5)
    conditional, _ = warmed(generator)
    losses, tokens = batch(generator)
    losses[0] *= 1000
    assert conditional.judge(losses, tokens) is None
    losses, tokens = batch(generator)
    assert conditional.judge(losses * 1.5, tokens) is not None


def test_an_objective_without_time_has_one_part():
    generator = np.random.default_rng(6)
    detector = SpikeDetector(threshold=6, warmup=200)
    tokens = np.array([4096.0])
    scores = [detector.judge(tokens * generator.normal(3, 0.02, 1), tokens) for _ in range(2000)]
    assert not any(scores) and detector.judge(tokens * 3.5, tokens) is not None


def test_a_level_that_stays_is_accepted():
    generator = np.random.default_rng(7)
    conditional, _ = warmed(generator)
    alarms = [conditional.judge(*batch(generator, level=1.5)) is not None for _ in range(2000)]
    assert alarms[0] and not any(alarms[1500:])


def test_a_resumed_detector_decides_the_same():
    generator = np.random.default_rng(8)
    one, _ = warmed(generator)
    two = SpikeDetector(threshold=6, warmup=200)
    two.load(json.loads(json.dumps(one.state())))
    for _ in range(50):
        drawn = batch(generator, level=generator.choice([1.0, 1.4]))
        assert one.judge(*drawn) == two.judge(*drawn)


def test_running_values_are_those_of_the_sequence():
    """Without outliers: the exponentially weighted mean and variance of normal draws, at any weight."""
    generator = np.random.default_rng(9)
    running = Running()
    for _ in range(20_000):
        weight = generator.uniform(1, 5)
        running.add(generator.normal(2.0, 3.0 / np.sqrt(weight)), weight)
    assert running.mean == pytest.approx(2.0, abs=0.5) and running.variance == pytest.approx(9.0, rel=0.4)
