"""The devices' records and labels, from which a replay predicts, and the figures of each cohort.

A device's rows are bounded, so that it can displace only its own, and old rows are deleted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import msgspec
from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S, SampledRecord, TelemetrySample
from causeway_server.router.types import DecisionRecord

from .database import insert_of
from .history import CohortFigures
from .tables import COUNTERS, LABELS, devices, labels, records, telemetry

KEPT = 500
"""Maximum number of records of a device."""
MOST_READ = 10_000
_FORGET_S = 7 * 86400.0
_MOST, _MOST_TOKENS, _MOST_USD = 4096, 10**9, 1e6  # prompts, choices and parts of a request; its tokens; its cost
_decoder = msgspec.json.Decoder(DecisionRecord)


class StoredRecord(msgspec.Struct, frozen=True):
    """A device's record. `weight`: the number of requests that it stands for."""

    device: str
    weight: float
    record: DecisionRecord


class LabelRow(msgspec.Struct, frozen=True):
    """Labelled answers of a device under a bundle ("": the factory's files) in a cell of confidence."""

    device: str
    bundle: str
    cell: int
    good: int
    bad: int
    own_good: int
    own_bad: int


async def add_records(connection: AsyncConnection, sent: Iterable[tuple[str, SampledRecord]], now: float) -> None:
    """Store (device, record) pairs that this version can read and that are not private; drop the device's oldest."""
    rows = [
        {"device": device, "arrived": now, "weight": sample.weight, "record_json": msgspec.json.encode(record).decode()}
        for device, sample in sent
        if (record := _decode(sample.record)) is not None and _is_usable(record)
    ]
    if not rows:
        return
    await connection.execute(insert(records), rows)
    newest_first = func.row_number().over(partition_by=records.c.device, order_by=records.c.n.desc())
    senders = {row["device"] for row in rows}
    numbered = select(records.c.n, newest_first.label("place")).where(records.c.device.in_(senders)).subquery()
    over = select(numbered.c.n).where(numbered.c.place > KEPT)
    await connection.execute(delete(records).where(records.c.n.in_(over)))


