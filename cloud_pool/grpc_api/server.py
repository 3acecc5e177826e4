"""The gRPC address: `Generate`, health and reflection, bounded in connections, streams, messages and time.

The health of our service is the state of /readyz, determined at each `Check` and reported to each `Watch`; the server's
own health, under the empty name, is SERVING until it drains. Health and reflection do not need a token. The server
speaks HTTP/2, over TLS if `server.tls` names a certificate.

gRPC's library refuses connections beyond its bound and cannot close one, so idle connections would lock out new ones.
Therefore the public socket relays its bytes to gRPC's own Unix socket. When the bound is reached, the oldest connection
without a call is closed, of the peers that have the most connections; if each has a call in progress, the new one is
closed. A health watch does not count as a call, so its connection may be closed too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import suppress
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from causeway_server.router.serving.addresses import ListeningSockets, address_of, bind_tcp
from causeway_server.router.serving.responses import STALLED_S
from causeway_server.router.serving.tls.contexts import HTTP2, TlsContext, server_tls
from causeway_server.router.serving.tls.peers import PeerCertificate, peer_certificate
from causeway_server.router.trackers import FairShare, network_of

from ..http.config import GrpcConfig, ServerConfig
from .calls import GenerateCalls
from .messages import SERVICE, InputChunk, OutputChunk

MAX_CHUNK_BYTES = 1024 * 1024
MAX_CONNECTIONS = 1024
_MAX_STREAMS = 128  # of one connection
_PING_S, _PONG_S = 20.0, 10.0  # a client whose connection does not answer a ping in time is gone
_CLIENT_PING_S = 10.0  # a client that pings more often is disconnected
_AGE_S = 1800.0  # then clients connect again, perhaps to another gateway behind the same name
_STATUS_S = 0.5  # for the status of a call whose answer is written
_CANCEL_S = 2.0  # for handlers that were cancelled


class _Side(asyncio.Protocol):
    """An end of a relayed connection. It passes its bytes to the other end, and buffers them until that end exists."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def join(self, other: _Side) -> None:
        """Start relaying, beginning with the bytes that either side sent before: gRPC's server speaks first."""
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
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Client(_Side):
    def __init__(self, front: GrpcFront) -> None:
        super().__init__()
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

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.forget(self)
        super().connection_lost(exc)


class GrpcFront:
    """The public socket and the connections of its clients."""

    def __init__(self, max_connections: int) -> None:
        self._shares = FairShare(max_connections)
        self._idle: dict[_Client, None] = {}  # the oldest first
        self._by_inner: dict[str, _Client] = {}
        self._calls: dict[str, int] = {}  # in progress, by inner address
        self._connecting: set[asyncio.Task[None]] = set()
        self._server: ListeningSockets | None = None
        self._path = ""

    @property
    def connections(self) -> int:
        return self._shares.held

    async def start(self, host: str, port: int, path: str, tls: TlsContext | None = None) -> int:
        """Listen, relay to the Unix socket at `path`, and return the port. Raises ConfigError without the address."""
        self._path = path
        self._server = await bind_tcp(lambda: _Client(self), host.strip("[]"), port, "grpc.port", tls)
        bound_port: int = self._server.sockets[0].getsockname()[1]
        return bound_port

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    def end(self) -> None:
        """Close the remaining connections."""
        for client in [*self._by_inner.values(), *self._idle]:
            client.close()

    def begin_call(self, inner: str) -> None:
        """Record the start of a call on the connection that gRPC knows as `inner`."""
        self._calls[inner] = self._calls.get(inner, 0) + 1
        if (client := self._by_inner.get(inner)) is not None:
            self._idle.pop(client, None)

    def end_call(self, inner: str) -> None:
        left = self._calls.pop(inner, 1) - 1
        if left:
            self._calls[inner] = left
        elif (client := self._by_inner.get(inner)) is not None:
            self._idle[client] = None

    def certificate(self, inner: str) -> PeerCertificate | None:
        """Return the verified certificate of the client of the connection that gRPC knows as `inner`."""
        client = self._by_inner.get(inner)
        return None if client is None or client.transport is None else peer_certificate(client.transport)

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
        """Open the connection to gRPC that belongs to a client's connection."""
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
        victim = next((idle for idle in self._idle if self._shares.crowds(idle.peer)), None)
        if victim is None:
            victim = next((idle for idle in self._idle if self._shares.held_by(idle.peer) >= most), None)
        if victim is None:
            return False
        self.forget(victim)
        victim.close()
        return True


