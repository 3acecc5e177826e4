"""The gRPC address: `Generate`, health and reflection, bounded in connections, streams, messages and time.

The health of our service is what /readyz says, found out at each `Check` and told to those who `Watch`; the server's
own, the empty name, is SERVING until it drains. Anyone may ask for it and for reflection, which tell no more.

It speaks plain HTTP/2, as the HTTP address speaks plain HTTP: TLS ends in front of both.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.errors import ConfigError
from router.serving.responses import STALLED_S

from ..http.config import ServerConfig
from .calls import GenerateCalls
from .config import GrpcConfig
from .front import GrpcFront
from .messages import SERVICE, InputChunk, OutputChunk

MAX_CHUNK_BYTES = 1024 * 1024
MAX_CONNECTIONS = 1024
_MAX_STREAMS = 128  # of one connection
_PING_S, _PONG_S = 20.0, 10.0  # a client whose connection does not answer a ping in time is gone
_CLIENT_PING_S = 10.0  # a client that pings more often is disconnected
_AGE_S = 1800.0  # then clients connect again, perhaps to another gateway behind the same name
_STATUS_S = 0.5  # for the status of a call whose answer is written
_CANCEL_S = 2.0  # for handlers that were cancelled


class GrpcServer:
    """Owns the socket, its connections and calls.

    Args:
        config: the address.
        limits: the limits of the HTTP address.
        calls: handles each call.
        ready: whether this gateway can answer.
        max_connections: beyond them one without a call makes room.
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
        self._server: aio.Server | None = None
        self.port = config.port or 0

    @property
    def address(self) -> str:
        """host:port"""
        host = self._config.host
        return f"{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def connections(self) -> int:
        """Open connections of clients."""
        return self._front.connections

    async def start(self) -> None:
        """Raises ConfigError if the address is not available."""
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
        try:
            self.port = await self._front.start(self._config.host, self.port, path)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self.address}: another program listens there, or the address is none of this "
                "machine. Choose another one",
                where="grpc.port",
            ) from error
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.UNKNOWN)
        await server.start()

    async def tell_draining(self) -> None:
        """Report NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def drain(self, timeout_s: float) -> None:
        """Return when no call is in progress any more, or after `timeout_s`."""
        await self._calls.drain(timeout_s)

    async def close(self) -> None:
        """Let calls whose answer is written send their status, cancel the others, and return when they have ended."""
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
            await self._calls.generate(chunks, call)
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
