"""systemd's notifications: ready, status, watchdog, stopping. Without ``NOTIFY_SOCKET`` every call does nothing.

One datagram per message on a Unix socket (sd_notify(3)). Implemented here because the small library for it reads the
process's environment itself, drops text that is not Latin-1, and blocks the caller when systemd is slow.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

_STARTING_S = 60


class SystemdNotifier:
    """Reports the daemon's state to systemd. A message that cannot be sent is dropped, without blocking the daemon.

    `watchdog_s`: seconds between two `watchdog` calls, half of what systemd allows; None when its watchdog is off.
    """

    def __init__(self, environ: Mapping[str, str], *, pid: int | None = None) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog_s = _watchdog_s(environ, os.getpid() if pid is None else pid)

    def ready(self, status: str = "") -> bool:
        return self._send("READY=1", status)

    def starting(self, status: str) -> bool:
        """Ask for another minute to start. Call it again within that time, for as long as the start goes on."""
        return self._send(f"EXTEND_TIMEOUT_USEC={_STARTING_S * 1_000_000}", status)

    def status(self, status: str) -> bool:
        return self._send("", status)

    def watchdog(self) -> bool:
        """Ping the watchdog. Call it only after a trial routing decision succeeded."""
        return self._send("WATCHDOG=1", "")

    def reloading(self, status: str = "") -> bool:
        """Say that the daemon starts anew in the same process; `ready` follows."""
        return self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}", status)

    def stopping(self, status: str = "") -> bool:
        return self._send("STOPPING=1", status)

    def _send(self, state: str, status: str) -> bool:
        """Whether the message was delivered."""
        if not self._address:
            return False
        line = "STATUS=" + " ".join(status.split()) if status else ""  # a newline would begin another variable
        message = "\n".join(part for part in (state, line) if part).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message, self._address)
        except OSError:
            return False
        return True


def _address(name: str) -> str:
    """A path, or with ``@`` an abstract name, whose first byte is zero; others (vsock) are not supported."""
    if name.startswith("@"):
        return "\0" + name[1:]
    return name if name.startswith("/") else ""


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None  # meant for another process
    try:
        seconds = int(environ.get("WATCHDOG_USEC", "")) / 2e6
    except ValueError:
        return None
    return seconds if seconds > 0 else None
