"""How a launcher ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pretrain.command_line import run_command
from pretrain.errors import UserError


def end(error: BaseException) -> int:
    def main() -> int:
        raise error

    return run_command(main, when_memory_is_full="use less")


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6056. This is typically caused by"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("x=1 must be 2"), 64, "error: x=1 must be 2\n"),
        (MemoryError(), 64, "error: the memory does not suffice (out of memory): use less\n"),
        (torch.OutOfMemoryError("CUDA out of\n memory."), 64, "error: the memory does not suffice (CUDA out of memory.): use less\n"),
        (RuntimeError(GLOO), 69, "error: rank 0 lost its connection to another rank, which ended before it\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_one_sentence_and_a_code(error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert end(error) == code
    assert capsys.readouterr().err == said


def test_a_refused_allocation_is_said_as_torch_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: len(torch.empty(1 << 60)), when_memory_is_full="use less") == 64
    assert capsys.readouterr().err.startswith("error: the memory does not suffice (")


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("Connection closed by peer"), OSError("disk")])
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        end(error)


def test_a_second_interrupt_does_not_disturb_the_tidying_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    before, tidied = signal.getsignal(signal.SIGINT), []

    def main() -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            tidied.append(True)
        return 0

    try:
        assert run_command(main, when_memory_is_full="") == 130 and tidied
    finally:
        signal.signal(signal.SIGINT, before)


def test_of_several_ranks_one_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        (tmp_path / rank).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        assert end(UserError("once")) == 64
    assert capsys.readouterr().err == "error: once\n"


def test_a_reader_that_leaves_early_ends_the_command_quietly() -> None:
    program = "from pretrain.command_line import run_command\ndef main():\n    while True: print('x' * 999, flush=True)\n"
    command = [sys.executable, "-c", program + "raise SystemExit(run_command(main, when_memory_is_full=''))"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(30)) == ("", 141)
