"""Signed messages: which are accepted, and each refusal with its code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from causeway_server.fleet.rollout.settings import MaintenanceWindow
from causeway_server.fleet.server.tokens import ReportKeys
from causeway_server.fleet.store.devices import Device as StoredDevice
from causeway_server.fleet.store.devices import cohort_devices, device_history, page_of_devices, read_device
from causeway_server.fleet.store.generations import CohortPace, advance, revoke
from causeway_server.fleet.store.telemetry import mark, since_mark
from causeway_server.router.bundle.protocol import (
    MAC_HEADER,
    MAX_MESSAGE_BYTES,
    SIGNATURE_HEADER,
    DeviceState,
    ReportKey,
    TokenRequest,
    mac_header,
    signed_bytes,
)

from .conftest import Plane
from .device import Answered, Device, sample

pytestmark = pytest.mark.slow
OLD, NEW = "a" * 64, "b" * 64
ALWAYS = tuple(range(1, 8))


def refused(answer: Answered, status: int, code: str) -> bool:
    return (answer.status, answer.code) == (status, code)


async def row(plane: Plane, device: Device) -> StoredDevice:
    async with plane.plane.store.read() as connection:
        stored = await read_device(connection, device.name)
    assert stored is not None
    return stored


async def set_pace(plane: Plane, pace: CohortPace) -> None:
    async with plane.plane.store.write() as connection:
        await advance(connection, "everyone", pace)
    await plane.plane.wakes.refresh()


async def test_a_report_is_what_operators_see(plane: Plane) -> None:
    device = await plane.enrolled("till-1")
    await device.report(running=OLD)
    since = (await row(plane, device)).running_since
    await device.report(
        running=OLD, wanted=NEW, state=DeviceState.TRIAL, rollout="r1", quarantined=(OLD,), daemon="1.2.3"
    )
    await device.report(
        running=OLD, wanted=NEW, state=DeviceState.ROLLBACK, rollout="r1", code="slow", reason="p95 doubled"
    )
    stored = await row(plane, device)
    assert (stored.state, stored.code, stored.reason, stored.rollout) == ("rollback", "slow", "p95 doubled", "r1")
    assert stored.running_since == since
    async with plane.plane.store.read() as connection:
        events = await device_history(connection, "till-1")
        assert [event.state for event in events] == ["rollback", "trial", "idle"]
        assert [one.id for one in await page_of_devices(connection, state="rollback", query="TILL")] == ["till-1"]
        assert await page_of_devices(connection, state="revoked") == []


async def test_a_replayed_report_is_refused(plane: Plane) -> None:
    """The same bytes again, an older `seq`, and one of an earlier boot: none changes anything."""
    device = await plane.enrolled()
    first, second = device.status(), device.status(running=NEW)
    assert (await device.post("/v1/status", first)).status == 200
    assert (await device.post("/v1/status", second)).status == 200
    assert refused(await device.post("/v1/status", second), 409, "status_replayed")
    assert refused(await device.post("/v1/status", first), 409, "status_replayed")
    device.boot = "boot-2"
    assert (await device.report(running=OLD)).status == 200
    assert refused(await device.post("/v1/status", second), 409, "status_replayed")
    stored = await row(plane, device)
    assert (stored.running, stored.cloned) == (OLD, False)


async def test_a_report_for_another_device_is_refused(plane: Plane) -> None:
    """By its token, and without one by its signature."""
    device, other = await plane.enrolled("till-1"), await plane.enrolled("till-2")
    foreign = other.status(device="till-1", running=NEW)
    with_token = {"authorization": f"Bearer {other.token}"}
    assert refused(await other.post("/v1/status", foreign, with_token), 403, "foreign_device")
    assert refused(await other.post("/v1/status", foreign), 401, "signature_invalid")
    assert (await row(plane, device)).running is None


@pytest.mark.parametrize("name", [SIGNATURE_HEADER, MAC_HEADER])
async def test_a_message_has_one_signature(plane: Plane, name: str) -> None:
    device = await plane.enrolled()
    body = msgspec.json.encode(device.status())
    twice = [(name, device.sign(signed_bytes("/v1/status", body))), (name, "another")]
    assert refused(await device.send("POST", "/v1/status", body, twice), 400, "invalid_value")


async def test_a_signature_covers_path_and_body(plane: Plane) -> None:
    device = await plane.enrolled()
    body = b'{"device":"%s","boot":"b","nonce":"n","sent":%d}' % (device.name.encode(), time.time())
    elsewhere = {SIGNATURE_HEADER: device.sign(b"/v1/status\n" + body)}
    assert refused(await device.send("POST", "/v1/token", body, elsewhere), 401, "signature_invalid")
    assert refused(await device.send("POST", "/v1/token", body), 401, "signature_invalid")
    right = {SIGNATURE_HEADER: device.sign(b"/v1/token\n" + body)}
    assert refused(await device.send("POST", "/v1/token", body + b" ", right), 401, "signature_invalid")


async def test_a_report_may_be_signed_or_have_a_mac(plane: Plane) -> None:
    """A token request has to be signed: a report key must not bring another one."""
    device = await plane.enrolled()
    assert device.report_key is not None
    body = msgspec.json.encode(TokenRequest(device=device.name, boot="b", nonce="n", sent=time.time() + 1))
    with_mac = {MAC_HEADER: mac_header(device.report_key, "/v1/token", body)}
    assert refused(await device.send("POST", "/v1/token", body, with_mac), 401, "signature_invalid")
    assert (await device.report(running=OLD)).status == 200
    device.report_key = None
    assert (await device.report(running=NEW)).status == 200
    assert (await device.count(sample(NEW))).status == 204


async def test_a_mac_that_is_not_the_devices_is_refused(plane: Plane) -> None:
    """Of another device, another path, another body, a later time, an older token, another server; and garbage."""
    device, other = await plane.enrolled("till-1"), await plane.enrolled("till-2")
    key, body, now = device.report_key, msgspec.json.encode(device.status(running=NEW)), plane.plane.clock()
    assert key is not None
    assert other.report_key is not None
    ended = plane.plane.key.report_keys.issue(device.name, now - 31.0)
    elsewhere = ReportKeys(Ed25519PrivateKey.generate()).issue(device.name, now + 600.0)
    later = ReportKey(id=str(int(key.id) + 600), key=key.key)
    right = mac_header(key, "/v1/status", body)
    wrong = {
        mac_header(other.report_key, "/v1/status", body): "signature_invalid",
        mac_header(key, "/v1/telemetry", body): "signature_invalid",
        mac_header(key, "/v1/status", body + b" "): "signature_invalid",
        mac_header(later, "/v1/status", body): "signature_invalid",
        mac_header(ended, "/v1/status", body): "token_expired",
        mac_header(elsewhere, "/v1/status", body): "signature_invalid",
        right[:-1]: "signature_invalid",
        "é." + right: "signature_invalid",
        ".": "signature_invalid",
    }
    for mac, code in wrong.items():
        assert refused(await device.send("POST", "/v1/status", body, {MAC_HEADER: mac}), 401, code), mac
    with_token = {MAC_HEADER: mac_header(other.report_key, "/v1/status", body)}
    with_token["authorization"] = f"Bearer {other.token}"
    assert refused(await other.send("POST", "/v1/status", body, with_token), 403, "foreign_device")
    assert (await device.send("POST", "/v1/status", body, {MAC_HEADER: right})).status == 200


async def test_an_unknown_device_is_refused(plane: Plane) -> None:
    assert refused(await plane.device("unknown").report(), 401, "device_unknown")


async def test_a_revoked_device_is_refused_everywhere(plane: Plane) -> None:
    device = await plane.enrolled()
    async with plane.plane.store.write() as connection:
        await revoke(connection, device.name, time.time())
    for answer in (await device.report(), await device.count(sample()), await device.ask_token(), await device.wake()):
        assert refused(answer, 403, "device_revoked")
    await plane.plane.wakes.refresh()
    listed = await device.send("GET", "/v1/revocations")
    assert list(listed.body["devices"]) == [f"acme/{device.name}"]
    unchanged = await device.send("GET", "/v1/revocations", headers={"if-none-match": listed.headers["etag"]})
    assert unchanged.status == 304


async def test_a_token_request_is_answered_once(plane: Plane) -> None:
    device = await plane.enrolled()
    request = TokenRequest(device=device.name, boot="b", nonce="n", sent=time.time() + 1)
    assert (await device.post("/v1/token", request)).status == 200
    assert refused(await device.post("/v1/token", request), 409, "token_request_replayed")


@pytest.mark.parametrize("off_s", [-4000 * 86400.0, -301.0, 301.0, 40 * 86400.0, float("nan")])
async def test_a_device_with_a_wrong_clock_learns_the_time(plane: Plane, off_s: float) -> None:
    """Its token request is refused with a `Date`; its reports, which need no clock, are taken."""
    device = await plane.enrolled()
    if off_s != off_s:
        request = b'{"device":"%s","boot":"b","nonce":"n","sent":NaN}' % device.name.encode()
        signed = {SIGNATURE_HEADER: device.sign(b"/v1/token\n" + request)}
        assert refused(await device.send("POST", "/v1/token", request, signed), 400, "invalid_json")
        return
    answer = await device.ask_token(sent=time.time() + off_s)
    assert refused(answer, 401, "request_stale")
    assert "date" in answer.headers
    assert (await device.report(sent=time.time() + off_s)).status == 200


async def test_a_body_that_is_too_large_is_refused(plane: Plane) -> None:
    """With its length in the head, and in chunks without one."""
    device = await plane.enrolled()
    body = b" " * (MAX_MESSAGE_BYTES + 1)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * 1024

    assert refused(await device.send("POST", "/v1/status", body), 413, "body_too_large")
    assert refused(await device.send("POST", "/v1/status", chunks()), 413, "body_too_large")
    assert (await device.report()).status == 200


async def test_two_devices_with_one_identity_are_seen(plane: Plane) -> None:
    """A restart is no clone; a boot id that comes back is one."""
    device = await plane.enrolled()
    for boot in ("boot-1", "boot-2", "boot-3"):
        device.boot = boot
        assert (await device.report()).body["cloned"] is False
    device.boot = "boot-2"
    assert (await device.report()).body["cloned"] is True
    async with plane.plane.store.read() as connection:
        assert [one.id for one in await page_of_devices(connection, state="cloned")] == [device.name]


async def test_telemetry_is_counted_once(plane: Plane) -> None:
    """Repeated, in one group or later, and after a restart of the device."""
    device = await plane.enrolled("till-1")
    seven = [device.count(sample(NEW), sample(None, requests=5), seq=7) for _ in range(5)]
    assert {answer.status for answer in await asyncio.gather(*seven)} == {204}
    assert (await device.count(sample(NEW), seq=6)).status == 204  # older than what was counted
    await device.count(sample(NEW), seq=8)
    await device.count(sample(NEW), seq=1, boot="boot-2")
    async with plane.plane.store.write() as connection:
        counts = await since_mark(connection, "r1", "everyone")
        assert counts == {
            ("till-1", ""): [5, 1, 2, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0],
            ("till-1", NEW): [30, 3, 6, 0, 0, 0, 0, 0, 30, 0, 0, 0, 0, 0, 0, 0, 0],
        }
        await mark(connection, "r1", "everyone")
    await device.count(sample(NEW, requests=4), seq=9)
    async with plane.plane.store.read() as connection:
        counts = await since_mark(connection, "r1", "everyone")
    assert {key: requests for key, (requests, *_) in counts.items()} == {("till-1", ""): 0, ("till-1", NEW): 4}


async def test_many_devices_report_in_few_transactions(plane: Plane) -> None:
    """One invalid message among them is refused alone."""
    devices = [await plane.enrolled() for _ in range(20)]
    before = plane.plane.messages.transactions
    stranger = plane.device("unknown")
    answers = await asyncio.gather(*(device.report(running=NEW) for device in devices * 10), stranger.report())
    assert [answer.code for answer in answers] == [""] * 200 + ["device_unknown"]
    assert plane.plane.messages.transactions - before < 100
    async with plane.plane.store.read() as connection:
        assert {stored.running for stored in await cohort_devices(connection, "everyone")} == {NEW}


async def test_devices_change_in_their_maintenance_window(plane: Plane) -> None:
    """By the device's own clock; a revert waits for no window."""
    night = MaintenanceWindow(frozenset(ALWAYS), opens=120, closes=240)
    await set_pace(plane, CohortPace((night,)))
    device = await plane.enrolled()
    assert (await device.report(wanted=NEW, local_minute=600)).body["may_change"] is False
    assert (await device.report(wanted=NEW, local_minute=130)).body["may_change"] is True
    assert (await device.report(wanted=NEW, local_minute=600, state=DeviceState.TRIAL)).body["may_change"] is True
    await set_pace(plane, CohortPace((night,), reverting=True))
    assert (await device.report(wanted=NEW, local_minute=600)).body["may_change"] is True


async def test_so_many_devices_of_a_site_change_at_once(plane: Plane) -> None:
    """Reports that arrive together too; a device of another site does not wait."""
    await set_pace(plane, CohortPace(per_site=2))
    devices = [await plane.enrolled(site="north") for _ in range(5)]
    other = await plane.enrolled(site="south")
    answers = await asyncio.gather(*(device.report(wanted=NEW) for device in devices))
    allowed = [device for device, answer in zip(devices, answers, strict=True) if answer.body["may_change"]]
    waiting = [device for device in devices if device not in allowed]
    assert len(allowed) == 2
    assert (await other.report(wanted=NEW)).body["may_change"] is True
    for device in allowed:
        assert (await device.report(wanted=NEW, state=DeviceState.ACTIVATE)).body["may_change"] is True
    assert (await waiting[0].report(wanted=NEW)).body["may_change"] is False
    assert (await allowed[0].report(running=NEW)).status == 200
    assert (await waiting[0].report(wanted=NEW)).body["may_change"] is True
    assert (await waiting[1].report(wanted=NEW)).body["may_change"] is False
