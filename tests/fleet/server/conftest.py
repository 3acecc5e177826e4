"""A control plane on a real database; every test runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import msgspec
import pytest

from causeway_server.fleet.app import ServeSettings, running
from causeway_server.fleet.repository.folder import new_fleet
from causeway_server.fleet.server.plane import ControlPlane
from causeway_server.fleet.store.enrolment import new_join_token
from tests.own_task import in_own_task

from .device import Device
from .postgres import PostgresServer, make_postgres

FLEET = """version: 1
name: stores
cohorts:
  kiosk:
    match: {role: kiosk}
    policy: policies/default.yaml
  everyone:
    policy: policies/default.yaml
"""


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = make_postgres()
    try:
        yield server
    finally:
        server.stop()
        server.remove()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'fleet.db'}"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.database()


@pytest.fixture
def fleet_folder(tmp_path: Path) -> Path:
    """A fleet whose root metadata is there."""
    folder = tmp_path / "fleet"
    new_fleet(folder)
    (folder / "fleet.yaml").write_text(FLEET)
    metadata = folder / "published" / "tuf" / "metadata"
    metadata.mkdir(parents=True)
    for name in ("1.root.json", "root.json", "timestamp.json"):
        (metadata / name).write_bytes(msgspec.json.encode({"signed": name}))
    return folder


class Plane:
    """A running control plane, and devices of it."""

    def __init__(self, plane: ControlPlane, url: str, http: aiohttp.ClientSession) -> None:
        self.plane = plane
        self.url = url
        self.http = http

    def device(self, name: str = "") -> Device:
        return Device(self.http, self.url, name)

    async def parked(self, count: int) -> None:
        """Return when so many polls wait."""
        while self.plane.wakes.polls.parked != count:  # noqa: ASYNC110  # of another task, on a real socket
            await asyncio.sleep(0.01)

    async def join_token(self, *, cohort: str = "", uses: int = 1, expires_s: float = 3600.0, **labels: str) -> str:
        now = datetime.now(UTC).timestamp()
        async with self.plane.store.write() as connection:
            return await new_join_token(
                connection, cohort=cohort, tenant="acme", labels=labels, uses=uses, expires_s=expires_s, now=now
            )

    async def enrolled(self, name: str = "", **fields: object) -> Device:
        """A device with an identity and a token."""
        device = self.device(name)
        assert (await device.enrol(await self.join_token(), **fields)).status == 200
        assert (await device.ask_token()).status == 200
        return device


@asynccontextmanager
async def serving(folder: Path, database: str, **more: object) -> AsyncIterator[Plane]:
    """Run one. `more`: of its settings."""
    settings = msgspec.structs.replace(
        ServeSettings(folder, folder / "keys", folder / "data", database, port=0), **more
    )
    async with AsyncExitStack() as stack:
        plane, url = await stack.enter_async_context(running(settings))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Plane(plane, url, http)


@pytest.fixture
async def plane(fleet_folder: Path, database: str) -> AsyncIterator[Plane]:
    async with in_own_task(serving(fleet_folder, database)) as one:
        yield one
