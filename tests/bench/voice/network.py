"""Watches a whole run for traffic to other machines.

Where Linux permits it (root, or user namespaces), the run is in a network namespace that has nothing but loopback: no
packet can leave it, and the kernel counts those that seek a way out, name lookups included. Elsewhere a thread
samples the sockets of the process and its children; it can miss a connection that is shorter than its interval.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

_NAMESPACES = (("unshare", "--net", "--"), ("unshare", "--user", "--map-root-user", "--net", "--"))
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41
# Packets without a route, and all datagrams over UDP: the run itself speaks TCP over loopback alone, so that a
# datagram is a name lookup, by a resolver on this machine too.
_COUNTERS = ("IpOutNoRoutes", "Ip6OutNoRoutes", "UdpOutDatagrams", "Udp6OutDatagrams")
_INTERVAL_S = 0.05


class NetworkWatch(Protocol):
    """Watches from `start` to `stop`, which returns lines for the report."""

    def start(self) -> None: ...

    def stop(self) -> list[str]: ...


def namespace_command() -> Sequence[str] | None:
    """Return the command that runs another one in a network namespace of its own; None: this is not permitted."""
    for command in _NAMESPACES:
        with contextlib.suppress(OSError):
            if subprocess.run([*command, sys.executable, "-c", ""], capture_output=True, check=False).returncode == 0:
                return command
    return None


def raise_loopback() -> None:
    """Bring up loopback, which is down in a new namespace. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP_RUNNING))


class NamespaceWatch:
    """Reads the kernel's counters of this network namespace."""

    def __init__(self) -> None:
        interfaces = [name for _, name in socket.if_nameindex()]
        if interfaces != ["lo"]:
            raise RuntimeError(f"this network namespace is not isolated: it has {', '.join(interfaces)}")
        self._before: Mapping[str, int] = {}

    def start(self) -> None:
        self._before = read_counters()

    def stop(self) -> list[str]:
        after = read_counters()
        sought = sum(after[name] - self._before[name] for name in _COUNTERS)
        return [
            "network                   a namespace with loopback alone, for the whole run: daemon, children and bench",
            "packets that left             0 (none can)",
            f"packets that sought a way {sought:5} (IP without a route and UDP, which name lookups use)",
        ]


class SocketWatch:
    """Samples the sockets of this process and its children."""

    def __init__(self) -> None:
        self._samples = 0
        self._found: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[str]:
        self._ended.set()
        self._thread.join()
        found = "".join(f" {one}" for one in sorted(self._found))
        how = f"sockets of daemon and children, sampled {self._samples} times, {_INTERVAL_S * 1000:.0f} ms apart"
        return [
            f"network                   {how} (shorter connections may be missed)",
            f"connections that left     {len(self._found):6}{found}",
        ]

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._samples += 1
            self._found |= leaving_connections()


def leaving_connections() -> set[str]:
    """Return the other machines that this process and its children have a socket to."""
    found = set()
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            for connection in process.net_connections("inet"):
                if connection.raddr != () and not connection.raddr.ip.startswith(("127.", "::1", "::ffff:127.")):
                    found.add(f"{connection.raddr.ip}:{connection.raddr.port}")
    return found


def read_counters(folder: Path = Path("/proc/net")) -> dict[str, int]:
    """Return the counters of packets that seek a way out of this namespace."""
    counters = dict.fromkeys(_COUNTERS, 0)
    lines = (folder / "snmp").read_text().splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        protocol, _, fields = names.partition(": ")
        for name, value in zip(fields.split(), values.partition(": ")[2].split(), strict=True):
            if protocol + name in counters:
                counters[protocol + name] = int(value)
    six = folder / "snmp6"
    for line in six.read_text().splitlines() if six.exists() else []:  # no IPv6 in this kernel
        name, value = line.split()
        if name in counters:
            counters[name] = int(value)
    return counters


def isolate(module: str, arguments: Sequence[str]) -> NetworkWatch:
    """Run this program again in a network namespace of its own, and return the watch that fits the place.

    Args:
        module: as of `python -m`.
        arguments: of the program. Its second run finds the environment variable `VOICE_ISOLATED`.
    """
    if os.environ.get("VOICE_ISOLATED"):
        raise_loopback()
        return NamespaceWatch()
    command = namespace_command()
    if command is not None:
        os.environ["VOICE_ISOLATED"] = "1"
        os.execvp(command[0], [*command, sys.executable, "-m", module, *arguments])
    return SocketWatch()
