"""log.jsonl is the source of truth: what a kill, a resume or a full record leaves in it."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.errors import UserError
from pretrain.telemetry.config import TelemetryConfig
from pretrain.telemetry.log import LOG_NAME, RunLog, number, read_log
from pretrain.telemetry.progress import ProgressDisplay, figures


def open_log(run_dir: Path, resumed_step: int | None = None, stream: io.StringIO | None = None, is_main: bool = True, wandb: str = "off") -> RunLog:
    return RunLog(
        run_dir,
        is_main=is_main,
        settings=TelemetryConfig(wandb=wandb),  # type: ignore[arg-type]
        label="bound",
        resumed_step=resumed_step,
        total_steps=6,
        last_step=6,
        run_name="test",
        config={"seed": 1},
        stream=stream or io.StringIO(),
    )


def steps(run_dir: Path, kind: str = "train") -> list[int]:
    return [record["step"] for record in read_log(run_dir / LOG_NAME) if record["kind"] == kind]


def test_a_resume_drops_what_will_be_made_again(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for step in range(1, 6):
        log.train(step, {"tokens": step * 64})
    log.validation(4, {"tokens": 256, "nelbo_nats_per_token": 1.0})
    log.close()
    log = open_log(tmp_path, resumed_step=3)
    assert steps(tmp_path) == [1, 2, 3] and steps(tmp_path, "validation") == []
    log.train(4, {"tokens": 256})
    log.close()
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert steps(tmp_path, "run") == [0, 3]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_torn_last_line_is_left_out_and_removed_at_the_resume(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.train(1, {"tokens": 64})
    log.close()
    path = tmp_path / LOG_NAME
    with path.open("a") as out:
        out.write('{"kind": "train", "step": 2, "tok')
    assert steps(tmp_path) == [1]
    log = open_log(tmp_path, resumed_step=1)
    log.train(2, {"tokens": 128})
    log.close()
    assert steps(tmp_path) == [1, 2]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_text('{"kind": "train", "step": 1}\nrubbish\n{"kind": "train", "step": 2}\n')
    with pytest.raises(UserError, match="line 2 of .*log.jsonl is not a JSON record"):
        list(read_log(tmp_path / LOG_NAME))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"kind": "train", "step": "five"}', "line 1 of .*log.jsonl says step='five', which must be a number of steps; remove that line"),
        ('{"kind": "train", "step": 1.5}', "says step=1.5"),
        ('{"kind": "train", "step": true}', "says step=True"),
        ('{"kind": "train", "step": -1}', "says step=-1"),
        ('{"kind": "train"}', "says step=None"),
        ('{"step": 1}', "says kind=None, which must be run, train, validation or event"),
        ('{"kind": "trian", "step": 1}', "says kind='trian'"),
        ("[1]", "is not a JSON record"),
        ("[" * 100_000, "is not a JSON record"),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_records_of_another_kind_are_named(tmp_path: Path, line: str, sentence: str, last: bool) -> None:
    (tmp_path / LOG_NAME).write_text(line + "\n" + ("" if last else '{"kind": "train", "step": 2}\n'))
    for use in (lambda: list(read_log(tmp_path / LOG_NAME)), lambda: open_log(tmp_path, resumed_step=1)):
        with pytest.raises(UserError, match=sentence):
            use()


def test_what_is_no_log_is_a_sentence(tmp_path: Path) -> None:
    assert list(read_log(tmp_path / "nowhere" / LOG_NAME)) == []
    (tmp_path / LOG_NAME).mkdir()
    with pytest.raises(UserError, match=r"log.jsonl cannot be read \(Is a directory\)"):
        list(read_log(tmp_path / LOG_NAME))


@pytest.mark.parametrize(("value", "read"), [(2, 2.0), (2.5, 2.5), ("inf", math.inf), ("-inf", -math.inf), ("2", 2.0)])
def test_figures(value: object, read: float) -> None:
    assert number({"kind": "train", "step": 3, "lr": value}, "lr", Path("log.jsonl")) == read


@pytest.mark.parametrize("value", [None, True, "much", [], 10**400])
def test_figures_that_are_none(value: object) -> None:
    with pytest.raises(UserError, match="the train record of step 3 in log.jsonl says lr=.*, which must be a number"):
        number({"kind": "train", "step": 3, "lr": value}, "lr", Path("log.jsonl"))


def test_numbers_that_are_not_finite_stay_readable(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.train(1, {"tokens": 64, "loss_nats_per_token": math.nan, "t_bins": [{"low": 0.0, "loss": math.inf}]})
    log.close()
    line = (tmp_path / LOG_NAME).read_text().splitlines()[-1]
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isnan(float(record["loss_nats_per_token"])) and float(record["t_bins"][0]["loss"]) == math.inf


def test_a_person_sees_the_label_and_no_better_name() -> None:
    record = {"loss_nats_per_token": 5.0, "nelbo_nats_per_token": 4.5}
    assert figures(record | {"nelbo_label": "not_a_likelihood"}) == "loss 5.0000 nats/token | not a likelihood 4.5000"
    assert figures(record | {"nelbo_label": "bound"}).endswith("bound 4.5000")


def test_the_label_goes_with_the_nelbo_and_a_record_may_bring_its_own(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.train(1, {"tokens": 64, "nelbo_nats_per_token": 2.0})
    log.train(2, {"tokens": 64})
    log.validation(2, {"tokens": 64, "nelbo_nats_per_token": 2.0, "nelbo_label": "estimate"})
    log.close()
    labels = [record.get("nelbo_label") for record in read_log(tmp_path / LOG_NAME) if record["kind"] != "run"]
    assert labels == ["bound", None, "estimate"]


def test_without_a_terminal_each_record_is_one_plain_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = open_log(tmp_path, stream=stream)
    figures = {"tokens": 64, "loss_nats_per_token": 4.25, "tokens_per_second": 12345.0, "tflops_per_second": 0.12, "mfu": 0.314}
    log.train(3, figures)
    log.event(3, "checkpoint", "saved step_00000003 [whole]")
    log.close()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 3/6 | loss 4.2500 nats/token | 12,345 tokens/s | 0.12 TFLOP/s per rank | MFU 31.4% | ETA ")
    assert second == "[checkpoint] saved step_00000003 [whole]"


def test_the_time_left_is_that_of_this_start(tmp_path: Path) -> None:
    """Steps 10 to 20 of 100, two seconds each: after 5 steps, 10 s are left until this start leaves, and 170 s of the schedule."""
    stream, now = io.StringIO(), [50.0]
    display = ProgressDisplay(100, 10, stream, last_step=20, clock=lambda: now[0])
    now[0] += 10
    display.show(15, {})
    now[0] += 10
    display.show(20, {})
    assert [line.rpartition("ETA ")[2] for line in stream.getvalue().splitlines()] == ["10s", "0s"]
    assert stream.getvalue().startswith("step 15/100 | ")


def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    log = open_log(tmp_path, stream=stream)
    log.train(3, {"tokens": 64, "tokens_per_second": 12345.0})
    log.advance(4)
    log.close()
    assert "4/6" in stream.getvalue() and "12,345 tokens/s" in stream.getvalue()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path / "run", is_main=False)
    log.train(1, {"tokens": 64})
    log.validation(1, {})
    log.event(1, "note", "unseen")
    log.advance(1)
    log.close()
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(UserError, match="cannot be written \\(No space left"):
        log.train(1, {"tokens": 64})


WANDB_RUN = """
import socket, sys
from pathlib import Path
from pretrain.telemetry.config import TelemetryConfig
from pretrain.telemetry.log import RunLog
connect = socket.socket.connect
def local_only(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
        print("OUTSIDE", address, flush=True)
        raise OSError("no network in this test")
    return connect(self, address)
socket.socket.connect = local_only
log = RunLog(Path(sys.argv[1]), is_main=True, settings=TelemetryConfig(wandb=sys.argv[2]), label="bound", resumed_step=None,
             total_steps=2, last_step=2, run_name="offline", config={"seed": 1})
log.train(1, {"tokens": 64, "loss_nats_per_token": 2.0, "t_bins": [{"low": 0.0, "high": 0.1, "samples": 3, "loss": 1.0}]})
log.close()
"""


def wandb_run(run_dir: Path, mode: str, home: Path) -> subprocess.CompletedProcess[str]:
    """A process without an account: another home, no key in the environment, no connection but to this machine."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")} | {"HOME": str(home), "NETRC": str(home / "none")}
    command = [sys.executable, "-c", WANDB_RUN, str(run_dir), mode]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=Path(__file__).parents[2])


def test_wandb_offline_needs_no_account_and_no_network(tmp_path: Path) -> None:
    result = wandb_run(tmp_path / "run", "offline", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "OUTSIDE" not in result.stdout and "wandb is off" not in result.stdout
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss_nats_per_token" in written.read_bytes()


def test_wandb_online_without_a_key_is_refused_before_anything_else(tmp_path: Path) -> None:
    result = wandb_run(tmp_path / "run", "online", tmp_path)
    assert result.returncode != 0
    assert "UserError: telemetry.wandb=online needs a Weights & Biases API key" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_wandb_that_breaks_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise RuntimeError("service gone")

    monkeypatch.setattr(wandb, "init", refuse)
    log = open_log(tmp_path, wandb="offline")
    log.train(1, {"tokens": 64})
    log.close()
    assert steps(tmp_path) == [1]
    assert [record["event"] for record in read_log(tmp_path / LOG_NAME) if record["kind"] == "event"] == ["wandb"]
