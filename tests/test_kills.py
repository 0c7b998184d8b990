"""A run that is killed at random moments ends where an uninterrupted one ends; `python -m tests.kills --kills 100` is the long version."""

import pytest

from tests.kills import prove


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills"), [(1, 6), (2, 5)])
def test_killed_again_and_again(tmp_path, ranks, kills):
    found, steps = prove(tmp_path, ranks, kills, seed=ranks)
    assert sum(found.values()) == kills and steps >= ranks * (4 * kills + 10)
