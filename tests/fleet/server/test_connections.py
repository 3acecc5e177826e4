"""The connections of a control plane: no address or device takes all of them, and an operator always gets through."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from causeway_server.fleet.app import BOOTSTRAP_FILE
from tests.check.sources import ROOT
from tests.ports import free_port

from .conftest import Plane, serving
from .device import Answered, Device
from .test_polls import Connection, change, poll_head

pytestmark = pytest.mark.slow
FILES = 300
FLOOD = 400
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: fleet\r\n\r\n"
JSON = b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
SLOW_BODY = b"POST /v1/enroll HTTP/1.1\r\nHost: fleet\r\nExpect: 100-continue\r\n" + JSON


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Nothing here depends on which one it is."""
    return f"sqlite:///{tmp_path / 'fleet.db'}"


@asynccontextmanager
async def small_process(folder: Path) -> AsyncIterator[int]:
    """A control plane that may open FILES files; yields its port."""
    port = free_port()
    arguments = ["--keys", str(folder / "keys"), "--state-dir", str(folder / "data"), "--listen", f"127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "causeway_server.fleet", "serve", str(folder), *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"ready ")
        yield port
    finally:
        process.kill()
        await process.wait()


async def connect(port: int, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    writer.write(request)
    return (await reader.readline()).split()[1]


@pytest.mark.parametrize("sent", [b"", HEALTH, SLOW_BODY], ids=["silent", "kept alive", "slow bodies"])
async def test_an_operator_gets_through_a_flood_of_connections(fleet_folder: Path, sent: bytes) -> None:
    """Of another address; the connection that it has kept open is not closed either."""
    async with small_process(fleet_folder) as port, AsyncExitStack() as stack:
        token = (fleet_folder / "data" / BOOTSTRAP_FILE).read_text().strip()
        ask = f"GET /v1/devices HTTP/1.1\r\nHost: fleet\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        kept = await connect(port, "127.0.0.2")
        stack.callback(kept[1].close)
        for _ in range(FLOOD):
            reader, writer = await connect(port, "127.0.0.1")
            stack.callback(writer.close)
            if sent:
                writer.write(sent)
                await reader.readline()
        operator = await connect(port, "127.0.0.2")
        stack.callback(operator[1].close)
        assert await status(*operator, ask) == b"200"
        assert await status(*kept, ask) == b"200"


@pytest.mark.parametrize("first", [b"", SLOW_BODY], ids=["silent", "slow bodies"])
async def test_the_longest_silent_connection_gives_way_before_one_that_sends(
    fleet_folder: Path, database: str, first: bytes
) -> None:
    """Of the address with the most; where all of them send, the one that sends longest. The others go on."""
    most = 64 // 2
    async with serving(fleet_folder, database, max_files=64) as plane, AsyncExitStack() as stack, asyncio.timeout(60.0):
        port = int(plane.url.rpartition(":")[2])

        async def opened(address: str, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await connect(port, address)
            stack.callback(writer.close)
            if sent:
                assert await status(reader, writer, sent) == b"100"
                await reader.readline()
            return reader, writer

        crowd = [await opened("127.0.0.1", sent) for sent in (first, SLOW_BODY, *[first] * (most - 2))]
        while plane.plane.wakes.polls.connections.others < most:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await status(*await opened("127.0.0.2", b""), HEALTH) == b"200"
        assert await crowd[0][0].read() == b""
        assert await status(*crowd[1], b" " * 99) == b"400"
        assert await status(*crowd[2], b" " * 99 if first else HEALTH) == (b"400" if first else b"200")
        assert plane.plane.wakes.polls.connections.others == most


async def test_clones_neither_wake_each_other_nor_take_the_polls_of_others(fleet_folder: Path, database: str) -> None:
    """All machines with one identity have a share of the parked polls; what is beyond it is answered at once."""
    async with serving(fleet_folder, database, max_files=64) as plane:
        clone, other = await plane.enrolled(), await plane.enrolled()
        share = 64 * 7 // 8 // 2
        parked = [await Connection.of(plane) for _ in range(share)]
        for number, connection in enumerate(parked):
            await connection.poll(clone, parked=number + 1)
        etag = (await clone.wake()).headers["etag"]
        for _ in range(3):
            assert (await clone.wake(etag, 300)).status == 304
        another = await Connection.of(plane)
        await another.poll(other, parked=share + 1)
        assert plane.plane.wakes.polls.refused == 3
        await change(plane)
        for connection in (*parked, another):
            assert (await connection.answer())[0] == 200


async def test_places_of_parked_polls_are_free_again(fleet_folder: Path, database: str) -> None:
    """After an answer, and after a device that left."""
    async with serving(fleet_folder, database, max_files=64) as plane:
        device = await plane.enrolled()
        etag = (await device.wake()).headers["etag"]
        share = 64 * 7 // 8 // 2
        for _ in range(3):
            leaving = [await Connection.of(plane) for _ in range(share)]
            for connection in leaving:
                connection.send(poll_head(device, f"if-none-match: {etag}"))
            await plane.parked(share)
            for connection in leaving:
                connection.close()
            await plane.parked(0)
        assert plane.plane.wakes.polls.refused == 0
        staying = await Connection.of(plane)
        for _ in range(2 * share):
            await staying.poll(device)
            await change(plane)
            assert (await staying.answer())[0] == 200
        assert plane.plane.wakes.polls.refused == 0


async def test_a_flood_of_enrolments_is_a_few_transactions(plane: Plane) -> None:
    """So the writer's turn, for which operators wait in the same queue, comes after one of them."""
    devices = [plane.device(f"till-{number}") for number in range(40)]
    async with plane.plane.store.write():
        enrolling = [asyncio.ensure_future(device.enrol("cwj_unknown")) for device in devices]
        while plane.plane.wakes.polls.connections.others < len(devices):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await plane.device().send("GET", "/healthz")).status == 200
    assert {answer.code for answer in await asyncio.gather(*enrolling)} == {"join_token_unknown"}
    assert plane.plane.enrolments.transactions < len(devices) // 2


async def test_devices_that_enrol_in_one_transaction_are_judged_each(plane: Plane) -> None:
    """Two of one name, one with a token of another fleet, and one with a key that it does not hold."""
    token = await plane.join_token(uses=9)
    twins: list[Device] = [plane.device("till-1"), plane.device("till-1")]
    async with plane.plane.store.write():
        asked = [
            *(asyncio.ensure_future(device.enrol(token)) for device in twins),
            asyncio.ensure_future(plane.device("till-2").enrol(token)),
            asyncio.ensure_future(plane.device("till-3").enrol("cwj_unknown")),
            asyncio.ensure_future(plane.device("till-4").enrol(token, proof="bm8")),
        ]
        assert (await asked[-1]).code == "enrolment_proof_invalid"
    answers: list[Answered] = await asyncio.gather(*asked)
    assert sorted(answer.code for answer in answers[:2]) == ["", "device_name_taken"]
    assert [answer.status for answer in answers[2:4]] == [200, 401]
