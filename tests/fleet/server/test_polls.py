"""The connections of parked polls, byte by byte: they leave aiohttp, and return to it for the next request."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from causeway_server.fleet.store.devices import Device as StoredDevice
from causeway_server.fleet.store.generations import advance, revoke
from tests.waiting import until

from .conftest import Plane, serving
from .device import Device

pytestmark = pytest.mark.slow


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Nothing here depends on which one it is."""
    return f"sqlite:///{tmp_path / 'fleet.db'}"


class Connection:
    """One connection of a device; requests are written whole."""

    def __init__(self, plane: Plane, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._plane = plane
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, plane: Plane) -> Connection:
        return cls(plane, *await asyncio.open_connection("127.0.0.1", int(plane.url.rpartition(":")[2])))

    def send(self, request: str) -> None:
        self._writer.write(request.encode())

    async def poll(self, device: Device, *lines: str, parked: int = 1) -> None:
        """Park a poll."""
        etag = (await device.wake()).headers["etag"]
        self.send(poll_head(device, f"if-none-match: {etag}", *lines))
        await self._plane.parked(parked)

    async def answer(self) -> tuple[int, bytes, bytes]:
        """Return status, head and body of the next response."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return int(head.split()[1]), head.lower(), await self._reader.readexactly(int(length or b"0"))

    def close(self) -> None:
        self._writer.close()

    async def ended(self) -> bool:
        return await self._reader.read() == b""


def poll_head(device: Device, *lines: str) -> str:
    head = ("GET /v1/wake?wait=300 HTTP/1.1", "host: fleet", f"authorization: Bearer {device.token}", *lines)
    return "".join(f"{line}\r\n" for line in (*head, ""))


async def change(plane: Plane) -> None:
    async with plane.plane.store.write() as connection:
        await advance(connection, "everyone")
    await plane.plane.wakes.refresh()


HEALTH = "GET /healthz HTTP/1.1\r\nhost: fleet\r\n\r\n"


async def test_a_connection_is_used_again(plane: Plane) -> None:
    """For another poll, and for other requests."""
    device, connection = await plane.enrolled(), await Connection.of(plane)
    for _ in range(2):
        await connection.poll(device)
        await change(plane)
        status, head, body = await connection.answer()
        assert (status, b'"everyone"' in body) == (200, True)
        for line in (b"etag: ", b"date: ", b"cache-control: no-store", b"content-type: application/json"):
            assert b"\r\n" + line in head
        connection.send(HEALTH)
        assert (await connection.answer())[0] == 200


async def test_a_request_that_comes_too_early_is_answered_after_the_poll(plane: Plane) -> None:
    device, connection = await plane.enrolled(), await Connection.of(plane)
    typed = ("content-type: application/json", "content-length: 2")
    await connection.poll(device, *typed, "", "{}")  # a body, which no device sends, is not the next request
    connection.send(HEALTH)
    await change(plane)
    assert (await connection.answer())[2].startswith(b'{"cohort"')
    assert (await connection.answer())[2] == b'{"status":"ok"}'


async def test_a_device_that_leaves_while_its_poll_is_read_parks_nothing(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, connection = await plane.enrolled(), await Connection.of(plane)
    etag = (await device.wake()).headers["etag"]
    find, connections = plane.plane.lookups.submit, plane.plane.wakes.polls.connections
    reading, left, found = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def find_slowly(name: str) -> StoredDevice:
        reading.set()
        await left.wait()
        device = await find(name)
        found.set()
        return device

    monkeypatch.setattr(plane.plane.lookups, "submit", find_slowly)
    connection.send(poll_head(device, f"if-none-match: {etag}"))
    await reading.wait()
    before = connections.others
    connection.close()
    await until(lambda: connections.others < before)
    left.set()
    await found.wait()
    assert (await plane.device().send("GET", "/healthz")).status == 200
    assert plane.plane.wakes.polls.parked == 0
    assert "failed" not in caplog.text


async def test_a_client_that_leaves_amid_its_body_is_no_fault_of_ours(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody can do so, without a token: the log has nothing of it."""
    connections = plane.plane.wakes.polls.connections
    connection = await Connection.of(plane)
    head = "POST /v1/enroll HTTP/1.1\r\nHost: fleet\r\nExpect: 100-continue\r\n"
    connection.send(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{")
    assert (await connection.answer())[0] == 100  # the handler reads the body
    before = connections.others
    connection.close()
    await until(lambda: connections.others < before)
    assert (await plane.device().send("GET", "/healthz")).status == 200
    assert "failed" not in caplog.text


async def test_a_poll_may_close_its_connection(plane: Plane) -> None:
    device, connection = await plane.enrolled(), await Connection.of(plane)
    await connection.poll(device, "connection: close")
    await change(plane)
    assert b"connection: close" in (await connection.answer())[1]
    assert await connection.ended()


async def test_a_revoked_device_is_told_at_once(plane: Plane) -> None:
    """Its poll ends with the reason; that of another device of its cohort stays parked."""
    device, other = await plane.enrolled(), await plane.enrolled()
    connection, another = await Connection.of(plane), await Connection.of(plane)
    await connection.poll(device)
    await another.poll(other, parked=2)
    async with plane.plane.store.write() as transaction:
        await revoke(transaction, device.name, time.time())
    status, _, body = await connection.answer()
    assert (status, b'"device_revoked"' in body) == (403, True)
    await plane.parked(1)


async def test_idle_connections_end_with_the_server(fleet_folder: Path, database: str) -> None:
    async with serving(fleet_folder, database) as plane:
        device = await plane.enrolled()
        idle, parked = await Connection.of(plane), await Connection.of(plane)
        await idle.poll(device)
        await change(plane)
        await idle.answer()
        await parked.poll(device)
    status, head, _ = await parked.answer()
    assert (status, b"connection: close" in head) == (304, True)
    assert await parked.ended()
    assert await idle.ended()


async def test_an_idle_connection_is_closed_in_time(plane: Plane) -> None:
    device, connection = await plane.enrolled(), await Connection.of(plane)
    await connection.poll(device)
    await change(plane)
    await connection.answer()
    plane.plane.wakes.polls.end_old({}, asyncio.get_running_loop().time() + 76.0)
    assert await connection.ended()
