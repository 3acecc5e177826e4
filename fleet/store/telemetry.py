"""Cumulative counters of requests by device and bundle, one row each: the table does not grow with time, and a look,
which uses their increase since the previous look, costs the same after a minute and after a day.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import String, and_, delete, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.router.bundle.protocol import TelemetrySample

from .database import insert_of
from .tables import COUNTERS, LATENCY_COLUMNS, devices, telemetry, telemetry_marks

_FORGET_S = 90 * 86400.0


Counts = Mapping[tuple[str, str], Sequence[int]]
"""The counters: (device, bundle or "") → a number for each of `tables.COUNTERS`."""


async def add_samples(connection: AsyncConnection, samples: Iterable[tuple[str, TelemetrySample]], now: float) -> None:
    """Add (device, sample) pairs to the counters. The caller must count each sample only once."""
    sums: dict[tuple[str, str], list[int]] = {}
    for device, sample in samples:
        measured = 0 if sample.on_device is None else sample.requests
        own = {"on_device": sample.on_device or 0, "measured": measured}
        names = [name for name in COUNTERS if name not in LATENCY_COLUMNS]
        counts = [own[name] if name in own else getattr(sample, name) for name in names] + [*sample.latency]
        key = (device, sample.bundle or "")
        sums[key] = [a + b for a, b in zip(sums[key], counts, strict=True)] if key in sums else counts
    if not sums:
        return
    rows = [
        {"device": device, "bundle": bundle, "last_seen": now, **dict(zip(COUNTERS, counts, strict=True))}
        for (device, bundle), counts in sorted(sums.items())
    ]
    adding = insert_of(connection, telemetry)
    grown: dict[str, Any] = {name: telemetry.c[name] + adding.excluded[name] for name in COUNTERS}
    grown["last_seen"] = adding.excluded.last_seen
    await connection.execute(adding.on_conflict_do_update(index_elements=["device", "bundle"], set_=grown), rows)


async def since_mark(connection: AsyncConnection, rollout: str, cohort: str) -> Counts:
    """Return the counts of a cohort's devices, unrevoked, since the rollout's mark; all without a mark."""
    marks = telemetry_marks
    same = and_(marks.c.rollout == rollout, marks.c.device == telemetry.c.device, marks.c.bundle == telemetry.c.bundle)
    columns = [telemetry.c.device, telemetry.c.bundle]
    columns += [telemetry.c[name] for name in COUNTERS]
    columns += [marks.c[name] for name in COUNTERS]
    chosen = (
        select(*columns)
        .join(devices, devices.c.id == telemetry.c.device)
        .outerjoin(marks, same)
        .where(devices.c.cohort == cohort, devices.c.revoked.is_(None))
        .order_by(telemetry.c.device, telemetry.c.bundle)
    )
    width, found = 2 + len(COUNTERS), {}
    for row in await connection.execute(chosen):
        found[row[0], row[1]] = [now - (before or 0) for now, before in zip(row[2:width], row[width:], strict=True)]
    return found


async def mark(connection: AsyncConnection, rollout: str, cohort: str) -> None:
    """Set the rollout's mark, from which the next look counts, in the transaction of the present look."""
    await forget_mark(connection, rollout)
    columns = ("device", "bundle", *COUNTERS)
    now = (
        select(literal(rollout, String), *(telemetry.c[name] for name in columns))
        .join(devices, devices.c.id == telemetry.c.device)
        .where(devices.c.cohort == cohort)
    )
    await connection.execute(insert(telemetry_marks).from_select(["rollout", *columns], now))


async def forget_mark(connection: AsyncConnection, rollout: str) -> None:
    """Drop the mark of a rollout that has ended."""
    await connection.execute(delete(telemetry_marks).where(telemetry_marks.c.rollout == rollout))


async def forget_old_counters(connection: AsyncConnection, now: float) -> None:
    """Drop counters that have not grown for 90 days, because their bundles are no longer running."""
    await connection.execute(delete(telemetry).where(telemetry.c.last_seen < now - _FORGET_S))
