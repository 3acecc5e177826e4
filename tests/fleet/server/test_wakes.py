"""Long polls: which devices a change wakes, and what ends a poll."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from causeway_server.fleet.store.generations import CohortPace, advance, set_pace

from .conftest import Plane, serving
from .device import Answered, Device

pytestmark = pytest.mark.slow


async def change(plane: Plane, cohort: str) -> None:
    async with plane.plane.store.write() as connection:
        await advance(connection, cohort)
    await plane.plane.wakes.refresh()


async def poll(device: Device) -> asyncio.Task[Answered]:
    etag = (await device.wake()).headers["etag"]
    return asyncio.create_task(device.wake(etag, wait_s=300))


async def test_a_change_wakes_its_cohort_alone(plane: Plane) -> None:
    kiosk, desk = await plane.enrolled(labels={"role": "kiosk"}), await plane.enrolled()
    polls = [await poll(kiosk), await poll(desk)]
    await plane.parked(2)
    await change(plane, "kiosk")
    assert (await polls[0]).status == 200
    await plane.parked(1)
    await change(plane, "everyone")
    assert (await polls[1]).body["cohort"] == "everyone"


async def test_a_change_in_another_process_wakes_too(plane: Plane, fleet_folder: Path, database: str) -> None:
    """Two control planes on one database; the second hears of it without being told."""
    async with serving(fleet_folder, database) as second:
        device = await plane.enrolled()
        elsewhere = Device(second.http, second.url, device.name)
        elsewhere.token = device.token
        waiting = await poll(elsewhere)
        await second.parked(1)
        await change(plane, "everyone")
        assert (await waiting).status == 200


async def test_a_new_pace_wakes_no_device(plane: Plane) -> None:
    await change(plane, "everyone")
    waiting = await poll(await plane.enrolled())
    await plane.parked(1)
    async with plane.plane.store.write() as connection:
        await set_pace(connection, "everyone", CohortPace(per_site=3))
    await plane.plane.wakes.refresh()
    assert plane.plane.wakes.pace("everyone").per_site == 3
    assert plane.plane.wakes.polls.parked == 1
    await change(plane, "everyone")
    await waiting
    assert plane.plane.wakes.pace("everyone").per_site == 3


async def test_a_device_that_leaves_frees_its_poll(plane: Plane) -> None:
    waiting = await poll(await plane.enrolled())
    await plane.parked(1)
    waiting.cancel()
    await plane.parked(0)


async def test_a_poll_ends_without_news(plane: Plane) -> None:
    device = await plane.enrolled()
    etag = (await device.wake()).headers["etag"]
    ended = await device.wake(etag, wait_s=0.05)
    assert (ended.status, ended.headers["etag"]) == (304, etag)
    for wrong in ("nan", "-1", "soon"):
        assert (
            await device.send("GET", f"/v1/wake?wait={wrong}", headers={"authorization": f"Bearer {device.token}"})
        ).code == "invalid_value"


async def test_polls_end_when_the_server_stops(fleet_folder: Path, tmp_path: Path) -> None:
    async with serving(fleet_folder, f"sqlite:///{tmp_path / 'fleet.db'}") as plane:
        waiting = await poll(await plane.enrolled())
        await plane.parked(1)
        plane.plane.wakes.close()
        assert (await waiting).status == 304


async def test_a_poll_needs_a_token(plane: Plane) -> None:
    """None, a forged one, one of another control plane's key, and one that has expired."""
    device = await plane.enrolled()
    assert (await device.send("GET", "/v1/wake")).code == "invalid_api_key"
    head, claims, signature = device.token.split(".")
    device.token = f"{head}.{claims}.{signature[::-1]}"
    assert (await device.wake()).code == "invalid_api_key"
    device.token = plane.plane.key.issue(device.name, "acme", plane.plane.clock() - 700)
    assert (await device.wake()).code == "token_expired"
    device.token = plane.plane.key.issue("unknown", "acme", plane.plane.clock())
    assert (await device.wake()).code == "device_unknown"
