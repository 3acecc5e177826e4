"""Reading of the device signals from psutil and sysfs. One that this device cannot read is None, never an exception.

    probes = DeviceProbes()
    signals = probes.read(now)    # about once a second; now: monotonic seconds

Sensors are searched at start and again every `RESCAN_S` (a battery may be plugged in), so that a read is only a few
dozen small file reads. Sources: the kernel's sysfs ABI (``class/thermal``, ``class/hwmon``, ``class/power_supply``),
its cgroup 1 and 2 documentation, and the thermal and power chapters of NVIDIA's Jetson Linux developer guide.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

import msgspec
import psutil

from causeway_server.router.types import DeviceSignals

from .sensors import PowerSensors, ThermalSensors, read_number, read_text

RESCAN_S = 60.0
_MIN_CPU_INTERVAL_S = 0.1  # minimum CPU time: below it, the kernel's 10 ms ticks are only noise
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


class CpuTimes(msgspec.Struct, frozen=True):
    """CPU seconds since boot, summed over all cores."""

    busy_s: float
    total_s: float


def read_cpu_times() -> CpuTimes:
    times = psutil.cpu_times()
    # Linux counts a guest's time in user and nice too. Time spent waiting for a disk (iowait) does not count as busy.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return CpuTimes(busy_s=total - times.idle - getattr(times, "iowait", 0.0), total_s=total)


def read_available_bytes() -> int:
    return int(psutil.virtual_memory().available)


class DeviceProbes:
    """Reads `DeviceSignals`.

    Args:
        root: The folder that contains ``sys`` and ``proc``; another one in tests.
        cpu_times: Function that returns the CPU times; a fake in tests.
        available_bytes: Function that returns the system's available memory; a fake in tests.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        cpu_times: Callable[[], CpuTimes] = read_cpu_times,
        available_bytes: Callable[[], int] = read_available_bytes,
    ) -> None:
        self._cpu_times = cpu_times
        self._available_bytes = available_bytes
        self._thermal = ThermalSensors(root)
        self._power = PowerSensors(root)
        self._limits = MemoryLimits(root)
        self._scanned_at: float | None = None
        self._last_cpu: CpuTimes | None = None
        self._cpu: float | None = None

    def read(self, now: float) -> DeviceSignals:
        """Return the signals at `now` (monotonic seconds). `cpu` is the busy share since the last read."""
        if self._scanned_at is None or now - self._scanned_at >= RESCAN_S:
            self._scan(now)
        return DeviceSignals(
            temperature_c=self._thermal.temperature_c(),
            throttled=self._thermal.throttled(),
            memory_free_mb=self._read_memory_free_mb(),
            cpu=self._read_cpu(),
            power_w=self._power.power_w(),
            battery=self._power.battery(),
            battery_wh=self._power.battery_wh(),
            discharging=self._power.discharging(),
            throttles_c=self._thermal.throttles_c(),
        )

    def _scan(self, now: float) -> None:
        self._scanned_at = now
        self._thermal.scan()
        self._power.scan()
        self._limits.scan()

    def _read_cpu(self) -> float | None:
        try:
            times = self._cpu_times()
        except (OSError, RuntimeError, ValueError):
            return None
        last = self._last_cpu
        if last is None:
            self._last_cpu = times
        elif times.total_s - last.total_s >= _MIN_CPU_INTERVAL_S:
            self._last_cpu = times
            share = (times.busy_s - last.busy_s) / (times.total_s - last.total_s)
            self._cpu = min(1.0, max(0.0, share))  # iowait may decrease
        return self._cpu

    def _read_memory_free_mb(self) -> float | None:
        """Return the memory that this process could still allocate: the system's, or less if a cgroup limits it."""
        try:
            available: int | None = self._available_bytes()
        except (OSError, RuntimeError, ValueError):
            available = None
        limits = [value for value in (available, self._limits.headroom_bytes()) if value is not None]
        return max(0, min(limits)) / 2**20 if limits else None


class _Group(msgspec.Struct, frozen=True):
    limits: tuple[Path, ...]
    usage: Path
    stat: Path
    reclaimable: str  # the line of `stat` with the page cache that the kernel reclaims first


class MemoryLimits:
    """The cgroups of this process, from its own up to the root; each of them may have a limit.

    A container's limit is not part of the system's figures.
    """

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
