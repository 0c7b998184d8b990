"""Exact integer accounting of a weighted mixture."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.mixture import BLOCK, PERIOD, Mixture, balanced, largest_remainder
from pretrain.data.phases import Phase


def mixed(mix: dict[str, float], windows: dict[str, int], *, seed: int) -> Mixture:
    """One phase without end."""
    return Mixture([Phase(start=0, end=None, mix=mix, laid_out=None)], windows, seed=seed)


weights = st.lists(st.floats(1e-12, 1e6), min_size=1, max_size=9)


@given(weights=weights, total=st.integers(10, 10**6))
def test_largest_remainder_is_exact_and_within_one(weights: list[float], total: int) -> None:
    counts = largest_remainder(weights, total)
    assert sum(counts) == total
    assert all(count >= 1 for count in counts)
    for count, weight in zip(counts, weights, strict=True):
        share = total * weight / sum(weights)
        assert count <= share + 1 + 1e-6 * total
    assert largest_remainder([1, 1, 1], 100) == [34, 33, 33]
    assert largest_remainder([0.5, 0.3, 0.2], 7) == [4, 2, 1]


@given(weights=weights, samples=st.integers(0, 10**12))
def test_counts_are_exact_monotone_and_follow_the_weights(weights: list[float], samples: int) -> None:
    counts = largest_remainder(weights, PERIOD)
    before, after = balanced(counts, samples), balanced(counts, samples + 1)
    assert sum(before) == samples
    assert sorted(high - low for low, high in zip(before, after, strict=True)) == [0] * (len(weights) - 1) + [1]
    for count, weight in zip(before, weights, strict=True):
        assert abs(count - samples * weight / sum(weights)) <= len(weights) + 2 * len(weights) * samples / PERIOD + 1e-9 * samples


def test_addresses_agree_with_counts_and_visit_each_window_once_per_epoch() -> None:
    mixture = mixed({"a": 0.7, "b": 0.3, "tiny": 1e-9}, {"a": 50, "b": 7, "tiny": 3}, seed=5)
    addresses = [mixture.address(n) for n in range(4 * BLOCK)]
    found = Counter(address.source for address in addresses)
    assert {name: found[name] for name in ("a", "b", "tiny")} == mixture.counts(4 * BLOCK)
    per_epoch = Counter((address.source, address.epoch) for address in addresses)
    visits = Counter(addresses)
    assert set(visits.values()) == {1}
    assert per_epoch["a", 0] == 50 and per_epoch["a", 1] == 50 and per_epoch["b", 9] == 7
    assert mixture.epochs(4 * BLOCK)["b"] == mixture.counts(4 * BLOCK)["b"] / 7


def test_no_place_in_the_batch_favours_a_source() -> None:
    mixture = mixed({"a": 1, "b": 1}, {"a": 100, "b": 100}, seed=2)
    first_places = [mixture.address(8 * step).source for step in range(512)]
    assert 190 < first_places.count("a") < 322  # 256, 6 standard deviations


def test_another_seed_another_order() -> None:
    orders = [[mixed({"a": 1}, {"a": 1000}, seed=seed).address(n).window for n in range(20)] for seed in (1, 2)]
    assert orders[0] != orders[1]


GOLDEN = [("b", 3, 23), ("a", 15, 13), ("a", 45, 12), ("a", 26, 7), ("a", 4, 27), ("a", 44, 58)]


def test_the_order_of_samples_stays_what_it_was() -> None:
    """Runs are continued with later versions: this order was made before there were phases."""
    mixture = mixed({"a": 0.7, "b": 0.3}, {"a": 50, "b": 7}, seed=5)
    found = [mixture.address(n) for n in (0, 1, 2, 1023, 1024, 5000)]
    assert [(address.source, address.window, address.epoch) for address in found] == GOLDEN
