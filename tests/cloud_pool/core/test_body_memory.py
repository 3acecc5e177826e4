"""Request bodies in memory are bounded, whatever connections send: counted, and measured as a process's memory.

The user's load: 4,096 connections that each send the largest body, by one tenant or by many, beside small requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.core.request_context import FREE_BYTES, BodyMemory
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.router.errors import ConfigError, RateLimited, Shed

from ..conftest import Command
from ..unreachable import unreachable_tier

MIB = 1024 * 1024
BODY = 8 * MIB
MEMORY = 64 * MIB
CONNECTIONS = 256
PATIENCE_S = 240.0


def a_request() -> Any:
    return Mock()


def test_one_tenant_has_half_of_the_memory_and_all_have_all_of_it() -> None:
    memory = BodyMemory(100)
    requests = [a_request() for _ in range(4)]
    memory.hold(requests[0], "a", 50)
    with pytest.raises(RateLimited, match=r"take 50 bytes, .* its share of 100 bytes \(server.max_body_memory_bytes"):
        memory.hold(requests[1], "a", 1)
    memory.hold(requests[1], "b", 40)
    with pytest.raises(Shed, match=r"90 of 100 bytes") as caught:
        memory.hold(requests[2], "c", 11)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
    memory.release(requests[0])
    memory.hold(requests[2], "c", 11)
    assert memory.held_bytes == 51


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab"), st.integers(0, 60)), max_size=40))
def test_the_count_is_what_the_requests_in_progress_have(steps: list[tuple[int, str, int]]) -> None:
    """A request that grows, is refused or ends leaves the count exact; 0 ends a request."""
    memory, requests = BodyMemory(100), [a_request() for _ in range(6)]
    owners, sizes = dict.fromkeys(range(6), ""), dict.fromkeys(range(6), 0)
    for at, tenant, size in steps:
        if size == 0:
            memory.release(requests[at])
            owners[at], sizes[at] = "", 0
            continue
        with contextlib.suppress(RateLimited, Shed):
            memory.hold(requests[at], owners[at] or tenant, size)
            owners[at], sizes[at] = owners[at] or tenant, size
        assert memory.held_bytes == sum(sizes.values()) <= 100
        for name in "ab":
            assert sum(sizes[one] for one in sizes if owners[one] == name) <= 50
    for one in requests:
        memory.release(one)
    assert memory.held_bytes == 0


async def test_a_memory_that_no_largest_body_fits_is_a_config_error() -> None:
    server = ServerConfig(port=0, max_body_bytes=16 * MIB, max_body_memory_bytes=31 * MIB)
    async with asyncio.TaskGroup() as _:
        with pytest.raises(ConfigError, match="33554432"):
            build(Config(server=server, tiers=(unreachable_tier(),)), Mock())


def test_a_metric_has_the_bytes_in_memory() -> None:
    registry = CollectorRegistry()
    BodyMemory(100, registry).hold(a_request(), "a", 7)
    assert registry.get_sample_value("causeway_gateway_body_bytes") == 7


class Place(msgspec.Struct, frozen=True):
    host: str
    port: int


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[psutil.Process, Place]]:
    """A gateway process with little memory for bodies, and where it listens."""
    file = tmp_path / "gateway.yaml"
    template = Path(__file__).parents[1] / "plain.jinja"
    file.write_text(
        f"server: {{port: 0, max_body_bytes: {BODY}, max_body_memory_bytes: {MEMORY}, read_timeout_s: 30}}\n"
        f"tiers: [{{name: large, triton: '127.0.0.1:1', template_file: '{template}', context_tokens: 2048}}]\n"
        "operator: {port: 0}\n"
    )
    command = Command("serve", "--config", str(file))
    try:
        url = command.ready()["url"]
        yield psutil.Process(command.process.pid), Place("127.0.0.1", int(url.removesuffix("/v1").rpartition(":")[2]))
    finally:
        command.process.kill()
        command.process.wait()


async def send(place: Place, body_bytes: int, *, chunked: bool, halt_at: int | None = None) -> bytes:
    """Send a body as fast as it is taken, up to `halt_at`; return the response's head, or nothing if there was none."""
    reader, writer = await asyncio.open_connection(place.host, place.port)
    head = "transfer-encoding: chunked" if chunked else f"content-length: {body_bytes}"
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        + f"{head}\r\n\r\n".encode()
    )
    response = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))  # it may come before the body is sent
    piece = b" " * 65536
    framed = b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
    with contextlib.suppress(ConnectionError):
        for _ in range(min(body_bytes, halt_at or body_bytes) // len(piece)):
            if response.done():
                break
            writer.write(framed)
            await writer.drain()
        if chunked and halt_at is None:
            writer.write(b"0\r\n\r\n")
    try:
        return await response
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    finally:
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
async def test_many_large_bodies_at_once_do_not_fill_the_memory(
    gateway: tuple[psutil.Process, Place], *, chunked: bool
) -> None:
    """2 GiB are sent. Those that have no room are refused with Retry-After, and small requests are answered."""
    process, place = gateway
    before = process.memory_info().rss
    peak = before
    statuses: dict[bytes, int] = {}

    async def flood() -> None:
        response = await send(place, BODY, chunked=chunked)
        status = response.split(b" ", 2)[1] if response else b"closed"
        statuses[status] = statuses.get(status, 0) + 1
        if status in (b"429", b"503"):
            assert b"\r\nretry-after: 1\r\n" in response.lower()

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(0.01)

    async with asyncio.timeout(PATIENCE_S):
        watching = asyncio.create_task(watch())
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONNECTIONS):
                tasks.create_task(flood())
            small = [await send(place, FREE_BYTES, chunked=False) for _ in range(5)]
        watching.cancel()
    assert all(b" 400 " in response for response in small), small  # blanks are no JSON: it was read and parsed
    assert set(statuses) <= {b"400", b"429", b"503", b"closed"}
    assert statuses.get(b"429", 0) > 0
    # The tenant's share is 32 MiB; each of 256 connections has up to 384 KiB that were not read yet: 96 MiB.
    assert peak - before < 5 * MEMORY // 2, (peak - before) // MIB
    assert b" 400 " in await send(place, BODY, chunked=chunked)  # all memory was given back


@pytest.mark.slow
async def test_clients_that_announce_large_bodies_and_stop_leave_room_for_small_requests(
    gateway: tuple[psutil.Process, Place],
) -> None:
    process, place = gateway
    before = process.memory_info().rss
    async with asyncio.timeout(PATIENCE_S):
        stalled = [asyncio.create_task(send(place, BODY, chunked=False, halt_at=BODY // 2)) for _ in range(16)]
        done, pending = await asyncio.wait(stalled, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 12:
            done, pending = await asyncio.wait(stalled, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
        assert len(pending) == MEMORY // 2 // BODY  # these have the tenant's share of the memory
        assert all(b" 429 " in task.result() for task in done)
        assert b" 400 " in await send(place, FREE_BYTES, chunked=False)
        assert process.memory_info().rss - before < 2 * MEMORY
        for task in pending:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        while b" 400 " not in await send(place, BODY, chunked=False):  # until their connections are gone
            pass
