"""A gateway's gRPC address with a scripted service instead of Triton, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from grpc import StatusCode, aio

from causeway_server.cloud_pool.cache.caching_service import CachingService
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.grpc_api.calls import GenerateCalls
from causeway_server.cloud_pool.grpc_api.messages import SERVICE, InputChunk, OutputChunk
from causeway_server.cloud_pool.grpc_api.server import GrpcServer
from causeway_server.cloud_pool.http.config import GrpcConfig
from causeway_server.router.trackers import FairShare
from tests.cloud_pool.accounts.identity.gateway import Gateway, running

Metadata = Iterable[tuple[str, str]]
METHOD = f"/{SERVICE}/Generate"
PATIENCE_S = 60.0


class Failure(msgspec.Struct, frozen=True):
    """How a call failed: its status, and what HTTP's error body says."""

    status: StatusCode
    message: str
    error: dict[str, Any]
    trailing: dict[str, str | bytes]


class Client:
    """Calls `Generate` of one address."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel

    def call(self, *chunks: Any, metadata: Metadata = (), timeout_s: float = PATIENCE_S) -> Any:
        """Begin a call whose input is `chunks`."""
        return self.open(iter(chunks), metadata=metadata, timeout_s=timeout_s)

    def open(self, chunks: Any = None, *, metadata: Metadata = (), timeout_s: float = PATIENCE_S) -> Any:
        """Begin a call with an iterator of chunks, or one that is written to."""
        generate = self.channel.stream_stream(
            METHOD, request_serializer=_serialize, response_deserializer=OutputChunk.FromString
        )
        return generate(chunks, metadata=tuple(metadata), timeout=timeout_s)

    async def answer(self, *chunks: Any, metadata: Metadata = ()) -> list[Any]:
        return await rest(self.call(*chunks, metadata=metadata))

    async def failure(self, call: Any) -> Failure:
        """Read a call to its end, which must be a failure."""
        with anyio.fail_after(PATIENCE_S):
            try:
                await rest(call)
            except aio.AioRpcError as error:
                trailing = dict(error.trailing_metadata() or ())
                body = trailing.get("x-causeway-error-bin", b'{"error": {}}')
                return Failure(error.code(), error.details() or "", msgspec.json.decode(body)["error"], trailing)
        raise AssertionError("the call succeeded")


def _serialize(chunk: Any) -> bytes:
    """Bytes are sent as they are: a peer may say anything."""
    return chunk if isinstance(chunk, bytes) else chunk.SerializeToString()


def chat(text: str = "What is my balance?", *, model: str = "assistant-large", **fields: Any) -> Any:
    request = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
    return InputChunk(request=request)


async def rest(call: Any) -> list[Any]:
    """What is left of an answer. Raises AioRpcError."""
    outputs = []
    while (output := await call.read()) is not aio.EOF:
        outputs.append(output)
    return outputs


def text_of(outputs: Iterable[Any]) -> str:
    return "".join(output.delta.text for output in outputs)


class Served:
    """The address and the gateway behind it."""

    def __init__(self, gateway: Gateway, server: GrpcServer, calls: GenerateCalls, client: Client) -> None:
        self.gateway = gateway
        self.server = server
        self.calls = calls
        self.client = client


async def always() -> bool:
    return True


@asynccontextmanager
async def serving(
    config: Config | None = None,
    answers: CachingService | None = None,
    *,
    max_calls: int = 100,
    max_connections: int = 100,
    read_timeout_s: float = PATIENCE_S,
    handshake_s: float = PATIENCE_S,
    stalled_s: float = PATIENCE_S,
    ready: Callable[[], Awaitable[bool]] | None = None,
) -> AsyncIterator[Served]:
    async with running(config or Config(), answers) as gateway:
        calls = GenerateCalls(
            gateway.admission,
            gateway.runner,
            gateway.bodies,
            FairShare(max_calls),
            read_timeout_s=read_timeout_s,
            stalled_s=stalled_s,
        )
        limits = msgspec.structs.replace((config or Config()).server, read_timeout_s=handshake_s)
        server = GrpcServer(GrpcConfig(port=0), limits, calls, ready or always, max_connections)
        await server.start()
        try:
            async with connected(server.address) as client:
                yield Served(gateway, server, calls, client)
        finally:
            await server.close()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    # A channel of its own: gRPC shares connections between channels of one process otherwise.
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), ("grpc.http2.bdp_probe", 0))
    async with aio.insecure_channel(address, options=options) as channel:
        yield Client(channel)
