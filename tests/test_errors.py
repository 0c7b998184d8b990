"""Words for numbers."""

import pytest

from pretrain.errors import are, counted


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 files"), (1, "1 file"), (1.2, "1 file"), (2, "2 files"), (1200, "1,200 files"), (float("nan"), "nan files")]
)
def test_one_file_and_two_files(number: float, said: str) -> None:
    assert counted(number, "file") == said


def test_other_plurals() -> None:
    assert [counted(number, "entry", "entries") for number in (1, 2)] == ["1 entry", "2 entries"]
    said = [f"{bad} of {counted(3, 'line')} {are(bad)} bad" for bad in (0, 1, 3)]
    assert said == ["0 of 3 lines are bad", "1 of 3 lines is bad", "3 of 3 lines are bad"]
