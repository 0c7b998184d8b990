"""The silencer of torchrun's report: only in torchrun, only for ranks that explained themselves."""

import logging
import sys

import pytest

from pretrain import quiet
from pretrain.command_line import USER_ERROR_EXIT


class ChildFailedError(Exception):
    """As torchrun raises it: a map from rank to failure."""

    def __init__(self, *codes: int) -> None:
        self.failures = {rank: type("Failure", (), {"exitcode": code})() for rank, code in enumerate(codes)}


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ChildFailedError(64), False),
        (ChildFailedError(64, 64), False),
        (ChildFailedError(64, -15), False),
        (ChildFailedError(65, 65), False),
        (ChildFailedError(65, -15), False),
        (ChildFailedError(65, 1), True),
        (ChildFailedError(64, 1), True),
        (ChildFailedError(-15), True),
        (ChildFailedError(), True),
        (RuntimeError("64"), True),
    ],
)
def test_only_explained_failures_are_silent(error: Exception, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/torchrun"])
    quiet.install()
    sys.excepthook(type(error), error, None)
    assert bool(seen) is shown
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").removeFilter(quiet._worth_logging)


def test_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    for argv in (["train.py"], ["-m"], [""], []):
        monkeypatch.setattr(sys, "argv", argv)
        quiet.install()
        assert sys.excepthook is before


def test_log_records() -> None:
    def kept(message: str, *values: object) -> bool:
        return quiet._worth_logging(logging.LogRecord("x", logging.ERROR, "f", 1, message, values, None))

    assert quiet.EXPLAINED == USER_ERROR_EXIT
    assert not kept("failed (exitcode: %s) local_rank: %s", 64, 0)
    assert kept("failed (exitcode: %s) local_rank: %s", 1, 0)
    assert not kept("Sending process %s closing signal %s", 12, "SIGTERM")


def test_a_signal_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class SignalException(Exception):
        sigval = 2

    monkeypatch.setattr(sys, "excepthook", lambda *_: pytest.fail("a stack trace"))
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/torchrun"])
    quiet.install()
    sys.excepthook(SignalException, SignalException(), None)
    assert capsys.readouterr().err == "torchrun: stopped by SIGINT\n"
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").removeFilter(quiet._worth_logging)