class GrpcServer:
    """The gRPC server: its socket, connections and calls. Raises ConfigError if a certificate cannot be used.

    `limits`: shared with HTTP. `max_connections`: beyond it one without a call is closed.
    """

    def __init__(
        self,
        config: GrpcConfig,
        limits: ServerConfig,
        calls: GenerateCalls,
        ready: Callable[[], Awaitable[bool]],
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._front = GrpcFront(max_connections)
        self._folder = TemporaryDirectory(prefix="causeway-grpc-")  # 0700: only this process's user reaches the socket
        self._config = config
        self._limits = limits
        self._calls = calls
        self._ready = ready
        self._health = health.aio.HealthServicer()
        self._tls = server_tls(limits.tls, "server.tls", HTTP2)
        self._server: aio.Server | None = None
        self.port = config.port or 0

    @property
    def address(self) -> str:
        """Address of the server, as host:port."""
        return address_of(self._config.host, self.port)

    @property
    def connections(self) -> int:
        """Number of open connections of clients."""
        return self._front.connections

    async def start(self) -> None:
        """Start the server. Raises ConfigError if the address is not available."""
        server = self._server = aio.server(options=_options(self._limits))
        generate = grpc.stream_stream_rpc_method_handler(
            self._generate,
            request_deserializer=InputChunk.FromString,
            response_serializer=OutputChunk.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": generate}),))
        services = SimpleNamespace(Check=self._check, Watch=self._health.Watch)
        health_pb2_grpc.add_HealthServicer_to_server(services, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        path = f"{self._folder.name}/grpc.sock"
        server.add_insecure_port(f"unix:{path}")
        self.port = await self._front.start(self._config.host, self.port, path, self._tls)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.UNKNOWN)
        await server.start()

    async def tell_draining(self) -> None:
        """Report NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def drain(self, timeout_s: float) -> None:
        """Wait until no call is in progress any more, at most for `timeout_s`."""
        await self._calls.drain(timeout_s)

    async def close(self) -> None:
        """Let finished calls send their status, cancel the others, and return when they have ended."""
        self._front.close()
        if self._server is not None:
            await self._server.stop(_STATUS_S)
        await self._calls.drain(_CANCEL_S)
        self._front.end()
        self._folder.cleanup()

    async def _generate(self, chunks: AsyncIterable[Any], call: Any) -> None:
        peer = call.peer()
        self._front.begin_call(peer)
        try:
            await self._calls.generate(chunks, call, self._front.certificate(peer))
        finally:
            self._front.end_call(peer)

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service == SERVICE:
            name = "SERVING" if await self._ready() else "NOT_SERVING"
            await self._health.set(SERVICE, health_pb2.HealthCheckResponse.ServingStatus.Value(name))
        return await self._health.Check(request, context)


def _options(limits: ServerConfig) -> tuple[tuple[str, int], ...]:
    longest_s = limits.read_timeout_s + limits.default_deadline_s + STALLED_S
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_CHUNK_BYTES),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", _ms(limits.read_timeout_s)),
        ("grpc.keepalive_time_ms", _ms(_PING_S)),
        ("grpc.keepalive_timeout_ms", _ms(_PONG_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(_CLIENT_PING_S)),
        ("grpc.max_connection_age_ms", _ms(_AGE_S)),
        ("grpc.max_connection_age_grace_ms", _ms(longest_s)),
    )


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
