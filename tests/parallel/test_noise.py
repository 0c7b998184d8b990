"""Noise is a function of (seed, sample, stream) and of nothing else."""

import hashlib

import numpy as np
import pytest

from pretrain.parallel.noise import Noise

GOLDEN = "5573bfc5"
RECORDED_WITH_NUMPY = "2.4.6"


def test_golden_bits() -> None:
    """NumPy may change Generator streams between versions: a run must not change its noise unnoticed."""
    digest = hashlib.blake2b(digest_size=4)
    for seed, index, name in [(1, 0, "mask"), (1, 1, "mask"), (1, 0, "t"), (2, 0, "mask"), (1, 2**40, "mask")]:
        digest.update(Noise(seed=seed, index=index, position=0, batch=1).stream(name).random(1000).tobytes())
    assert digest.hexdigest() == GOLDEN, f"recorded with numpy {RECORDED_WITH_NUMPY}, this is {np.__version__}"


def test_streams_differ_and_repeat() -> None:
    noise = Noise(seed=1, index=7, position=0, batch=4)
    first = noise.stream("mask").random(100)
    np.testing.assert_array_equal(first, noise.stream("mask").random(100))
    for other in (noise.stream("t"), Noise(1, 8, 0, 4).stream("mask"), Noise(2, 7, 0, 4).stream("mask")):
        assert not np.intersect1d(first, other.random(100)).size


def test_neighbouring_samples_do_not_share_counters() -> None:
    """A long draw of one sample must not run into the next sample's numbers."""
    long = Noise(1, 0, 0, 1).stream("mask").random(200_000)
    assert not np.isin(Noise(1, 1, 0, 1).stream("mask").random(1000), long).any()


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_time_is_stratified_over_the_global_batch(batch: int) -> None:
    """Exactly one t in each of the `batch` cells, at every step, and uniform within its cell."""
    within = []
    for step in range(20):
        t = np.array([Noise(3, step * batch + i, i, batch).stratified_time() for i in range(batch)])
        assert sorted(np.floor(t * batch).astype(int)) == list(range(batch))
        within.extend(t * batch % 1.0)
    assert abs(np.mean(within) - 0.5) < 4 / np.sqrt(12 * len(within))
