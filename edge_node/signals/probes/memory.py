"""The memory that cgroup limits leave to this process. A container's limit is not part of the system's figures."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import msgspec

from .sysfs import read_number, read_text

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


class _Group(msgspec.Struct, frozen=True):
    limits: tuple[Path, ...]
    usage: Path
    stat: Path
    reclaimable: str  # the line of `stat` with the page cache that the kernel reclaims first


class MemoryLimits:
    """The cgroups of this process, from its own up to the root; each of them may have a limit."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._groups: list[_Group] = []

    def scan(self) -> None:
        self._groups = [group for group in self._find() if any(_limit(path) is not None for path in group.limits)]

    def headroom_bytes(self) -> int | None:
        """Return the smallest remainder of all limits, not counting page cache as used; None without a limit."""
        headrooms = [rest for group in self._groups if (rest := _headroom(group)) is not None]
        return min(headrooms) if headrooms else None

    def _find(self) -> list[_Group]:
        mount = self._root / "sys" / "fs" / "cgroup"
        groups: list[_Group] = []
        for line in (read_text(self._root / "proc" / "self" / "cgroup") or "").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                groups += [_version_2(folder) for folder in _upwards(mount, path)]
            elif "memory" in controllers.split(","):
                groups += [_version_1(folder) for folder in _upwards(mount / "memory", path)]
        return groups


def _upwards(mount: Path, path: str) -> list[Path]:
    """Return the folders from `path` up to the mount.

    In a container the path may be the host's; the mount itself is then the process's own cgroup.
    """
    relative = PurePosixPath(path).relative_to("/") if path.startswith("/") else PurePosixPath(path)
    if ".." in relative.parts or not (mount / relative).is_dir():
        return [mount]
    return [mount / relative, *(mount / parent for parent in relative.parents)]


def _version_2(folder: Path) -> _Group:
    return _Group(
        limits=(folder / "memory.max", folder / "memory.high"),
        usage=folder / "memory.current",
        stat=folder / "memory.stat",
        reclaimable="inactive_file",
    )


def _version_1(folder: Path) -> _Group:
    return _Group(
        limits=(folder / "memory.limit_in_bytes",),
        usage=folder / "memory.usage_in_bytes",
        stat=folder / "memory.stat",
        reclaimable="total_inactive_file",
    )


def _limit(path: Path) -> int | None:
    value = read_number(path)  # "max" in version 2 is not a number
    return int(value) if value is not None and 0 <= value < _UNLIMITED_BYTES else None


def _headroom(group: _Group) -> int | None:
    limits = [limit for path in group.limits if (limit := _limit(path)) is not None]
    usage = read_number(group.usage)
    if not limits or usage is None:
        return None
    return min(limits) - max(0, int(usage) - _reclaimable(group))


def _reclaimable(group: _Group) -> int:
    for line in (read_text(group.stat) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == group.reclaimable and value.isdigit():
            return int(value)
    return 0
