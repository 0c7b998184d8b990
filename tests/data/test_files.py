"""Atomic files: whole or absent, and a sentence where the disk refuses."""

from pathlib import Path

import pytest

from pretrain.data.files import atomic_writer
from pretrain.errors import UserError


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new/file"
    with pytest.raises(KeyError), atomic_writer(path) as stream:
        stream.write(b"half")
        raise KeyError
    assert list((tmp_path / "new").iterdir()) == []
    with atomic_writer(path) as stream:
        stream.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole" and list((tmp_path / "new").iterdir()) == [path]


def test_a_file_in_the_way_of_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file/x", "file/x/y"):
        expected = rf"^cannot write {tmp_path}/{name} \((Not a directory|File exists)\): a file is in the way"
        with pytest.raises(UserError, match=expected), atomic_writer(tmp_path / name):
            pass
