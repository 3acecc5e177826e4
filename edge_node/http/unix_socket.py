"""Binding of the daemon's addresses: the Unix socket's file, and what a failure means."""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path

from router.errors import ConfigError


def bind_unix_socket(path: Path, key: str) -> socket.socket:
    """Bind `path`, replacing a socket that a dead process left there. Raises ConfigError, which names `key`."""
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _accepts_connections(path):
            path.unlink()
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)  # whatever the umask: the socket's own rights say who may connect
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            path.chmod(0o660)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise bind_failure(str(path), error, where=key) from error
    return listening


def bind_failure(address: str, error: OSError, *, where: str) -> ConfigError:
    """The error for an address that cannot be bound. `where`: the configuration key."""
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason = "another program listens there: stop it, or choose another address"
    return ConfigError(f"cannot listen on {address}: {reason}", where=where)


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0
