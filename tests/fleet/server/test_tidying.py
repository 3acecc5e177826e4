"""The control plane deletes old rows only under a wall clock that has run steadily."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.fleet.app import read_fleet_folder
from causeway_server.fleet.server.plane import ControlPlane
from causeway_server.fleet.server.tokens import load_token_key
from causeway_server.fleet.store.database import Store
from causeway_server.fleet.store.devices import device_history, write_reports
from causeway_server.fleet.store.history import DeviceEvent

pytestmark = pytest.mark.slow
DAY_S, HOUR_S = 86400.0, 3600.0


async def test_a_wall_clock_that_jumps_forward_deletes_no_row(
    database: str, fleet_folder: Path, tmp_path: Path
) -> None:
    """Nor one that is wrong at the start; after hours without a step it is believed."""
    monotonic, ahead_s = 0.0, 0.0
    store = await Store.open(database)
    key = load_token_key(tmp_path / "token-key.jwk", "causeway")
    fleet = read_fleet_folder(fleet_folder)
    plane = ControlPlane(fleet_folder, fleet, store, key, lambda: 1.7e9 + monotonic + ahead_s)

    async def kept_for(hours: int) -> bool:
        nonlocal monotonic
        for _ in range(hours):
            monotonic += HOUR_S
            await plane.tidy(monotonic)
        async with store.read() as connection:
            return bool(await device_history(connection, "a"))

    try:
        async with store.write() as connection:
            await write_reports(connection, [], [("a", DeviceEvent(1.7e9, "idle", None, None, "", "", ""))])
        ahead_s = 40 * DAY_S
        assert await kept_for(2)
        ahead_s = 0.0
        assert await kept_for(24)
        ahead_s = 40 * DAY_S
        assert await kept_for(6)
        ahead_s = 0.0
        assert await kept_for(24)
        ahead_s = 40 * DAY_S
        assert not await kept_for(8)
    finally:
        await store.close()
