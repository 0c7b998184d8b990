"""The silencer of torchrun's report: only in torchrun, only for ranks that explained themselves or were killed."""

import atexit
import inspect
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain import preemption, quiet
from pretrain.command_line import LOST_PEER_EXIT, USER_ERROR_EXIT
from pretrain.telemetry.watchdog import HUNG_EXIT


class ChildFailedError(Exception):
    """As torchrun raises it: a map from rank to failure, one code per rank, seen in the order `seen` (of ranks)."""

    def __init__(self, *codes: int, seen: tuple[int, ...] = ()) -> None:
        times = {rank: time for time, rank in enumerate(seen)}
        self.failures = {
            rank: SimpleNamespace(exitcode=code, pid=1000 + rank, timestamp=times.get(rank, 0)) for rank, code in enumerate(codes) if code
        }


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """torchrun's agent for our launcher, and what its excepthook let through to Python's."""
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/torchrun", "--nproc-per-node=2", "launchers/pretrain.py"])
    monkeypatch.setattr(quiet, "_exit_code", None)
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    taught: list[frozenset[int]] = []
    monkeypatch.setattr(quiet.agent, "teach", taught.append)
    quiet.install()
    assert taught == [frozenset({64, 65, 75, 130})]
    assert registered == [quiet._leave]
    yield seen
    for name in quiet._LOGGERS:
        logging.getLogger(name).removeFilter(quiet._worth_logging)


