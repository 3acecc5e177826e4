"""The database goes away and comes back: 503 with a code, nothing is lost, parked polls stay."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from causeway_server.fleet.store.database import Store, StoreUnavailable
from causeway_server.fleet.store.generations import advance
from causeway_server.router.errors import ConfigError

from .conftest import Plane, serving
from .postgres import PostgresServer

pytestmark = pytest.mark.slow


async def recovered(plane: Plane) -> None:
    """A load balancer watches /readyz."""
    device = plane.device()
    while (await device.send("GET", "/readyz")).status != 200:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.postgres
async def test_postgres_is_away_and_returns(fleet_folder: Path, postgres_server: PostgresServer) -> None:
    """Crashed: each kind of request says so and works again later; a poll that was parked is answered after it."""
    async with serving(fleet_folder, postgres_server.database()) as plane:
        device = await plane.enrolled()
        etag = (await device.wake()).headers["etag"]
        waiting = asyncio.create_task(device.wake(etag, wait_s=300))
        await plane.parked(1)
        with postgres_server.away():
            for answer in (
                await device.report(),
                await device.ask_token(),
                await device.wake(),
                await device.enrol("x"),
            ):
                assert (answer.status, answer.code) == (503, "database_unavailable")
                assert int(answer.headers["retry-after"]) >= 1
            assert (await device.send("GET", "/readyz")).status == 503
            assert (await device.send("GET", "/healthz")).status == 200
            assert plane.plane.wakes.polls.parked == 1
        await recovered(plane)
        assert (await device.report()).status == 200
        async with plane.plane.store.write() as connection:
            await advance(connection, "everyone")
        assert (await waiting).status == 200


@pytest.mark.postgres
async def test_postgres_hangs_and_returns(fleet_folder: Path, postgres_server: PostgresServer) -> None:
    """It accepts connections and answers nothing: requests end with 503, the controller pauses, polls stay parked."""
    async with asyncio.timeout(120), serving(fleet_folder, postgres_server.database(), statement_s=4.0) as plane:
        device = await plane.enrolled()
        waiting = asyncio.create_task(device.wake((await device.wake()).headers["etag"], wait_s=300))
        await plane.parked(1)
        await leading(plane, 1)
        with postgres_server.hanging():
            ready = device.send("GET", "/readyz")
            asked = await asyncio.gather(ready, device.report(), device.ask_token(), device.wake(), device.enrol("x"))
            assert {(answer.status, answer.code) for answer in asked} == {(503, "database_unavailable")}
            assert (await device.send("GET", "/healthz")).status == 200
            await leading(plane, 0)
            assert plane.plane.wakes.polls.parked == 1
        await recovered(plane)
        await leading(plane, 1)
        assert (await device.report()).status == 200
        async with plane.plane.store.write() as connection:
            await advance(connection, "everyone")
        assert (await waiting).status == 200


async def leading(plane: Plane, processes: int) -> None:
    """Return when so many processes run the controller, by the metric."""
    line = f"causeway_fleet_controller_leads {processes}.0".encode()
    while line not in (await plane.device().send("GET", "/metrics")).body:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_sqlite_is_locked_by_another_program(fleet_folder: Path, tmp_path: Path) -> None:
    """Such as a backup that takes too long."""
    file = tmp_path / "fleet.db"
    async with serving(fleet_folder, f"sqlite:///{file}", statement_s=1.0) as plane:
        device = await plane.enrolled()
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        assert (await device.report()).code == "database_unavailable"
        assert (await device.wake()).status == 200  # readers go on
        other.execute("ROLLBACK")
        other.close()
        assert (await device.report()).status == 200


@pytest.mark.parametrize("url", ["mysql://host/name", "sqlite", "postgresql+psycopg2", "://"])
async def test_a_wrong_url_says_what_to_give(url: str) -> None:
    with pytest.raises(ConfigError, match="--database"):
        await Store.open(url)


async def test_a_database_that_does_not_answer_at_the_start(tmp_path: Path) -> None:
    """The thread of a connection would outlive the event loop."""
    (tmp_path / "text.db").write_text("not a database\n" * 100)
    urls = ["postgresql://causeway@127.0.0.1:1/none"]
    urls += [f"sqlite:///{tmp_path / name}" for name in ("no/folder/fleet.db", "text.db")]
    for url in urls:
        with pytest.raises(StoreUnavailable):
            await Store.open(url)
        assert not [thread.name for thread in threading.enumerate() if "_connection_worker" in thread.name]
