"""Work over many files: results in order, progress that adds up, and what happens when a worker dies."""

import os
import signal
from pathlib import Path

import pytest

from data_prep.documents import Unit, pieces
from data_prep.scan import Count, Result, finished_report, scan, write_report
from pretrain.errors import UserError


def units(count: int) -> list[Unit]:
    return [Unit(number, "s", f"file{number}", 10, None, "text") for number in range(count)]


def square(unit: Unit, part: Path, count: Count) -> Result:
    count(unit.bytes, 1)
    return {"square": unit.number**2}


def dying(unit: Unit, part: Path, count: Count) -> Result:
    if unit.number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return square(unit, part, count)


def refusing(unit: Unit, part: Path, count: Count) -> Result:
    raise UserError(f"{unit.path} is bad")


def test_results_come_in_the_order_of_the_units(tmp_path: Path) -> None:
    assert finished_report(tmp_path / "out", {"a": 1}) is None
    assert scan(units(5), square, tmp_path / "out", workers=2) == [{"square": number**2} for number in range(5)]


def test_a_killed_worker_is_one_sentence_and_costs_only_its_file(tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert finished_report(output, {"a": 1}) is None
    with pytest.raises(UserError, match="a worker was killed, probably for lack of memory; run the same command to continue, with fewer workers="):
        scan(units(4), dying, output, workers=2)
    assert finished_report(output, {"a": 1}) is None
    assert scan(units(4), square, output, workers=1) == [{"square": number**2} for number in range(4)]
    write_report(output, {"request": {"a": 1}})
    assert finished_report(output, {"a": 1}) == {"request": {"a": 1}} and [path.name for path in output.iterdir()] == ["report.json"]


def test_a_refusal_in_a_worker_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^file[01] is bad$"):
        scan(units(2), refusing, tmp_path / "out", workers=2)


@pytest.mark.parametrize("length", [0, 5, 10, 11, 57])
def test_pieces_cover_the_text_and_overlap(length: int) -> None:
    text = "".join("ab cd"[i % 5] for i in range(length))
    found = list(pieces(text, 10, 4))
    assert all(len(piece) <= 14 for piece in found) and found[0] == text[: len(found[0])] and text.endswith(found[-1])
    windows = {text[i : i + 2] for i in range(length - 1)}
    assert windows <= {piece[i : i + 2] for piece in found for i in range(len(piece) - 1)}
