"""The audit log and the events of a device, which people read.

The log is a hash chain: each row's hash covers the previous row, so changed or removed rows are detected, a removed end
only by a hash that was noted elsewhere. Commands import this module: without SQLAlchemy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

FIRST = "0" * 64
"""The value `previous` of the first row."""


class CohortFigures(msgspec.Struct, frozen=True):
    """The figures of a cohort, of all requests of its devices under the bundles that they run.

    Attributes:
        on_device: Share of the requests that were answered without the cloud, 0 to 1; None if no device measured it.
        usd: Cost per 1,000 requests in US dollars; None if no device measured it.
        p95_s: Upper bound of the 95th percentile of latency in seconds; None if it is above the last bucket.
        hottest_c: Temperature of the hottest device; None if no device reads one.
        drift: Largest drift of calibrated signals; None if no device measures it.
        records: Number of records for a replay.
        recorded_devices: Number of devices that sent them.
    """

    requests: int = 0
    on_device: float | None = None
    usd: float | None = None
    p95_s: float | None = None
    hottest_c: float | None = None
    drift: float | None = None
    records: int = 0
    recorded_devices: int = 0


class Happened(msgspec.Struct, frozen=True):
    """A predicted figure under a new bundle, its interval for the devices and requests seen, and what was observed.

    Attributes:
        name: `on_device` or `quality`, which are shares, or `usd`: the cost per 1,000 requests.
        value: None while too little was observed; the interval is then that of all devices.
    """

    name: str
    low: float
    high: float
    value: float | None = None


class AuditRow(msgspec.Struct, frozen=True):
    """A row of the audit log: a change. `at`: unix seconds. `what`: JSON, hashed as it is written."""

    n: int
    at: float
    actor: str
    action: str
    what: msgspec.Raw
    previous: str
    hash: str


def next_row(last: AuditRow | None, at: float, actor: str, action: str, what: object) -> AuditRow:
    """Return the row that follows `last` (None: the log is empty).

    Args:
        at: Unix seconds.
        actor: An operator, or `controller`.
        action: The name of the change, such as `rollout.pause`.
        what: The details, encoded as JSON with sorted keys.
    """
    n, previous = (1, FIRST) if last is None else (last.n + 1, last.hash)
    text = msgspec.Raw(msgspec.json.encode(what, order="deterministic"))
    return AuditRow(n, at, actor, action, text, previous, _hash(n, at, actor, action, text, previous))


def first_fault(rows: Iterable[AuditRow], after: AuditRow | None = None) -> str:
    """Return the fault of the first row that does not fit the chain from `after` on (None: the beginning), or "".

    `rows`: in order, without gaps.
    """
    n, previous = (1, FIRST) if after is None else (after.n + 1, after.hash)
    for row in rows:
        if row.n != n:
            return f"row {n} is missing: row {row.n} follows"
        if row.previous != previous:
            return f"row {row.n} does not follow the row before it: one of them was replaced"
        if row.hash != _hash(row.n, row.at, row.actor, row.action, row.what, row.previous):
            return f"row {row.n} was changed: its hash does not fit its content"
        n, previous = row.n + 1, row.hash
    return ""


def _hash(n: int, at: float, actor: str, action: str, what: msgspec.Raw, previous: str) -> str:
    covered = (n, at, actor, action, bytes(what).decode(), previous)
    return hashlib.sha256(msgspec.json.encode(covered)).hexdigest()


class DeviceEvent(msgspec.Struct, frozen=True):
    """An event of a device: a change of its state, its bundle or its code."""

    at: float
    state: str
    running: str | None
    wanted: str | None
    rollout: str
    code: str
    reason: str