def fail(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ChildFailedError(64), 64),
        (ChildFailedError(64, 64), 64),
        (ChildFailedError(64, -15), 64),
        (ChildFailedError(64, 69), 64),
        (ChildFailedError(69, 69), 69),
        (ChildFailedError(65, 65), 1),
        (ChildFailedError(65, 69, -15), 1),
        (ChildFailedError(75, 75), 75),
        (ChildFailedError(75, -15, 69), 75),
        (ChildFailedError(130, 130), 130),
        (ChildFailedError(70, 69, 70), 70),
        (ChildFailedError(75, 64), 64),
        (ChildFailedError(75, 1), None),
        (ChildFailedError(65, 1), None),
        (ChildFailedError(64, 1), None),
        (ChildFailedError(1), None),
        (ChildFailedError(1, -15), None),
        (ChildFailedError(1, -6), None),
        (ChildFailedError(), None),
        (RuntimeError("64"), None),
    ],
)
def test_only_explained_failures_are_silent_and_keep_their_code(
    agent: list[BaseException], error: Exception, code: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(error)
    assert bool(agent) is (code is None) and quiet._exit_code == code and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "rank", "name", "advice"),
    [
        (ChildFailedError(0, -9), 1, "SIGKILL", "a smaller batch.micro_sequences"),
        (ChildFailedError(-15, -9), 1, "SIGKILL", "memory is full"),
        (ChildFailedError(-9, -9, seen=(1, 0)), 1, "SIGKILL", "memory is full"),
        (ChildFailedError(1, -9), 1, "SIGKILL", "memory is full"),
        (ChildFailedError(69, -11), 1, "SIGSEGV", "a fault in compiled code"),
        (ChildFailedError(-7), 0, "SIGBUS", "/dev/shm"),
        (ChildFailedError(-15), 0, "SIGTERM", "somebody, or the batch system, stopped it"),
        (ChildFailedError(-40), 0, "signal 40", "a fault in compiled code"),
    ],
)
def test_a_killed_rank_is_one_sentence(
    agent: list[BaseException], error: ChildFailedError, rank: int, name: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(error)
    said, code = capsys.readouterr().err, error.failures[rank].exitcode
    assert said.count("\n") == 1 and advice in said
    assert said.startswith(f"error: rank {rank} (process {1000 + rank}) was killed by {name}, exit code {code}: ")
    assert not agent and quiet._exit_code == 128 - code


def test_killed_ranks_of_other_programs_keep_torchruns_report(agent: list[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/torchrun", "train.py"])
    fail(ChildFailedError(-9))
    assert len(agent) == 1 and quiet._exit_code is None
    assert quiet._worth_logging(logging.LogRecord("x", logging.ERROR, "f", 1, "failed (exitcode: -9) local_rank: 0", (), None))


@pytest.mark.parametrize(("number", "codes", "code"), [(15, (-15, -15), 75), (10, (-10, 75), 75), (2, (-2, 130), 130)])
def test_ranks_that_died_of_a_request_before_they_listened(agent, monkeypatch, number, codes, code, capsys) -> None:
    monkeypatch.setattr(quiet.agent, "told", [signal.Signals(number)])
    fail(ChildFailedError(*codes))
    said = capsys.readouterr().err
    assert not agent and quiet._exit_code == code
    assert said == ("" if any(c > 0 for c in codes) else f"torchrun: stopped by {signal.Signals(number).name} before its ranks had begun\n")
    monkeypatch.setattr(quiet.agent, "told", [])
    monkeypatch.setattr(quiet, "_exit_code", None)
    fail(ChildFailedError(*codes))
    assert quiet._exit_code != 75


def test_a_signal_is_one_line(agent: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    class SignalException(Exception):
        sigval = 2

    fail(SignalException())
    assert not agent and capsys.readouterr().err == "torchrun: stopped by SIGINT\n" and quiet._exit_code == 130


def test_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    for argv in (["train.py"], ["-m"], [""], []):
        monkeypatch.setattr(sys, "argv", argv)
        quiet.install()
        assert sys.excepthook is before


def test_log_records(agent: list[BaseException]) -> None:
    def kept(message: str, *values: object) -> bool:
        return quiet._worth_logging(logging.LogRecord("x", logging.ERROR, "f", 1, message, values, None))

    assert (quiet.EXPLAINED, quiet.LOST_PEER, quiet.HUNG) == (USER_ERROR_EXIT, LOST_PEER_EXIT, HUNG_EXIT)
    assert (quiet.PREEMPTED, quiet.INTERRUPTED) == (preemption.PREEMPTED_EXIT, preemption.INTERRUPTED_EXIT)
    assert preemption.CLOSING == quiet.agent.CLOSING and preemption.LOST_PEER_EXIT == LOST_PEER_EXIT
    for code in (64, 69, -9, -15):
        assert not kept("failed (exitcode: %s) local_rank: %s", code, 0)
    assert kept("failed (exitcode: %s) local_rank: %s", 1, 0)
    for name in ("SIGTERM", "SIGINT"):
        assert not kept("Sending process %s closing signal %s", 12, name)
    assert kept("Unable to shutdown process %s via %s, forcefully exiting via %s", 12, "SIGTERM", "SIGKILL")
    assert not kept("Received %s death signal, shutting down workers", 2)


def test_the_words_are_those_that_torch_logs() -> None:
    """The installed torchrun still says what is filtered here."""
    import torch.distributed.elastic.agent.server.api as server
    import torch.distributed.elastic.multiprocessing.api as processes

    assert (processes.logger.name, server.logger.name) == quiet._LOGGERS
    assert "Received %s death signal, shutting down workers" in inspect.getsource(server)
    for words in ("failed (exitcode: %s)", "Sending process %s closing signal %s"):
        assert words in inspect.getsource(processes)


WORKER = """
import os, signal, sys, time
if sys.argv[1] == "wait":
    print("ready", flush=True)
    time.sleep(60)
os.kill(os.getpid(), int(sys.argv[1]))
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A real torchrun over a worker that kills itself, with this package's silencer in its agent."""
    (folder / "launchers").mkdir()
    (folder / "launchers/worker.py").write_text(WORKER)
    agent = "import sys, torch; from pretrain import quiet; quiet.install(); from torch.distributed.run import main; main()"
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'torchrun'; {agent}", "--standalone", "--nproc-per-node=1", "launchers/worker.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(quiet.__file__).parents[1])}
    return subprocess.Popen([*command, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_torchrun_itself_says_one_sentence_about_a_killed_rank(tmp_path: Path) -> None:
    process = start(tmp_path, "9")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 137
    assert said.startswith("error: rank 0 (process ") and "SIGKILL, exit code -9" in said and said.count("\n") == 1


@pytest.mark.slow
def test_torchrun_itself_says_one_line_when_it_is_interrupted(tmp_path: Path) -> None:
    process = start(tmp_path, "wait")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    lines = [line for line in said.splitlines() if "KeyboardInterrupt" not in line and not line.startswith((" ", "Traceback"))]  # the worker's own
    assert process.returncode == 130 and lines == ["torchrun: stopped by SIGINT"]
