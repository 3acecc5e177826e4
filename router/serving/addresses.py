"""Addresses of listeners: TCP and Unix sockets, with errors that name the configuration key."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from .tls.contexts import TlsContext
from .tls.server import TlsServer

BACKLOG = 4096


class ListeningSockets(Protocol):
    """Sockets that accept connections."""

    @property
    def sockets(self) -> tuple[Any, ...]:
        """Return the sockets."""
        ...

    def close(self) -> None:
        """Accept no more connections."""
        ...


async def bind_tcp(
    new_connection: Callable[[], asyncio.BaseProtocol], host: str, port: int, key: str, tls: TlsContext | None = None
) -> ListeningSockets:
    """Listen on TCP, or with `tls` on TLS. Raises ConfigError, which names `key`, if the address cannot be bound."""
    loop = asyncio.get_running_loop()
    try:
        if tls is not None:
            server = TlsServer(new_connection, tls, key)
            await server.start(host, port, BACKLOG)
            return server
        return await loop.create_server(new_connection, host, port, backlog=BACKLOG, reuse_address=True)
    except OSError as error:
        raise bind_failure(address_of(host, port), error, where=key) from error


def raise_file_limit() -> None:
    """Raise the limit of open files, which bounds connections, to the system's maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL of an address; an IPv6 address gets brackets."""
    return f"http{'s' * tls}://{address_of(host, port)}"


def address_of(host: str, port: int) -> str:
    """Return host:port; an IPv6 host without brackets gets them."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def bind_unix_socket(path: Path, key: str) -> socket.socket:
    """Bind `path`, replacing the socket of a dead process. Raises ConfigError, which names `key`."""
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _accepts_connections(path):
            path.unlink()
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)  # independent of the umask: the permissions of the socket itself control access
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
    """Return the error for an address that cannot be bound. `where`: the configuration key."""
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason = "another program listens there: stop it, or choose another address"
    return ConfigError(f"Cannot listen on {address}: {reason}.", where=where)


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0
