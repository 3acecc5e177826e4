"""Disks with faults: one ends the process, one is full, one remembers what a power cut could leave."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from causeway_server.edge_node.agent.store import Disk


class WatchedDisk(Disk):
    """Calls `before` ahead of each operation, with its name, its path and what is written."""

    def __init__(self, before: Callable[[str, Path, bytes], None]) -> None:
        self._before = before

    def create(self, path: Path, content: bytes) -> None:
        self._before("create", path, content)
        super().create(path, content)

    def append(self, path: Path, content: bytes) -> None:
        self._before("append", path, content)
        super().append(path, content)

    def sync(self, path: Path) -> None:
        self._before("sync", path, b"")
        super().sync(path)

    def sync_folder(self, path: Path) -> None:
        self._before("sync_folder", path, b"")
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._before("rename", old, str(new).encode())
        super().rename(old, new)

    def link(self, path: Path, target: str) -> None:
        self._before("link", path, target.encode())
        super().link(path, target)

    def make_folder(self, path: Path) -> None:
        self._before("make_folder", path, b"")
        super().make_folder(path)

    def remove(self, path: Path) -> None:
        if path.exists() or path.is_symlink():
            self._before("remove", path, b"")
        super().remove(path)


def killing_disk(at: int, *, torn: bool) -> WatchedDisk:
    """Kill this process before operation `at`; with `torn`, in the middle of what that operation writes."""
    count = 0

    def before(name: str, path: Path, content: bytes) -> None:
        nonlocal count
        if count == at:
            if torn and name in ("create", "append"):
                with path.open("wb" if name == "create" else "ab") as file:
                    file.write(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    return WatchedDisk(before)


class FullDisk(WatchedDisk):
    """Has no room from operation `at` on, until `room` is set."""

    def __init__(self, at: int) -> None:
        super().__init__(self._check)
        self._left = at
        self.room = False
        self.refused = 0

    def _check(self, name: str, path: Path, content: bytes) -> None:
        self._left -= 1
        if self._left >= 0 or self.room or name in ("remove", "sync", "sync_folder", "rename"):
            return
        self.refused += 1
        if name == "append" and content:
            with path.open("ab") as file:
                file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class Operation(msgspec.Struct, frozen=True):
    name: str
    path: Path
    content: bytes


class PowerCuts:
    """Records the operations of a disk, and builds the folders that it may hold after a power cut.

    What was synced is there. Of the rest anything may be there: names (of which a synced folder holds all until then)
    and contents (whole, half, zeros or nothing), each without the others.
    """

    def __init__(self, folder: Path) -> None:
        self.operations: list[Operation] = []
        self._folder = folder
        self._base: dict[Path, bytes | str | None] = {}
        self.disk = WatchedDisk(lambda *what: self.operations.append(Operation(*what)))

    def start(self) -> None:
        """Count the present content as synced."""
        self._base = _tree(self._folder)
        self.operations.clear()

    def build(self, place: Path, cut: int, chance: random.Random) -> Path:
        """Write into `place`/fleet what may be left if the power goes before operation `cut`; return `place`."""
        done = self.operations[:cut]
        names: dict[Path, object] = {path: path for path, kind in self._base.items() if not isinstance(kind, str)}
        files: dict[object, bytes | None] = {
            path: content for path, content in self._base.items() if not isinstance(content, str)
        }
        links: dict[Path, object] = {path: _Link(kind) for path, kind in self._base.items() if isinstance(kind, str)}
        names |= links
        now = dict(names)  # the names as the running system saw them
        greedy = chance.random()  # how much of what was not synced is there
        for at, one in enumerate(done):
            kept = self._names_synced(done, at) or chance.random() < greedy
            if one.name in ("create", "append"):
                if one.name == "create" or one.path not in now:
                    now[one.path] = file = object()
                    files[file] = b""
                    names |= {one.path: file} if kept else {}
                file = now[one.path]
                whole = self._content_synced(done, at) or chance.random() < greedy
                files[file] = (files[file] or b"") + (one.content if whole else _damaged(one.content, chance))
            elif one.name == "make_folder":
                now.setdefault(one.path, one.path)
                files.setdefault(one.path, None)
                if kept:
                    names.setdefault(one.path, one.path)
            elif one.name == "link":
                now[one.path] = link = _Link(one.content.decode())
                if kept:
                    names[one.path] = link
            elif one.name == "rename":
                _move(now, one.path, Path(one.content.decode()))
                if kept:
                    _move(names, one.path, Path(one.content.decode()), now)
            elif one.name == "remove":
                _drop(now, one.path)
                if kept:
                    _drop(names, one.path)
        _write(place / "fleet", self._folder, names, files)
        return place

    def _names_synced(self, done: list[Operation], at: int) -> bool:
        folder = done[at].path.parent
        return any(one.name == "sync_folder" and one.path == folder for one in done[at + 1 :])

    def _content_synced(self, done: list[Operation], at: int) -> bool:
        path = done[at].path
        for one in done[at + 1 :]:
            if one.name == "sync" and one.path == path:
                return True
            if one.name == "rename" and one.path == path:
                path = Path(one.content.decode())
        return False


class _Link:
    def __init__(self, target: str) -> None:
        self.target = target


def _damaged(content: bytes, chance: random.Random) -> bytes:
    return chance.choice((b"", content[: len(content) // 2], b"\0" * len(content)))


def _move(names: dict[Path, object], old: Path, new: Path, source: dict[Path, object] | None = None) -> None:
    """Rename an entry, a folder with all that it holds. `source`: where an entry is that was never synced itself."""
    moved = {path: what for path, what in names.items() if path == old or old in path.parents}
    if old not in moved and source is not None and new in source:
        moved[old] = source[new]
    if not moved:
        return
    _drop(names, new)
    for path in moved:
        names.pop(path, None)
    names |= {new / path.relative_to(old): what for path, what in moved.items()}


def _drop(names: dict[Path, object], gone: Path) -> None:
    for path in [path for path in names if path == gone or gone in path.parents]:
        del names[path]


def _tree(folder: Path) -> dict[Path, bytes | str | None]:
    return {
        path: str(path.readlink()) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def _write(place: Path, folder: Path, names: dict[Path, object], files: dict[object, bytes | None]) -> None:
    place.mkdir(parents=True)
    for path in sorted(names):
        target, what = place / path.relative_to(folder), names[path]
        if not target.parent.is_dir():
            continue  # its folder was never synced
        if isinstance(what, _Link):
            target.symlink_to(what.target)
        elif (content := files[what]) is None:
            target.mkdir()
        else:
            target.write_bytes(content)
