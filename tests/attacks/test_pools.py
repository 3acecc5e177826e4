"""Bounded pools: a tenant that takes all it gets leaves the others their share of every one of them.

Each place is a connection that stays open, of which the first line of the response is read. A pool of N places gives a
flood N/2 of them, and the tenant that comes after it N/4; both settle at N/3.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from causeway_server.cloud_pool.config import GatewaySessionConfig
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.edge_node.config.schema import DeviceFilesConfig, KeyConfig
from causeway_server.edge_node.config.schema import ServerConfig as EdgeServer
from causeway_server.router.bundle.settings import RealtimeConfig
from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.edge_node.device import running
from tests.redis_server import RedisServer

from .whole import CHAT, serving

MIB = 1024 * 1024
FORM = "Content-Type: multipart/form-data; boundary=x\r\n"
JSON = "Content-Type: application/json\r\n"
BUSY = (b"100", b"101", b"200")


def post(path: str, size: int, more: str = JSON) -> Callable[[str], str]:
    """The head of a request whose body does not come. `Expect`: the server tells when it begins to read."""
    return lambda _: f"POST {path} HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: {size}\r\n{more}"


def events(job: str) -> str:
    return f"GET /v1/jobs/{job}/events HTTP/1.1\r\n"


def session(_: str) -> str:
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    return f"GET /v1/realtime?model=large HTTP/1.1\r\n{upgrade}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


class Pool(msgspec.Struct, frozen=True):
    """A pool of `size` places; `head` begins a request that takes one, and may name a job of its caller."""

    size: int
    head: Callable[[str], str]
    needs_job: bool = False


GATEWAY = {
    "connections with slow bodies": Pool(48, post("/v1/chat/completions", 100)),
    "memory of large bodies": Pool(16, post("/v1/chat/completions", MIB)),
    "memory of uploads": Pool(8, post("/v1/files", 100, FORM)),
    "event streams": Pool(16, events, needs_job=True),
    "live sessions": Pool(12, session),
}
EDGE = {
    "connections with slow bodies": Pool(48, post("/v1/chat/completions", 100)),
    "memory of large bodies": Pool(8, post("/v1/chat/completions", MIB)),
    "uploads": Pool(32, post("/v1/files", 100, FORM)),
    "event streams": Pool(64, events, needs_job=True),
    "live sessions": Pool(12, session),
}


class Caller:
    """One tenant, or one API key, and its places in a pool."""

    def __init__(self, port: int | None, token: str, pool: Pool) -> None:
        self.port = port
        self._authorization = f"Host: localhost\r\nAuthorization: Bearer {token}\r\n"
        self._pool = pool
        self._job = ""
        self._places: list[asyncio.StreamWriter] = []

    async def prepare(self) -> None:
        """Submit the job that its requests name: one that does not start."""
        body = json.dumps(CHAT | {"model": "large", "not_before_ms": 3_600_000}).encode()
        head = f"POST /v1/jobs HTTP/1.1\r\n{self._authorization}{JSON}Content-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"}")
        self._job = answer.split(b'"id":"')[1].split(b'"')[0].decode()
        writer.close()

    async def take(self) -> bytes:
        """Take a place and return the status; a place that is refused is given back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{self._pool.head(self._job)}{self._authorization}\r\n".encode())
        line = await reader.readline()
        status = line.split()[1] if line else b"closed"
        if status in BUSY:
            self._places.append(writer)
        else:
            writer.close()
        return status

    async def take_all(self) -> int:
        """Take places until one is refused, politely. Returns how many there were."""
        while (status := await self.take()) in BUSY:
            pass
        assert status == b"429"
        return len(self._places)

    def leave(self) -> None:
        for writer in self._places:
            writer.transport.abort()
        self._places.clear()


