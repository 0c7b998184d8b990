"""What a person sees of a sampler at work: on a terminal, and where there is none."""

import io
from typing import Any

import pytest
import torch

from pretrain.hf_model.sampling_network import Snapshot
from pretrain.sampling.output import LINE_WIDTH, LINES, SamplingDisplay
from pretrain.sampling.view import Viewer, printable

END, SIZE = 3, 128


def decode(rows: list[list[int]]) -> list[str]:
    return ["".join(map(chr, row)) for row in rows]


def snapshot(ids: list[int], digits: list[list[int]] | None = None, name: int = 0) -> Snapshot:
    digits_BLJ = None if digits is None else torch.tensor([digits])
    return Snapshot(sequences_B=torch.tensor([name]), ids_BL=torch.tensor([ids]), digits_BLJ=digits_BLJ)


VIEWER = Viewer(decode, end=END, size=SIZE)


def test_lines() -> None:
    a, b, newline = ord("a"), ord("b"), ord("\n")
    assert VIEWER.text(snapshot([a, b, -1, -1, a])) == "ab ░░ a"
    assert VIEWER.text(snapshot([a, SIZE, a])) == "a ░ a", "the mask as an id like any other is no text"
    assert VIEWER.text(snapshot([a, END, b, newline])) == "a ¶ b⏎"
    assert Viewer(decode, end=END, size=SIZE, skip=1).text(snapshot([END, a])) == "a"
    assert VIEWER.text(snapshot([a, -1, -1, -1], [[0, 1, 0], [1, -1, 0], [-1] * 3, [-1, 1, 1]])) == "a ‹1?0›░‹?11›"
    assert VIEWER.text(snapshot([-1], [[11, -1]])) == "‹11.?›"


def test_orders_to_the_terminal_are_not_passed_on() -> None:
    assert printable("a\x1b[2Jb\r\n\tü") == "a\ufffd[2Jb\ufffd\n\tü"
    assert VIEWER.text(snapshot([27, ord("x")])) == "\ufffdx"


def test_without_a_terminal_some_lines_at_even_distances() -> None:
    stream = io.StringIO()
    with SamplingDisplay(1000, stream, viewer=VIEWER) as display:
        for step in range(500):
            display.advance(2)
            display.watch(snapshot([ord("a")] * (1 + step) + [-1], name=4 if step < 250 else 9))
    lines = stream.getvalue().splitlines()
    assert len(lines) == LINES and lines[0] == f"sequence 5, step 25 | 50/1000 tokens | {'a' * 25} ░"
    assert lines[-1].startswith("sequence 10, step 250 | 1000/1000 tokens | ") and lines[-1].endswith("a…")
    assert len(lines[-1].rpartition("| ")[2]) == LINE_WIDTH


def test_nobody_watches_by_default() -> None:
    stream = io.StringIO()
    with SamplingDisplay(10, stream) as display:
        display.advance(10)
        display.watch(snapshot([1]))
    assert stream.getvalue() == "" and display.tokens_per_second > 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_picture_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    stream: Any = Terminal()
    with SamplingDisplay(4, stream, viewer=VIEWER) as display:
        for known in range(1, 5):
            display.advance(1)
            display.watch(snapshot([ord("k")] * known + [-1] * (4 - known), name=2))
            assert display._live is not None
            display._live.refresh()
    shown = stream.getvalue()
    assert "sequence 3, step 4" in shown and "kkk" in shown and "░" in shown and "4/4" in shown and "tokens/s" in shown
