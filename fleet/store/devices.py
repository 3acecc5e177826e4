"""Devices as rows: their reports, operators' decisions, and their history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Dialect, Insert, Select, Update, bindparam, case, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.router.bundle.protocol import DeviceState, SignedOrder

from .database import among, as_list, one_of
from .history import DeviceEvent
from .tables import device_events, devices, labels, records, telemetry, telemetry_marks

T = TypeVar("T")
CHANGING = (DeviceState.STAGE, DeviceState.ACTIVATE, DeviceState.TRIAL, DeviceState.ROLLBACK)
"""The states between the first effect of a change and its commit."""
GRANT_S = 120.0
"""The time for which a device with permission counts as changing before it reports a change, in seconds."""
EVENTS_KEPT = 100
_COUNT_EVENTS_S = 30 * 86400.0


class Erasure(msgspec.Struct, frozen=True):
    """The last order to erase what a device stores. `finished`: when its receipt came, Unix s; 0: not yet."""

    id: str
    client: str
    ordered: float
    signed: SignedOrder
    finished: float = 0.0
    receipt: str = ""


class Device(msgspec.Struct, frozen=True):
    """A device's row. Times are unix seconds by the control plane's clock; 0: never."""

    id: str
    tenant: str
    cohort: str
    public_key: str = ""  # the Ed25519 key, base64url
    join_token: str = ""  # the hash of the token that it enrolled with
    labels_json: str = "{}"
    site: str = ""  # the site; "": a site of its own
    enrolled: float = 0.0
    revoked: float | None = None  # the time of its revocation; None if it is not revoked
    held: bool = False  # whether it keeps the bundle that it runs
    pin: str | None = None  # the bundle that it runs regardless of rollouts
    last_seen: float = 0.0
    token_sent: float = 0.0
    boots_json: str = "{}"
    cloned: bool = False
    daemon: str = ""
    state: str = DeviceState.IDLE.value
    state_since: float = 0.0  # the time of the state's first report
    running: str | None = None  # the running bundle; None: the factory's files
    running_since: float = 0.0  # the time of this bundle's first report as running
    wanted: str | None = None
    rollout: str = ""
    code: str = ""
    reason: str = ""
    quarantined_json: str = "[]"
    unproven: bool = False
    weekday: int = 1  # the device's ISO weekday at its last report; `minute`: its minute of the day
    minute: int = 0
    granted: float = 0.0  # the time of its last permission to change
    erasure_json: str = ""
    temperature_c: float | None = None
    drift: float | None = None

    @property
    def left_out(self) -> bool:
        """Whether rollouts do not apply to the device, or its reports are not trusted."""
        return self.held or self.pin is not None or self.cloned or self.revoked is not None

    @property
    def owner(self) -> str:
        """The device's name at the gateways, `tenant/device`."""
        return f"{self.tenant}/{self.id}"

    @property
    def erasure(self) -> Erasure | None:
        """The last order to erase; None if there is none, or the row is damaged or of a newer version."""
        return _decoded(self.erasure_json, Erasure)

    @property
    def labels(self) -> dict[str, str]:
        """The device's labels; {} if the row is damaged or was written by a newer version."""
        return _decoded(self.labels_json, dict[str, str]) or {}

    @property
    def quarantined(self) -> tuple[str, ...]:
        """The bundles that the device itself refuses; () if the row is damaged or was written by a newer version."""
        return _decoded(self.quarantined_json, tuple[str, ...]) or ()


def _decoded(text: str, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, ValueError):
        return None


_COLUMNS = [devices.c[name] for name in Device.__struct_fields__]
_REPORTED = (
    *("last_seen", "token_sent", "boots_json", "cloned", "daemon", "state", "state_since", "running", "running_since"),
    *("wanted", "rollout", "code", "reason", "quarantined_json", "unproven", "weekday", "minute", "granted"),
    *("erasure_json", "temperature_c", "drift"),
)
_reported = attrgetter(*_REPORTED, "id")
_EVENT = ("device", *DeviceEvent.__struct_fields__)
_UPDATE = update(devices).where(devices.c.id == bindparam("key")).values({name: bindparam(name) for name in _REPORTED})
_INSERT = insert(device_events).values({name: bindparam(name) for name in _EVENT})
_PARAMETERS = {_UPDATE: (*_REPORTED, "key"), _INSERT: _EVENT}


async def _run(connection: AsyncConnection, statement: Update | Insert, rows: Iterable[tuple[Any, ...]]) -> None:
    """Run a compiled statement for many rows of `_PARAMETERS`: binding by name would cost a report a fifth more."""
    await connection.exec_driver_sql(_compiled(statement, connection.dialect), list(rows))


@cache
def _compiled(statement: Update | Insert, dialect: Dialect) -> str:
    compiled = statement.compile(dialect=dialect)
    assert compiled.positiontup == [*_PARAMETERS[statement]], compiled.positiontup
    return str(compiled)


async def lock_devices(connection: AsyncConnection, ids: Iterable[str]) -> dict[str, Device]:
    """Return the existing devices by id, locked until the transaction ends, in a fixed order to avoid deadlocks."""
    dialect = connection.dialect
    rows = await connection.execute(_locked(dialect), {"ids": as_list(dialect, ids)})
    return {row[0]: Device(*row) for row in rows}


@cache
def _locked(dialect: Dialect) -> Select[Any]:
    """Return the cached statement of `lock_devices`, which is a tenth of a report's cost to build."""
    return select(*_COLUMNS).where(among(dialect, devices.c.id, "ids")).order_by(devices.c.id).with_for_update()


