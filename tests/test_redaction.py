"""Secrets planted in the environment and in the configuration are found nowhere that a run writes or shows."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.changes import FREEDOM
from pretrain.command_line import run_command
from pretrain.compose import known_keys
from pretrain.data.config import SourceConfig
from pretrain.errors import UserError
from pretrain.launch_config import PlanConfig
from pretrain.plan.plan import make_plan
from pretrain.plan.table import show
from pretrain.redaction import HIDDEN, is_secret, redact, redacted
from pretrain.run_config import CheckpointConfig, DurationConfig, RunConfig
from pretrain.telemetry.config import TelemetryConfig
from tests.distributed import run_distributed
from tests.small_run import small_config, train

SECRETS = {"WANDB_API_KEY": "5ca1ab1e0ddba11", "HF_TOKEN": "hf_QxZvPlantedToken", "MY_STORE_PASSWORD": "correct-horse-battery"}


def test_names_that_are_secrets_and_names_that_are_none() -> None:
    for name in ("token", "HF_TOKEN", "hfToken", "WANDB_API_KEY", "apiKey", "aws_secret_access_key", "db.password", "PGPASSWORD", "x-auth"):
        assert is_secret(name), name
    none = [*known_keys(RunConfig), *FREEDOM, "loss_nats_per_tokens", "tokens", "tokenizer", "keyboard", "monkey", "turnkeys", "author"]
    assert [name for name in none if is_secret(name)] == []


def test_values_that_give_themselves_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHORT_KEY", "mdlm")
    assert redact("s3://me:pass@host/x and http:/me:pass@host") == f"s3://{HIDDEN}@host/x and http:/{HIDDEN}@host"
    assert redact("https://h/x?token=abc&page=2&api_key=d") == f"https://h/x?token={HIDDEN}&page=2&api_key={HIDDEN}"
    assert redact("login failed for 5ca1ab1e0ddba11") == f"login failed for {HIDDEN}"
    harmless = "mdlm: write to me@host.org, see https://host/a@b and runs/x:/y, tokens=3"
    assert redact(harmless) == harmless
    tree = {"token": "abc", "nats_per_token": 3.5, "a": [{"password": "x", "n": 1}, "ftp://u:p@h"], "key": "", "secret": None, "mode": "off"}
    assert redacted(tree) == {
        "token": HIDDEN, "nats_per_token": 3.5, "a": [{"password": HIDDEN, "n": 1}, f"ftp://{HIDDEN}@h"], "key": "", "secret": None, "mode": "off"
    }  # fmt: skip


def telling(config: RunConfig) -> str:
    """Train with everything that prints and logs; what a rank said on standard output."""
    import contextlib
    import io
    import os

    os.environ.update(SECRETS)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        show(make_plan(config, PlanConfig()))
        train(config)
    return said.getvalue()


def test_planted_secrets_are_found_nowhere(tmp_path: Path) -> None:
    """In paths with credentials, in a project's name; through saving, a resume with the source moved, wandb's files, and the plan."""
    base = small_config(tmp_path)
    planted = tmp_path / "https:" / f"me:{SECRETS['MY_STORE_PASSWORD']}@store" / "corpus"
    shutil.copytree(tmp_path / "train" / "corpus", planted)
    other = tmp_path / "https:" / "me:another-password@store" / "corpus"
    shutil.copytree(planted, other)
    config = replace(
        base,
        data=replace(base.data, train={"words": SourceConfig(path=str(planted))}),
        telemetry=TelemetryConfig(log_every=1, wandb="offline", wandb_project=f"p-{SECRETS['HF_TOKEN']}", peak_tflops=0.1),
        duration=DurationConfig(steps=6, stop_after=3),
        checkpoint=CheckpointConfig(every=3),
    )
    said = run_distributed(telling, 1, config)[0]
    moved = replace(config, data=replace(base.data, train={"words": SourceConfig(path=str(other))}), duration=DurationConfig(steps=6))
    said += run_distributed(telling, 1, moved)[0]
    assert "Resuming" in said and f"https:/{HIDDEN}@store" in (config.directory / "config.yaml").read_text()
    written = [path for path in config.directory.rglob("*") if path.is_file()]
    assert {"log.jsonl", "config.yaml", "train_state.json", "manifest.json"} <= {path.name for path in written}
    for secret in (*SECRETS.values(), "another-password"):
        assert secret not in said
        found = [str(path) for path in written if secret.encode() in path.read_bytes()]
        assert found == [], f"{secret} is in {found}"


def test_messages_and_tracebacks_hide_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def refuse() -> int:
        raise UserError(f"https://me:{SECRETS['HF_TOKEN']}@host is not there, nor ftp://me:pass@host")

    def fail() -> int:
        raise KeyError(SECRETS["HF_TOKEN"])

    assert run_command(refuse, when_memory_is_full="") == 64
    with pytest.raises(KeyError) as caught:
        run_command(fail, when_memory_is_full="")
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert f"error: https://{HIDDEN}@host is not there, nor ftp://{HIDDEN}@host" in said and f"KeyError: '{HIDDEN}'" in said
    assert SECRETS["HF_TOKEN"] not in said
