"""Devices at the control plane: from the join token to accepted reports."""

from __future__ import annotations

import pytest

from causeway_server.fleet.store.generations import advance

from .conftest import Plane

pytestmark = pytest.mark.slow


async def test_a_device_enrols_reports_and_is_woken(plane: Plane) -> None:
    device = plane.device("till-7")
    enrolment = await device.enrol(await plane.join_token(role="kiosk"), labels={"role": "desk", "floor": "2"})
    assert enrolment.body == {
        "device": "till-7",
        "tenant": "acme",
        "cohort": "kiosk",  # a label of the join token wins
        "fleet": "stores",
        "root": '{"signed":"1.root.json"}',
    }
    issued = await device.ask_token()
    assert (issued.body["expires_in_s"], issued.body["cohort"]) == (600.0, "kiosk")
    reply = await device.report()
    assert (reply.body["may_change"], reply.body["cloned"]) == (True, False)
    etag = (await device.wake()).headers["etag"]
    assert (await device.wake(etag)).status == 304
    async with plane.plane.store.write() as connection:
        await advance(connection, "kiosk")
    woken = await device.wake(etag, wait_s=30)
    assert (woken.status, woken.body["cohort"]) == (200, "kiosk")
    assert woken.headers["etag"] != etag
