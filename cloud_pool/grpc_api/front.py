"""The public socket of the gRPC address: bounds connections, and relays their bytes to gRPC's own Unix socket.

gRPC's library refuses a connection beyond its bound and offers no way to close one, so that idle connections would lock
out new ones. Here one connection too many lets the oldest one without a call make room, of the peers that have the most
connections; if each has a call in progress, the new one is closed. The health watch is not a call: it makes room, too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import cast

from router.trackers import FairShare, network_of

_BACKLOG = 512


class _Side(asyncio.Protocol):
    """Relays the bytes of one end of a connection to the other end, and keeps them until that end is there."""

    def __init__(self, on_lost: Callable[[], None] = lambda: None) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None
        self._early = bytearray()
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def join(self, other: _Side) -> None:
        """Relay from now on, beginning with what came before on either side: gRPC's server speaks first."""
        self.other, other.other = other, self
        self._begin()
        other._begin()

    def _begin(self) -> None:
        if self._early:
            self.data_received(bytes(self._early))
            self._early.clear()
        if self.transport is not None:
            with suppress(RuntimeError):  # it was not paused
                self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early += data
            if self.transport is not None:
                self.transport.pause_reading()
        else:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Client(_Side):
    def __init__(self, front: GrpcFront) -> None:
        super().__init__(self._lost)
        self._front = front
        self.peer = ""
        self.inner = ""  # the address under which gRPC knows it, as `call.peer()` says it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = network_of(transport.get_extra_info("peername")[0])
        if self._front.admit(self):
            self._front.connect(self)
        else:
            self.close()

    def _lost(self) -> None:
        self._front.forget(self)


class GrpcFront:
    """Owns the connections of clients.

    Args:
        max_connections: of all clients.
    """

    def __init__(self, max_connections: int) -> None:
        self._shares = FairShare(max_connections)
        self._idle: dict[_Client, None] = {}  # the oldest first
        self._by_inner: dict[str, _Client] = {}
        self._calls: dict[str, int] = {}  # in progress, by inner address
        self._connecting: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._path = ""

    @property
    def connections(self) -> int:
        return self._shares.held

    async def start(self, host: str, port: int, path: str) -> int:
        """Listen, relay to the Unix socket at `path`, and return the port.

        Raises OSError: the address is not available.
        """
        self._path = path
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Client(self), host.strip("[]"), port, backlog=_BACKLOG, reuse_address=True
        )
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    def end(self) -> None:
        """Close the connections that are left."""
        for client in [*self._by_inner.values(), *self._idle]:
            client.close()

    def begin_call(self, inner: str) -> None:
        """A call begins on the connection that gRPC knows as `inner`."""
        self._calls[inner] = self._calls.get(inner, 0) + 1
        if (client := self._by_inner.get(inner)) is not None:
            self._idle.pop(client, None)

    def end_call(self, inner: str) -> None:
        left = self._calls.pop(inner, 1) - 1
        if left:
            self._calls[inner] = left
        elif (client := self._by_inner.get(inner)) is not None:
            self._idle[client] = None

    # --- connections -------------------------------------------------------------------------------------------------

    def admit(self, client: _Client) -> bool:
        if self._shares.held >= self._shares.capacity and not self._make_room(client.peer):
            return False
        self._shares.count(client, client.peer)
        self._idle[client] = None
        return True

    def forget(self, client: _Client) -> None:
        self._shares.release(client)
        self._idle.pop(client, None)
        self._by_inner.pop(client.inner, None)

    def connect(self, client: _Client) -> None:
        """Open the connection to gRPC that belongs to a client's."""
        task = asyncio.ensure_future(self._join(client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _join(self, client: _Client) -> None:
        inner, loop = _Side(), asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        sock.bind("")  # Linux gives it a name of its own, by which gRPC tells whose call it is
        client.inner = f"unix-abstract:{sock.getsockname()[1:].decode()}"
        try:
            await loop.sock_connect(sock, self._path)
            transport, _ = await loop.create_unix_connection(lambda: inner, sock=sock)
        except OSError:  # the server stops
            sock.close()
            client.close()
            return
        if client.transport is None or client.transport.is_closing():
            transport.abort()
            return
        self._by_inner[client.inner] = client
        client.join(inner)

    def _make_room(self, peer: str) -> bool:
        most = self._shares.held_by(peer)
        victim = next(self._crowding(), None)
        if victim is None:
            victim = next((one for one in self._idle if self._shares.held_by(one.peer) >= most), None)
        if victim is None:
            return False
        self.forget(victim)
        victim.close()
        return True

    def _crowding(self) -> Iterator[_Client]:
        return (one for one in self._idle if self._shares.crowds(one.peer))
