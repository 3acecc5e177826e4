"""Records and labels of devices at the control plane: kept within bounds, by cohort, and never of private requests."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import select

from causeway_server.fleet.server.plane import ControlPlane
from causeway_server.fleet.store.devices import forget_device
from causeway_server.fleet.store.generations import CohortPace, advance, revoke, revoke_owner
from causeway_server.fleet.store.records import (
    KEPT,
    StoredRecord,
    add_records,
    cohort_figures,
    forget_old_records,
    read_labels,
    read_records,
)
from causeway_server.fleet.store.tables import records as rows
from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S, MAX_RECORDS, SampledRecord, Telemetry
from causeway_server.router.types import Confidence, DecisionRecord
from tests.fleet.cli.test_replay import records

from .conftest import Plane
from .device import Answered, Device, sample

pytestmark = pytest.mark.slow
BUNDLE = "b" * 64


def raw(*found: DecisionRecord, weight: float = 2.0) -> tuple[SampledRecord, ...]:
    return tuple(SampledRecord(weight=weight, record=msgspec.Raw(msgspec.json.encode(one))) for one in found)


async def take_records(plane: Plane, per_hour: float = 60.0) -> None:
    async with plane.plane.store.write() as connection:
        await advance(connection, "everyone", CohortPace(records_per_hour=per_hour))
    await plane.plane.wakes.refresh()


async def send(device: Device, *sent: SampledRecord, seq: int = 1, **fields: object) -> Answered:
    samples = (msgspec.structs.replace(sample(BUNDLE), **fields),)
    message = Telemetry(device=device.name, boot="boot-1", seq=seq, samples=samples, records=sent)
    return await device.post("/v1/telemetry", message)


async def stored(plane: ControlPlane) -> list[StoredRecord]:
    async with plane.store.read() as connection:
        return await read_records(connection, "everyone")


async def test_records_arrive_once_and_a_reply_says_how_many(plane: Plane) -> None:
    """A repeated message counts nothing again; a device of a cohort that takes none is told so, and is not heard."""
    device = await plane.enrolled("till-1")
    assert (await device.report()).body["records_per_hour"] == 0.0
    assert (await send(device, *raw(*records(1, private=0)))).status == 204
    assert await stored(plane.plane) == []
    await take_records(plane)
    assert (await device.report()).body["records_per_hour"] == 60.0
    for _ in range(2):
        assert (await send(device, *raw(*records(2, private=0)), seq=2)).status == 204
    found = await stored(plane.plane)
    assert [(one.device, one.weight, one.record.id) for one in found] == [("till-1", 2.0, "d1"), ("till-1", 2.0, "d0")]


async def test_private_and_unreadable_records_are_left_out(plane: Plane) -> None:
    """A wrong or newer device loses that record, not its counts."""
    await take_records(plane)
    device = await plane.enrolled("till-1")
    newer = SampledRecord(weight=1.0, record=msgspec.Raw(b'{"id":"x","created":"later"}'))
    assert (await send(device, newer, *raw(*records(3, private=2)), private=2)).status == 204
    assert [one.record.id for one in await stored(plane.plane)] == ["d2"]
    async with plane.plane.store.read() as connection:
        assert await read_labels(connection, "everyone") == []
        assert (await cohort_figures(connection, 0.0))["everyone"].records == 1


def strange(number: int, *, prompts: int = 0, score: float = 0.5, usd: float = 0.0) -> DecisionRecord:
    (one,) = records(1, private=0, first=number)
    replace = msgspec.structs.replace
    attempts = [replace(attempt, confidence=Confidence(8, score, -0.1, 0.5, 0.5)) for attempt in one.outcome.attempts]
    request = replace(one.request, prompts=prompts)
    return replace(one, request=request, outcome=replace(one.outcome, attempts=tuple(attempts), usd=usd))


async def test_records_beyond_what_a_replay_can_judge_are_left_out(plane: Plane) -> None:
    """Numbers of no request, and bytes that are no text, cost neither the others nor the device's counts."""
    await take_records(plane)
    device = await plane.enrolled("till-1")
    sent = raw(strange(0, prompts=2**62), strange(1, score=1e308), strange(2, usd=1e306), strange(3))
    no_text = msgspec.json.encode(strange(4)).replace(b'{"id"', b'{"new":"\xff","id"', 1)
    assert (await send(device, *sent, SampledRecord(weight=1.0, record=msgspec.Raw(no_text)))).status == 204
    found = [one.record.id for one in await stored(plane.plane)]
    assert "d3" in found
    assert {*found} <= {"d3", "d4"}


