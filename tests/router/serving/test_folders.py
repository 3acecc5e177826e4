"""Files that are written whole: what is left where the last step, the rename, fails."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from causeway_server.router.serving.folders import copy_atomically, write_atomically


@pytest.mark.parametrize(
    "write",
    [lambda path: write_atomically(path, b"new", 0o600), lambda path: copy_atomically(Path(__file__), path)],
    ids=["write", "copy"],
)
def test_a_failed_rename_leaves_nothing_and_names_the_file(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "taken" / "by a folder").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        write(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(("mode", "folder"), [(0o600, 0o700), (0o644, 0o755)])
def test_a_private_file_gets_a_private_folder(tmp_path: Path, mode: int, folder: int) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, b"x", mode)
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (mode, folder)
