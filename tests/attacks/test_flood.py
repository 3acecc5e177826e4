"""Ten thousand silent connections to a gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from causeway_server.cloud_pool.http.config import ServerConfig
from tests.cloud_pool.conftest import Command
from tests.waiting import until

MANY = 10_000
MAX_CONNECTIONS = ServerConfig().max_connections
SPARE = 600  # files: of Python, gRPC, and of connections that end while others begin
ASK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Place(msgspec.Struct, frozen=True):
    host: str
    port: int

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


@pytest.fixture
def gateway(host: str) -> Iterator[tuple[psutil.Process, Place]]:
    """The process and where it listens."""
    command = Command("serve", "--host", host, "--port", "0", "--triton", "127.0.0.1:1")
    try:
        url = command.ready()["url"]
        yield psutil.Process(command.process.pid), Place(host, int(url.removesuffix("/v1").rpartition(":")[2]))
    finally:
        command.process.kill()
        command.process.wait()


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def connected(place: Place) -> socket.socket:
    sock = socket.socket(place.family)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (place.host, place.port))
    return sock


async def answered(sock: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, ASK)
    return (await loop.sock_recv(sock, 4096)).startswith(b"HTTP/1.1 200 ")


async def is_answered(place: Place) -> bool:
    """A client that comes new."""
    with contextlib.closing(await connected(place)) as sock:
        return await answered(sock)


def is_open(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "start"),
    [("127.0.0.1", b""), ("127.0.0.1", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"), ("::1", b"")],
)
async def test_half_open_connections(gateway: tuple[psutil.Process, Place], many_files: None, start: bytes) -> None:
    """New and old clients are answered throughout; open files are bounded, and released when the flood ends."""
    process, place = gateway
    loop = asyncio.get_running_loop()
    kept = await connected(place)
    assert await answered(kept)
    before = process.num_fds()
    flood: list[socket.socket] = []
    most = before
    try:
        for number in range(MANY):
            sock = await connected(place)
            flood.append(sock)
            if start:
                with contextlib.suppress(OSError):  # it was pushed out already
                    await loop.sock_sendall(sock, start)
            if number % 500 == 499:
                assert await is_answered(place)
                most = max(most, process.num_fds())
        assert await answered(kept)
        assert most <= before + MAX_CONNECTIONS + SPARE
        assert 0 < sum(is_open(sock) for sock in flood) <= MAX_CONNECTIONS + SPARE
    finally:
        for sock in flood:
            sock.close()
    await until(lambda: process.num_fds() <= before + 5)
    assert await answered(kept)
    assert await is_answered(place)
    kept.close()