async def add_labels(connection: AsyncConnection, samples: Iterable[tuple[str, TelemetrySample]], now: float) -> None:
    """Add the labels of (device, sample) pairs. The caller must count each sample only once."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for device, sample in samples:
        for cell, counts in sample.labels.items():
            key = (device, sample.bundle or "", cell)
            sums[key] = [a + b for a, b in zip(sums.get(key, [0] * len(LABELS)), counts, strict=True)]
    if not sums:
        return
    rows = [
        {"device": device, "bundle": bundle, "cell": cell, "last_seen": now, **dict(zip(LABELS, counts, strict=True))}
        for (device, bundle, cell), counts in sorted(sums.items())
    ]
    adding = insert_of(connection, labels)
    grown: dict[str, Any] = {name: labels.c[name] + adding.excluded[name] for name in LABELS}
    grown["last_seen"] = adding.excluded.last_seen
    await connection.execute(
        adding.on_conflict_do_update(index_elements=["device", "bundle", "cell"], set_=grown), rows
    )


def _of_cohort(table: Any, cohort: str) -> Any:
    trusted = devices.c.revoked.is_(None) & devices.c.cloned.is_(False)
    return (devices.c.id == table.c.device) & (devices.c.cohort == cohort) & trusted


async def read_records(connection: AsyncConnection, cohort: str) -> list[StoredRecord]:
    """Return the newest records of a cohort, at most `MOST_READ`, of devices that are neither revoked nor cloned."""
    chosen = select(records.c.device, records.c.weight, records.c.record_json).join(
        devices, _of_cohort(records, cohort)
    )
    rows = await connection.execute(chosen.order_by(records.c.n.desc()).limit(MOST_READ))
    found = [(row.device, row.weight, _decode(row.record_json)) for row in rows]
    return [StoredRecord(device, weight, record) for device, weight, record in found if record is not None]


async def read_labels(connection: AsyncConnection, cohort: str) -> list[LabelRow]:
    """Return the labels of a cohort, of devices that are neither revoked nor cloned."""
    columns = [labels.c[name] for name in LabelRow.__struct_fields__]
    rows = await connection.execute(select(*columns).join(devices, _of_cohort(labels, cohort)))
    return [LabelRow(*row) for row in rows]


async def cohort_figures(connection: AsyncConnection, since: float) -> Mapping[str, CohortFigures]:
    """Return the figures by cohort. `since`: the oldest report whose temperature and drift count, Unix s."""
    present = devices.c.revoked.is_(None)
    running = (devices.c.id == telemetry.c.device) & (func.coalesce(devices.c.running, "") == telemetry.c.bundle)
    sums = select(devices.c.cohort, *(func.sum(telemetry.c[name]) for name in COUNTERS)).join(telemetry, running)
    counts = {row[0]: [int(value) for value in row[1:]] for row in await _by_cohort(connection, sums.where(present))}
    worst = select(devices.c.cohort, func.max(devices.c.temperature_c), func.max(devices.c.drift))
    gauges = {
        row[0]: row[1:] for row in await _by_cohort(connection, worst.where(present, devices.c.last_seen >= since))
    }
    held = select(devices.c.cohort, func.count(), func.count(records.c.device.distinct()))
    held = held.join(records, devices.c.id == records.c.device).where(present)
    sent = {row[0]: row[1:] for row in await _by_cohort(connection, held)}
    return {
        cohort: _figures(counts.get(cohort), gauges.get(cohort, (None, None)), sent.get(cohort, (0, 0)))
        for cohort in counts.keys() | gauges.keys() | sent.keys()
    }


async def forget_old_records(connection: AsyncConnection, now: float) -> None:
    """Delete records after seven days, and labels after 90 days without another one."""
    await connection.execute(delete(records).where(records.c.arrived < now - _FORGET_S))
    await connection.execute(delete(labels).where(labels.c.last_seen < now - 90 * 86400.0))


async def _by_cohort(connection: AsyncConnection, chosen: Any) -> Any:
    return await connection.execute(chosen.group_by(devices.c.cohort))


def _figures(counts: list[int] | None, gauges: Any, sent: Any) -> CohortFigures:
    found = dict(zip(COUNTERS, counts or [0] * len(COUNTERS), strict=True))
    requests, measured, latency = (
        found["requests"],
        found["measured"],
        [found[name] for name in COUNTERS if name.startswith("latency_")],
    )
    share = usd = p95_s = None
    if measured:
        share, usd = found["on_device"] / measured, found["micro_usd"] / measured / 1000.0
    if requests:
        bucket = bisect_left(list(accumulate(latency)), 0.95 * sum(latency))
        p95_s = LATENCY_BOUNDS_S[bucket] if bucket < len(LATENCY_BOUNDS_S) else None
    return CohortFigures(requests, share, usd, p95_s, *gauges, *sent)


def _decode(text: str | msgspec.Raw) -> DecisionRecord | None:
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _is_usable(record: DecisionRecord) -> bool:
    """Return whether a record is one that devices send, and in the bounds within which it can be replayed."""
    request, decision, outcome = record.request, record.decision, record.outcome
    if decision is None or decision.private or decision.on_device or decision.regions is not None:
        return False
    scores = [one.confidence.score for one in outcome.attempts if one.confidence is not None]
    return (
        0 <= request.prompts <= _MOST
        and 0 <= request.n <= _MOST
        and len(request.modalities) <= _MOST
        and 0.0 <= outcome.usd <= _MOST_USD
        and max(outcome.usage.prompt_tokens, outcome.usage.completion_tokens) <= _MOST_TOKENS
        and all(0.0 <= score <= 1.0 for score in scores)
    )
