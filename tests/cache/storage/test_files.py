from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache.storage.files import Folder


def test_what_is_written_is_there_under_its_new_name(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with folder.create("new") as file:
        folder.write(file, b"ab")
        folder.write(file, np.array([1, 2], dtype=np.int32).data)
        folder.sync(file)
        assert folder.size("new") == 10
    folder.rename("new", "name")
    assert folder.names() == ["name"]
    assert stat.S_IMODE((tmp_path / "name").stat().st_mode) == 0o600
    with folder.open("name") as file:
        assert file.read() == b"ab" + np.array([1, 2], dtype="<i4").tobytes()
    folder.unlink("name")
    folder.unlink("name")
    assert folder.names() == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    os.symlink(tmp_path / "target", tmp_path / "new")
    with pytest.raises(OSError):
        Folder(tmp_path).create("new")
    assert (tmp_path / "target").read_text() == "kept"
