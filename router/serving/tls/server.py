"""The listening sockets of an address with TLS, and the handshakes of its clients."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from ...trackers import FairShare, network_of
from .contexts import CLIENT, TlsContext

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 512
_SHUTDOWN_S = 2.0  # time for a client's end of the TLS connection, after ours
_PAUSE_S = 1.0  # after a connection could not be accepted
_LOG_INTERVAL_S = 60.0
_ACCEPTED = 64  # maximum connections that are accepted in a row


class TlsServer:
    """Listening sockets whose connections begin with a handshake. Of too many handshakes (4), the oldest one of the
    networks with the most is cancelled.

    The event loop's own server is not used: it does not report the handshakes in progress.

    Args:
        new_connection: Function that makes the protocol of a connection whose handshake is complete.
        key: Configuration key of the address, for the log.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        new_connection: Callable[[], asyncio.BaseProtocol],
        context: TlsContext,
        key: str,
    ) -> None:
        self.sockets = tuple(sockets)
        self._new_connection = new_connection
        self._context = context
        self._key = key
        self._shares = FairShare(MAX_HANDSHAKES)
        self._open: dict[asyncio.Task[None], str] = {}  # networks of the clients by handshake, the oldest first
        self._failed = 0
        self._report_at = float("-inf")
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accept no more connections, and cancel the handshakes in progress."""
        if self._resume is not None:
            self._resume.cancel()
        for listening in self.sockets:
            if listening.fileno() >= 0:
                self._loop.remove_reader(listening)
                listening.close()
        for handshake in tuple(self._open):
            handshake.cancel()

    def _listen(self) -> None:
        for listening in self.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED):
            try:
                client, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file is left, for example
                log.error("%s: connections cannot be accepted: %s.", self._key, error.strerror)
                for one in self.sockets:
                    self._loop.remove_reader(one)
                self._resume = self._loop.call_later(_PAUSE_S, self._listen)
                return
            client.setblocking(False)
            self._begin(client, network_of(str(address[0])))

    def _begin(self, client: socket.socket, peer: str) -> None:
        """Start the handshake of a new connection, perhaps in the place of another one."""
        if self._shares.held >= self._shares.capacity:
            crowding = (one for one, network in self._open.items() if self._shares.crowds(network))
            victim = next(crowding, None) or next(iter(self._open))
            victim.cancel()
            self._forget(victim)
        handshake = self._loop.create_task(self._shake(client, peer))
        self._open[handshake] = peer
        self._shares.count(handshake, peer)
        handshake.add_done_callback(self._forget)

    def _forget(self, handshake: asyncio.Task[None]) -> None:
        self._shares.release(handshake)
        self._open.pop(handshake, None)

    async def _shake(self, client: socket.socket, peer: str) -> None:
        CLIENT.set(client)
        try:
            await self._loop.connect_accepted_socket(
                self._new_connection,
                client,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError as error:  # of TLS, of the connection, or too late
            self._report(peer, error)

    def _report(self, peer: str, error: OSError) -> None:
        """Log failed handshakes, at most one line per `_LOG_INTERVAL_S`."""
        self._failed += 1
        now = self._loop.time()
        if now >= self._report_at:
            reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or type(error).__name__
            log.warning(
                "%s: failed TLS handshakes: %d; the last one, from %s: %s.", self._key, self._failed, peer, reason
            )
            self._failed, self._report_at = 0, now + _LOG_INTERVAL_S
