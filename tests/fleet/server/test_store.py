"""The tables and their migrations, on both databases."""

from __future__ import annotations

import asyncio
import shlex
import sys

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from causeway_server.fleet.store.database import Store, _with_driver
from causeway_server.fleet.store.devices import device_history, forget_old_events, write_reports
from causeway_server.fleet.store.history import DeviceEvent
from causeway_server.fleet.store.tables import metadata
from causeway_server.router.errors import ConfigError
from tests.check.sources import ROOT

pytestmark = pytest.mark.slow


def differences(connection: Connection) -> list[object]:
    return list(compare_metadata(MigrationContext.configure(connection), metadata))


async def test_the_revisions_make_the_tables(database: str) -> None:
    """Three processes open the new database at once; Alembic then finds nothing to add."""
    program = (
        f"import asyncio; from causeway_server.fleet.store.database import Store; asyncio.run(Store.open({database!r}))"
    )
    starts = [await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=ROOT) for _ in range(3)]
    assert [await started.wait() for started in starts] == [0, 0, 0]
    store = await Store.open(database)
    async with store.read() as connection:
        assert await connection.run_sync(differences) == []
    await store.close()


_LATER = {
    "devices": "temperature_c drift",
    "telemetry": "on_device cached private micro_usd measured",
    "telemetry_marks": "on_device cached private micro_usd measured",
}


async def test_an_older_database_gets_what_it_lacks(database: str) -> None:
    store = await Store.open(database)
    async with store.write() as connection:
        await connection.execute(text("ALTER TABLE rollouts DROP COLUMN without_replay"))
        await connection.execute(text("ALTER TABLE devices DROP COLUMN erasure_json"))
        for name in ("records", "labels"):
            await connection.execute(text(f"DROP TABLE {name}"))
        for table, names in _LATER.items():
            for name in names.split():
                await connection.execute(text(f"ALTER TABLE {table} DROP COLUMN {name}"))
        await connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    await store.close()
    store = await Store.open(database)
    async with store.read() as connection:
        assert await connection.run_sync(differences) == []
    await store.close()


async def revision_of(database: str, *, write: str = "") -> str:
    """Return the revision that a database has, after writing another one without opening the store."""
    engine = create_async_engine(_with_driver(database))
    async with engine.begin() as connection:
        if write:
            await connection.execute(text(f"UPDATE alembic_version SET version_num = '{write}'"))
        found = str(await connection.scalar(text("SELECT version_num FROM alembic_version")))
    await engine.dispose()
    return found


async def test_a_database_of_a_newer_version_is_refused_unchanged(database: str) -> None:
    await (await Store.open(database)).close()
    await revision_of(database, write="9999")
    for downgrade in (None, "", "0001"):
        with pytest.raises(
            ConfigError, match=r"revision 9999, from a newer version of causeway-fleet; this version knows only 0004"
        ) as refused:
            await Store.open(database, downgrade=downgrade)
        assert shlex.split(refused.value.message.split("`")[1]) == [
            *("causeway-fleet", "downgrade", "0004", "--database"),
            make_url(database).render_as_string(hide_password=True),
        ]
    assert await revision_of(database) == "9999"


async def test_a_database_is_taken_back_and_loses_nothing(database: str) -> None:
    """An earlier version starts with the revision that it knows; the upgrade finds the later tables and columns."""
    store = await Store.open(database)
    async with store.write() as connection:
        await write_reports(connection, [], [("a", DeviceEvent(1.0, "idle", None, None, "", "", ""))])
    await store.close()
    await (await Store.open(database, downgrade="0001")).close()
    assert await revision_of(database) == "0001"
    for wrong in ("0004", "unknown", ""):
        with pytest.raises(ConfigError, match=f"revision 0001, not `{wrong}` or a later one"):
            await Store.open(database, downgrade=wrong)
    store = await Store.open(database)
    async with store.read() as connection:
        assert len(await device_history(connection, "a")) == 1
        assert await connection.run_sync(differences) == []
    await store.close()


async def test_a_device_keeps_its_newest_events(database: str) -> None:
    store = await Store.open(database)
    try:
        async with store.write() as connection:
            events = [("a", DeviceEvent(1000.0 + n, "idle", None, None, "", str(n), "")) for n in range(150)]
            await write_reports(connection, [], [*events, ("b", DeviceEvent(1000.0, "idle", None, None, "", "", ""))])
            await forget_old_events(connection, now=2000.0)
            kept = await device_history(connection, "a", limit=1000)
            assert [event.code for event in kept] == [str(n) for n in range(149, 49, -1)]
            assert len(await device_history(connection, "b")) == 1
            await forget_old_events(connection, now=2000.0 + 31 * 86400.0)
            assert await device_history(connection, "a") == []
    finally:
        await store.close()


async def half_a_change(store: Store) -> None:
    async with store.write() as connection:
        await write_reports(connection, [], [("a", DeviceEvent(1.0, "idle", None, None, "", "", ""))])
        raise ZeroDivisionError


async def test_a_failed_transaction_changes_nothing(database: str) -> None:
    store = await Store.open(database)
    try:
        with pytest.raises(ZeroDivisionError):
            await half_a_change(store)
        async with store.read() as connection:
            assert await device_history(connection, "a") == []
    finally:
        await store.close()
