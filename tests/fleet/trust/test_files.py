"""A disk that is full leaves no half of a file, and no later start stumbles over one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from causeway_server.fleet.operators.sign_in import load_bootstrap_token
from causeway_server.fleet.server.tokens import load_token_key
from causeway_server.fleet.trust.keys import new_key
from causeway_server.fleet.trust.published import PublishedFolder
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.folders import write_atomically, write_new

WRITERS: dict[str, Callable[[Path], object]] = {
    "token-key.jwk": lambda path: load_token_key(path, "causeway"),
    "bootstrap-token": load_bootstrap_token,
    "anna.pem": lambda path: new_key(path.parent, path.stem, None),
    "timestamp.json": lambda path: write_atomically(path, b"{}"),
    "published/blobs/a": lambda path: PublishedFolder(path.parents[2]).write_blob("a", Path(__file__)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before, an empty file was left: the key was invalid for ever, and the empty bootstrap token let everybody in."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path, folder = tmp_path / "data" / name, tmp_path / "data"
    folder.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises((ConfigError, OSError), match=rf"(?s)(?=.*No space left)(?=.*{path.name})"):
            WRITERS[name](path)
    assert [found for found in folder.rglob("*") if found.is_file()] == []
    WRITERS[name](path)
    assert path.stat().st_size > 0
    assert not list(folder.rglob("*.partial"))


def test_a_bootstrap_token_that_is_none_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(ConfigError, match="The token file is empty"):
        load_bootstrap_token(tmp_path / "token")


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a file system without hard links."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for name in ("linked", "renamed"):
        write_new(tmp_path / name, b"first", 0o600)
        assert ((tmp_path / name).read_bytes(), (tmp_path / name).stat().st_mode & 0o777) == (b"first", 0o600)
        with pytest.raises(FileExistsError):
            write_new(tmp_path / name, b"second", 0o600)
        assert (tmp_path / name).read_bytes() == b"first"
        monkeypatch.setattr(os, "link", refuse)
    assert len(list(tmp_path.iterdir())) == 2
