"""The order of an epoch visits everything once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.permutation import Permutation


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 300), key=st.text(max_size=8))
def test_is_a_bijection(n: int, key: str) -> None:
    order = Permutation(n, key)
    assert sorted(order(i) for i in range(n)) == list(range(n))


def test_huge_domains_need_no_memory() -> None:
    n = 10**12 + 39
    order = Permutation(n, "huge")
    images = {order(i) for i in range(2000)}
    assert len(images) == 2000 and all(0 <= image < n for image in images)


def test_looks_random() -> None:
    order = np.array([Permutation(5000, "a")(i) for i in range(5000)])
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05  # 3.5 standard deviations
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.05
    other = np.array([Permutation(5000, "b")(i) for i in range(5000)])
    assert (order == other).sum() < 10


def test_golden_order() -> None:
    """Runs that are under way depend on it: a change of these numbers breaks their resume."""
    assert [Permutation(10, "1/window/main/0")(i) for i in range(10)] == GOLDEN


def test_outside_the_domain() -> None:
    with pytest.raises(ValueError, match="range"):
        Permutation(3, "")(3)


GOLDEN = [1, 0, 4, 6, 5, 3, 9, 8, 7, 2]