@pytest.mark.parametrize("weight", [0.0, -1.0, float(1 << 31)])
async def test_a_weight_beyond_its_bounds_is_refused(plane: Plane, weight: float) -> None:
    await take_records(plane)
    device = await plane.enrolled("till-1")
    answer = await send(device, *raw(*records(1, private=0), weight=weight))
    assert answer.status == 400
    assert (await send(device, *raw(*records(MAX_RECORDS + 1, private=0)))).status in (400, 413)


async def test_a_device_displaces_only_its_own(plane: Plane) -> None:
    first, other = await plane.enrolled("till-1"), await plane.enrolled("till-2")
    async with plane.plane.store.write() as connection:
        pairs = [(name.name, one) for name in (other, first) for one in raw(*records(KEPT + 20, private=0))]
        await add_records(connection, [*pairs[: KEPT + 20][:5], *pairs[KEPT + 20 :]], 1000.0)
    held = [one.device for one in await stored(plane.plane)]
    assert (held.count("till-1"), held.count("till-2")) == (KEPT, 5)
    async with plane.plane.store.write() as connection:
        await revoke_owner(connection, "another/till-2", 1000.0)
        assert await revoke(connection, "till-1", 1000.0)
        assert set(await connection.scalars(select(rows.c.device))) == {"till-2"}
    assert len(await stored(plane.plane)) == 5
    async with plane.plane.store.write() as connection:
        await forget_device(connection, "till-2")
    assert await stored(plane.plane) == []


async def test_old_records_are_deleted(plane: Plane) -> None:
    await plane.enrolled("till-1")
    async with plane.plane.store.write() as connection:
        for number, at in enumerate((0.0, 86400.0)):
            await add_records(connection, [("till-1", one) for one in raw(*records(1, private=0, first=number))], at)
        await forget_old_records(connection, 7.5 * 86400.0)
    assert [one.record.id for one in await stored(plane.plane)] == ["d1"]


async def test_requests_of_earlier_versions_are_in_no_share(plane: Plane) -> None:
    """Their samples lack `on_device`; without any that has it, there is no share and no cost."""
    device = await plane.enrolled("till-1")
    await device.report(running=BUNDLE)
    for seq, fields, shown in (
        (1, {"requests": 1000}, (1000, None, None)),
        (2, {"requests": 100, "on_device": 80, "micro_usd": 5000}, (1100, 0.8, 0.05)),
    ):
        assert (await send(device, seq=seq, **fields)).status == 204
        async with plane.plane.store.read() as connection:
            found = (await cohort_figures(connection, 0.0))["everyone"]
        assert (found.requests, found.on_device, found.usd) == shown


async def test_a_cohort_has_figures_of_what_its_devices_run(plane: Plane) -> None:
    """Requests under an earlier bundle are left out; labels add up by cell."""
    await take_records(plane)
    device = await plane.enrolled("till-1")
    await device.report(running=BUNDLE, temperature_c=71.5, drift=0.04)
    latency = (90, *(0 for _ in LATENCY_BOUNDS_S[1:]), 10)
    for seq in (1, 2):
        labels = {3: (2, 1, 1, 0)}
        await send(
            device, seq=seq, requests=100, on_device=80, micro_usd=5000, latency=latency, labels=labels, private=1
        )
    await send(device, seq=3, bundle=None, requests=7)
    async with plane.plane.store.read() as connection:
        found = (await cohort_figures(connection, 0.0))["everyone"]
        (row,) = await read_labels(connection, "everyone")
    assert (found.requests, found.on_device, found.usd, found.p95_s) == (200, 0.8, 0.05, None)
    assert (found.hottest_c, found.drift) == (71.5, 0.04)
    assert (row.cell, row.good, row.bad, row.own_good, row.own_bad) == (3, 4, 2, 2, 0)