@asynccontextmanager
async def gateway(issuer: Issuer, redis: RedisServer, tmp_path: Path, pool: Pool) -> AsyncIterator[list[Caller]]:
    sections = {
        "server": ServerConfig(
            port=0, max_connections=48, max_body_bytes=2 * MIB, max_body_memory_bytes=16 * MIB, read_timeout_s=60.0
        ),
        "realtime": GatewaySessionConfig(max_sessions=12),
        "jobs": JobsConfig(redis=redis.url, max_event_streams=16),
    }
    async with serving(issuer, redis, sections) as served:
        yield [Caller(served.port, served.token(name), pool) for name in ("flood", "quiet", "new")]


@asynccontextmanager
async def edge(issuer: Issuer, redis: RedisServer, tmp_path: Path, pool: Pool) -> AsyncIterator[list[Caller]]:
    keys = [KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("flood", "quiet", "new")]
    server = EdgeServer(port=0, max_connections=48, max_body_bytes=MIB, keys=tuple(keys), read_timeout_s=60.0)
    server = msgspec.structs.replace(server, max_connections=max(48, 2 * pool.size)) if pool.needs_job else server
    async with running(
        tmp_path, server=server, realtime=RealtimeConfig(max_sessions=12), files=DeviceFilesConfig(accept=True)
    ) as device:
        yield [Caller(device.app.port, key.name, pool) for key in keys]


TABLE = [
    *(pytest.param(gateway, pool, id=f"gateway: {name}") for name, pool in GATEWAY.items()),
    *(pytest.param(edge, pool, id=f"edge: {name}") for name, pool in EDGE.items()),
]


Where = Callable[[Issuer, RedisServer, Path, Pool], AbstractAsyncContextManager[list[Caller]]]


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.parametrize(("where", "pool"), TABLE)
async def test_flood_leaves_each_pool_to_the_others(
    issuer: Issuer, empty_redis: RedisServer, tmp_path: Path, where: Where, pool: Pool
) -> None:
    """The flood has half. The quiet caller takes a quarter without one refusal, and a third one still finds a place.
    The places of a client that is gone are free again."""
    async with where(issuer, empty_redis, tmp_path, pool) as (flood, quiet, new):
        if pool.needs_job:
            for caller in (flood, quiet, new):
                await caller.prepare()
        assert await flood.take_all() == pool.size // 2
        for _ in range(pool.size // 4):
            assert await quiet.take() in BUSY
        assert await flood.take() == b"429"
        assert await new.take() in BUSY
        quiet.leave()
        flood.leave()
        for _ in range(pool.size // 4):
            while await quiet.take() not in BUSY:  # until the server notices that the first ones have left
                pass
        for caller in (quiet, new):
            caller.leave()


ASK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNFINISHED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer no\r\n"
    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
)
ANY = Pool(48, session)


async def connect(port: int | None, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.parametrize("where", [gateway, edge])
@pytest.mark.parametrize("sent", [b"", ASK, UNFINISHED], ids=["silent", "kept alive", "refused before its body"])
async def test_connections_of_one_address_push_out_their_own(
    issuer: Issuer, empty_redis: RedisServer, tmp_path: Path, where: Where, sent: bytes
) -> None:
    """Neither an idle connection of another address, nor its new ones, are touched by three times as many as fit."""
    async with where(issuer, empty_redis, tmp_path, ANY) as (flood, *_), AsyncExitStack() as stack:
        reader, writer = await connect(flood.port, "127.0.0.2")
        stack.callback(writer.close)
        for number in range(3 * ANY.size):
            flooding, flooder = await connect(flood.port, "127.0.0.1")
            stack.callback(flooder.close)
            if sent:
                flooder.write(sent)
                await flooding.readline()
            if number % ANY.size == ANY.size - 1:
                newcomer, new = await connect(flood.port, "127.0.0.2")
                stack.callback(new.close)
                new.write(ASK)
                assert b" 200 " in await newcomer.readline()
        writer.write(ASK)
        assert b" 200 " in await reader.readline()
