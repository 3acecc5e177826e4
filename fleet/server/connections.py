"""The connections of a process, bounded by the files that it may open, so that no kind can exclude the others.

1. Parked polls use at most seven eighths of the files, each device its share of them. A further poll is answered at
   once, as after its timeout, and the device asks again after a random pause. A poll never ends because of another poll
   of its device; otherwise two clones would wake each other forever.
2. Other connections are closed to make room for a new one, so that a new operator or device always gets through. The
   address with the most connections gives way: first connections between two requests, the longest silent one first;
   then those with an incomplete request; then those that are being answered.
"""

from __future__ import annotations

import asyncio
import resource
from itertools import chain
from typing import Any, Protocol

from aiohttp import web
from aiohttp.streams import StreamReader

from causeway_server.router.bundle.protocol import MAX_MESSAGE_BYTES
from causeway_server.router.serving.aiohttp_connection import HttpRequest, is_between_requests, with_plain_path
from causeway_server.router.trackers import FairShare, network_of

MAX_FILES = 65_536
_OTHER_FILES = 128  # the database, the log, the issuer of single sign-on
_FILES_A_CONNECTION = 2  # its socket, and a file that it may be sending; a parked poll has only its socket


class Connection(Protocol):
    """A connection without a parked poll."""

    @property
    def is_idle(self) -> bool:
        """Whether the connection waits for a request."""
        ...

    @property
    def is_answered(self) -> bool:
        """Whether the connection's request has arrived completely."""
        ...

    def abort(self) -> None: ...


class Connections:
    """The count of connections, and the choice of the one that is closed for a new one. `parked`: shares (1)."""

    def __init__(self, max_files: int = MAX_FILES) -> None:
        self._max_files = max_files
        self.parked = FairShare(max_files * 7 // 8)
        self._peers: dict[Connection, str] = {}
        self._by_peer: dict[str, dict[Connection, None]] = {}  # the longest silent one first

    @property
    def others(self) -> int:
        """The number of connections that are not parked."""
        return len(self._peers)

    def admit(self, connection: Connection, transport: asyncio.BaseTransport) -> None:
        """Count a new connection, closing another one if necessary (2)."""
        if connection in self._peers:  # the connection of an ended poll
            return
        if self.parked.held + _FILES_A_CONNECTION * (self.others + 1) > self._max_files and self._peers:
            self._make_room(_peer_of(transport))
        self.add(connection, transport)

    def add(self, connection: Connection, transport: asyncio.BaseTransport) -> None:
        """Count an open connection, such as one whose poll has ended."""
        peer = self._peers[connection] = _peer_of(transport)
        self._by_peer.setdefault(peer, {})[connection] = None

    def keep(self, connection: Connection) -> None:
        """Record that a connection was used now."""
        if connection in self._peers:
            own = self._by_peer[self._peers[connection]]
            del own[connection]
            own[connection] = None

    def forget(self, connection: Connection) -> None:
        """Stop counting a connection that is lost or parked."""
        peer = self._peers.pop(connection, None)
        if peer is not None:
            own = self._by_peer[peer]
            del own[connection]
            if not own:
                del self._by_peer[peer]

    def _make_room(self, peer: str) -> None:
        own = self._by_peer.get(peer, {})
        crowds = len(own) * len(self._by_peer) >= self.others  # at least the mean: the others need not be checked
        most = own if crowds else max(self._by_peer.values(), key=len)
        idle = (one for one in most if one.is_idle)
        arriving = (one for one in most if not one.is_answered)
        victim = next(chain(idle, arriving, most))
        self.forget(victim)
        victim.abort()


def _peer_of(transport: asyncio.BaseTransport) -> str:
    address = transport.get_extra_info("peername")
    return network_of(address[0]) if address else ""


class HttpConnection(web.RequestHandler):
    """A connection that aiohttp reads."""

    __slots__ = ("_connections", "arriving")

    def __init__(self, server: web.Server, connections: Connections, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._connections = connections
        self.arriving: StreamReader | None = None  # the body of the last request

    @property
    def is_idle(self) -> bool:
        return is_between_requests(self)

    @property
    def is_answered(self) -> bool:
        return self.arriving is None or self.arriving.is_eof()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.admit(self, transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._connections.keep(self)
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.forget(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class PlaneRequest(HttpRequest, web.Request):
    """A request to the control plane's routes."""


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]) -> PlaneRequest:
    """Build a request with a body of at most MAX_MESSAGE_BYTES. This is the `request_factory` of `web.Server`."""
    if isinstance(protocol, HttpConnection):
        protocol.arriving = payload
    loop, message = asyncio.get_running_loop(), with_plain_path(message)
    return PlaneRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_MESSAGE_BYTES)


def files_of_connections(max_files: int) -> int:
    """Return the number of files, at most `max_files`, that this process's connections may open under its limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max_files if soft == resource.RLIM_INFINITY else min(max_files, max(8, soft - _OTHER_FILES))