async def write_reports(
    connection: AsyncConnection, changed: Sequence[Device], events: Sequence[tuple[str, DeviceEvent]]
) -> None:
    """Write devices' reports and events; columns set by operators are not changed."""
    if changed:
        await _run(connection, _UPDATE, map(_reported, changed))
    if events:
        await _run(connection, _INSERT, ((device, *msgspec.structs.astuple(event)) for device, event in events))


async def changing_at(connection: AsyncConnection, sites: Iterable[str], now: float) -> list[tuple[str, str]]:
    """Return (device, site) of each device of these sites that is changing its bundle, or was just permitted to."""
    active = or_(devices.c.state.in_([*CHANGING]), devices.c.granted > now - GRANT_S)
    chosen = select(devices.c.id, devices.c.site).where(one_of(connection, devices.c.site, sites), active)
    return [(row.id, row.site) for row in await connection.execute(chosen)]


async def read_device(connection: AsyncConnection, device: str = "", *, public_key: str = "") -> Device | None:
    condition = devices.c.public_key == public_key if public_key else devices.c.id == device
    row = (await connection.execute(select(*_COLUMNS).where(condition))).first()
    return None if row is None else Device(*row)


async def read_devices(connection: AsyncConnection, ids: Iterable[str]) -> dict[str, Device]:
    """Return the existing devices by id."""
    chosen = select(*_COLUMNS).where(one_of(connection, devices.c.id, ids))
    return {row[0]: Device(*row) for row in await connection.execute(chosen)}


async def cohort_devices(connection: AsyncConnection, cohort: str) -> list[Device]:
    """Return every device of a cohort that is not revoked, sorted by id."""
    chosen = select(*_COLUMNS).where(devices.c.cohort == cohort, devices.c.revoked.is_(None)).order_by(devices.c.id)
    return [Device(*row) for row in await connection.execute(chosen)]


async def page_of_devices(
    connection: AsyncConnection,
    *,
    cohort: str = "",
    state: str = "",
    site: str = "",
    query: str = "",
    after: str = "",
    limit: int = 100,
) -> list[Device]:
    """Return devices sorted by id.

    Args:
        cohort: The cohort; "" means any, in the other filters, too.
        state: A `DeviceState`, ``revoked``, ``cloned``, ``held`` or ``pinned``.
        site: The site's whole name.
        query: A part of the id, case-insensitive.
        after: The last id of the previous page.
    """
    chosen = select(*_COLUMNS).where(devices.c.id > after).order_by(devices.c.id).limit(limit)
    if cohort:
        chosen = chosen.where(devices.c.cohort == cohort)
    if state:
        chosen = chosen.where(_STATES.get(state, devices.c.state == state))
    if site:
        chosen = chosen.where(devices.c.site == site)
    if query:
        chosen = chosen.where(func.lower(devices.c.id).contains(query.lower(), autoescape=True))
    return [Device(*row) for row in await connection.execute(chosen)]


_STATES: Mapping[str, Any] = {
    "revoked": devices.c.revoked.is_not(None),
    "cloned": devices.c.cloned,
    "held": devices.c.held,
    "pinned": devices.c.pin.is_not(None),
}


class CohortCount(msgspec.Struct, frozen=True):
    """The devices of a cohort with a bundle, without revoked ones. `recently_seen`: those that reported recently."""

    cohort: str
    running: str | None
    devices: int
    recently_seen: int


async def count_devices(connection: AsyncConnection, since: float) -> list[CohortCount]:
    """Count the devices of each cohort by running bundle."""
    recently_seen = func.sum(case((devices.c.last_seen >= since, 1), else_=0))
    chosen = (
        select(devices.c.cohort, devices.c.running, func.count(), recently_seen)
        .where(devices.c.revoked.is_(None))
        .group_by(devices.c.cohort, devices.c.running)
        .order_by(devices.c.cohort)
    )
    return [CohortCount(row[0], row[1], row[2], int(row[3])) for row in await connection.execute(chosen)]


async def device_history(connection: AsyncConnection, device: str, limit: int = EVENTS_KEPT) -> list[DeviceEvent]:
    """Return the newest events of a device, newest first."""
    columns = [device_events.c[name] for name in DeviceEvent.__struct_fields__]
    chosen = select(*columns).where(device_events.c.device == device).order_by(device_events.c.n.desc()).limit(limit)
    return [DeviceEvent(*row) for row in await connection.execute(chosen)]


async def set_operator_columns(connection: AsyncConnection, device: str, **columns: Any) -> bool:
    """Set `held`, `pin`, `cohort`, `cloned` or `erasure_json` of a device. Returns whether the device exists."""
    done = await connection.execute(update(devices).where(devices.c.id == device).values(**columns))
    return done.rowcount > 0


async def forget_device(connection: AsyncConnection, device: str) -> None:
    """Delete a device's history, counters and records. Its row stays."""
    for table in (device_events, telemetry, telemetry_marks, records, labels):
        await connection.execute(delete(table).where(table.c.device == device))


async def forget_old_events(connection: AsyncConnection, now: float) -> None:
    """Delete events older than 30 days, and all but the newest `EVENTS_KEPT` of each device."""
    await connection.execute(delete(device_events).where(device_events.c.at < now - _COUNT_EVENTS_S))
    newest_first = func.row_number().over(partition_by=device_events.c.device, order_by=device_events.c.n.desc())
    numbered = select(device_events.c.n, newest_first.label("place")).subquery()
    over = select(numbered.c.n).where(numbered.c.place > EVENTS_KEPT)
    await connection.execute(delete(device_events).where(device_events.c.n.in_(over)))
