"""Where results cannot go is known before the work, and said with what helps."""

import errno
import os
from pathlib import Path

import pytest

from pretrain.errors import UserError
from pretrain.outputs import cannot_write, require_writable


@pytest.mark.parametrize(
    ("name", "folder"), [("new", False), ("new", True), ("a/b/new", True), ("folder", True), ("folder/new", False), ("file", False)]
)
def test_places_that_take_results(tmp_path: Path, name: str, folder: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    require_writable(tmp_path / name, folder=folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"], "asking creates nothing"


@pytest.mark.parametrize(
    ("name", "folder", "sentence"),
    [
        ("file/x", False, "a file is in the way"), ("file/x/y", True, "a file is in the way"), ("file", True, "a file is in the way"),
        ("folder", False, "a folder has that name"), ("dangling/x", True, "a file is in the way"), ("a" * 300, False, "choose a shorter name"),
        ("a" * 300, True, "choose a shorter name"),
    ],
)  # fmt: skip
def test_places_that_do_not(tmp_path: Path, name: str, folder: bool, sentence: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=f"^cannot write {tmp_path / name} .*: {sentence}"):
        require_writable(tmp_path / name, folder=folder)


def test_a_relative_path_and_one_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require_writable(Path("x"))
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    with pytest.raises(UserError, match=r"^cannot write x \(Permission denied\): choose an output that you may write to$"):
        require_writable(Path("x"))


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "choose an output that you may write to"), (errno.EIO, "choose another output")],
)
def test_advice_fits_the_reason(number: int, advice: str) -> None:
    assert str(cannot_write(Path("x"), OSError(number, os.strerror(number)))) == f"cannot write x ({os.strerror(number)}): {advice}"
