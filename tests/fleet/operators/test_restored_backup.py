"""A control plane as a process, whose database is restored from a backup of before, while its files stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from causeway_server.fleet.controller.loop import REVOCATIONS_FILE, keep_revocations
from causeway_server.fleet.store.audit import read_audit
from causeway_server.fleet.store.database import Store
from causeway_server.fleet.store.generations import read_revocations, revoke_owner
from tests.fleet.server.device import Device

from .bed import back_up, restore
from .conftest import operated_fleet
from .process import Process

pytestmark = pytest.mark.slow

OWNER, NOW = "acme/till-1", 1_800_000_000.0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    one = Process(operated_fleet(tmp_path))
    yield one
    one.kill()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 -- in another process
            await asyncio.sleep(0.05)


async def test_what_happened_since_the_backup(process: Process, http: aiohttp.ClientSession) -> None:
    """A device that was revoked since stays revoked. One that was enrolled since is told, and can join again."""
    data = process.signed.path / "data"
    token = (await asyncio.to_thread(process.done, "enroll", "--cohort", "kiosk", "--uses", "3")).split()[0]
    loyal, stolen, late = (Device(http, process.url, f"till-{number}") for number in range(3))
    for device in (loyal, stolen):
        assert (await device.enrol(token)).status == 200
        assert (await device.ask_token()).status == 200
    backup = back_up(data / "fleet.db")
    assert (await late.enrol(token)).status == 200
    assert (await loyal.report()).status == 200
    await asyncio.to_thread(process.done, "revoke", "till-1", "--reason", "stolen", "--yes")
    assert (await stolen.ask_token()).code == "device_revoked"
    await reached((process.signed.path / "published" / REVOCATIONS_FILE).exists)
    await asyncio.to_thread(process.kill)
    restore(data / "fleet.db", backup)
    await asyncio.to_thread(process.start)
    async with asyncio.timeout(60.0):
        while (await stolen.ask_token()).code != "device_revoked":  # noqa: ASYNC110 -- in another process
            await asyncio.sleep(0.05)
    listed = await loyal.send("GET", "/v1/revocations")
    assert len(listed.body["devices"]) == 1
    assert (await loyal.report()).status == 200
    assert (await late.report()).code == "device_unknown"
    assert (await late.enrol(token)).status == 200
    assert "controller device.revoked_again" in await asyncio.to_thread(process.done, "audit")
    assert "chain holds" in await asyncio.to_thread(process.done, "audit", "--verify")


@pytest.mark.parametrize("copy", [b"{", b'{"acme/till-1": 1.0}'], ids=["damaged", "expired"])
async def test_a_copy_that_says_nothing_is_written_again(tmp_path: Path, database: str, copy: bytes) -> None:
    path = tmp_path / "published" / REVOCATIONS_FILE
    path.parent.mkdir()
    path.write_bytes(copy)
    store = await Store.open(database or f"sqlite:///{tmp_path / 'fleet.db'}")
    try:
        await keep_revocations(store, tmp_path, NOW)
        assert path.read_bytes() == b"{}"
        async with store.write() as connection:
            await revoke_owner(connection, OWNER, NOW)
        await keep_revocations(store, tmp_path, NOW)
        assert path.read_bytes() == b'{"acme/till-1":1800000000.0}'
        async with store.read() as connection:
            assert dict((await read_revocations(connection)).devices) == {OWNER: NOW}
            assert await read_audit(connection) == []
    finally:
        await store.close()
