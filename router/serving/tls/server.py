"""The listening sockets of an address with TLS, and the handshakes of its clients."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from ...trackers import FairShare, network_of
from .connection import TlsConnection
from .contexts import TlsContext

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 512
_LOG_INTERVAL_S = 60.0


class TlsServer:
    """Listening sockets whose connections begin with a handshake. Of too many handshakes (4), the oldest one of the
    networks with the most is ended.

    Args:
        new_connection: Function that makes the protocol of a connection whose handshake is complete.
        key: Configuration key of the address, for the log.
    """

    def __init__(self, new_connection: Callable[[], asyncio.BaseProtocol], context: TlsContext, key: str) -> None:
        self.new_connection = new_connection
        self.context = context
        self._key = key
        self._shares = FairShare(MAX_HANDSHAKES)
        self._open: dict[_Client, str] = {}  # networks of the clients whose handshake is in progress, the oldest first
        self._failed = 0
        self._report_at = float("-inf")
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Server

    async def start(self, host: str, port: int, backlog: int) -> None:
        """Listen. Raises OSError."""
        self._listening = await self._loop.create_server(
            partial(_Client, self), host, port, backlog=backlog, reuse_address=True
        )

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return tuple(self._listening.sockets)

    def close(self) -> None:
        """Accept no more connections, and end the handshakes in progress."""
        self._listening.close()
        for client in tuple(self._open):
            client.give_up()

    def begin(self, client: _Client, peer: str) -> None:
        """Note the handshake of a new connection, perhaps in the place of another one."""
        if self._shares.held >= self._shares.capacity:
            crowding = (one for one, network in self._open.items() if self._shares.crowds(network))
            victim = next(crowding, None) or next(iter(self._open))
            victim.give_up()
            self._forget(victim)
        self._open[client] = peer
        self._shares.count(client, peer)
        late = self._loop.call_later(HANDSHAKE_S, client.fail, TimeoutError())
        client.handshake.add_done_callback(partial(self._end, client, peer, late))

    def _end(self, client: _Client, peer: str, late: asyncio.TimerHandle, handshake: asyncio.Future[None]) -> None:
        late.cancel()
        self._forget(client)
        if not handshake.cancelled() and (error := handshake.exception()) is not None:
            self._report(peer, error)

    def _forget(self, client: _Client) -> None:
        self._shares.release(client)
        self._open.pop(client, None)

    def _report(self, peer: str, error: BaseException) -> None:
        """Log failed handshakes, at most one line per `_LOG_INTERVAL_S`."""
        self._failed += 1
        now = self._loop.time()
        if now >= self._report_at:
            reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or type(error).__name__
            log.warning(
                "%s: %d TLS handshakes failed; the most recent one, from %s: %s.", self._key, self._failed, peer, reason
            )
            self._failed, self._report_at = 0, now + _LOG_INTERVAL_S


class _Client(TlsConnection):
    def __init__(self, server: TlsServer) -> None:
        super().__init__(server.new_connection, server.context)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.begin(self, network_of(str(transport.get_extra_info("peername", ("",))[0])))
        super().connection_made(transport)

    def give_up(self) -> None:
        """End the connection within its handshake."""
        self.handshake.cancel()
        self.abort()
