"""Counters of each cohort's changes, for parked polls, and the revoked devices, whose tokens gateways refuse.

A device stays on the list as long as one of its tokens could be valid.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec
from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollout.settings import MaintenanceWindow
from .database import insert_of
from .tables import devices, generations, labels, records, revocations

REVOCATIONS = "#revocations"
"""The name of the revocations' counter, which no cohort can have."""
KEPT_S = 367 * 86400.0
"""The time for which a revocation is listed, in seconds: more than any gateway's `max_lifetime_s`."""


class CohortPace(msgspec.Struct, frozen=True):
    """The pace of a cohort, which decides when its devices may begin to change."""

    windows: tuple[MaintenanceWindow, ...] = ()  # the maintenance windows; None: devices may always change
    per_site: int = 0  # the maximum number of devices of a site that change at once; 0: no limit
    reverting: bool = False  # whether the rollout is being reverted, which ignores windows and `per_site`
    plan: str = ""  # the sha256 of the published plan for which devices were last woken
    records_per_hour: float = 0.0  # the number of decision records that each device may send

    def may_change(self, weekday: int, minute: int, busy: int) -> bool:
        """Return whether a device may begin to change; a revert ignores windows and limits, as a bad bundle hurts all.

        Args:
            weekday, minute: ISO weekday and minute of the day at the device.
            busy: The number of other devices of its site that are changing; 0 for a device without a site.
        """
        if self.reverting:
            return True
        if self.windows and not any(window.is_open(weekday, minute) for window in self.windows):
            return False
        return not self.per_site or busy < self.per_site


class Generation(msgspec.Struct, frozen=True):
    """The generation of a cohort. `nonce` is random, because a restored backup repeats the counter."""

    counter: int = 0
    nonce: str = ""
    pace: CohortPace = CohortPace()

    @property
    def etag(self) -> str:
        return f'"{self.counter}-{self.nonce}"'


async def advance(connection: AsyncConnection, name: str, pace: CohortPace | None = None) -> None:
    """Increment the counter of a cohort or of REVOCATIONS in its change's transaction, which wakes its devices. `pace`
    None: it stays.
    """
    nonce = secrets.token_hex(8)
    values = {"nonce": nonce} if pace is None else {"nonce": nonce, "pace_json": msgspec.json.encode(pace).decode()}
    first = {"name": name, "counter": 1, "pace_json": "{}"} | values
    grown = {"counter": generations.c.counter + 1} | values
    adding = insert_of(connection, generations).values(first)
    await connection.execute(adding.on_conflict_do_update(index_elements=["name"], set_=grown))


async def set_pace(connection: AsyncConnection, cohort: str, pace: CohortPace) -> None:
    """Change the pace of a cohort without waking its devices. Each process reads it within a second."""
    text = msgspec.json.encode(pace).decode()
    await connection.execute(update(generations).where(generations.c.name == cohort).values(pace_json=text))


async def read_generations(connection: AsyncConnection) -> Mapping[str, Generation]:
    """Return the generations by name."""
    rows = await connection.execute(select(generations))
    return {row.name: Generation(row.counter, row.nonce, _pace(row.pace_json)) for row in rows}


def _pace(text: str) -> CohortPace:
    """Parse a cohort's pace; return the default pace if the row is damaged or was written by a newer version."""
    try:
        return msgspec.json.decode(text, type=CohortPace)
    except (msgspec.DecodeError, ValueError):
        return CohortPace()


class Revocations(msgspec.Struct, frozen=True):
    """The list of revocations in the gateways' format.

    Attributes:
        epoch: A number that grows when a list restarts from the beginning; always 1 for this server.
        version: A number that grows with each revocation.
        tokens: Token id → unix time of its expiry.
        devices: Tenant/device → unix time; tokens issued until then are refused.
    """

    epoch: int
    version: int
    tokens: Mapping[str, float]
    devices: Mapping[str, float]


async def revoke(connection: AsyncConnection, device: str, now: float) -> bool:
    """Revoke a device permanently: its tokens, its key and its reports are refused. Returns whether it exists."""
    tenant = await connection.scalar(select(devices.c.tenant).where(devices.c.id == device))
    if tenant is None:
        return False
    await revoke_owner(connection, f"{tenant}/{device}", now)
    return True


async def revoke_owner(connection: AsyncConnection, owner: str, now: float) -> None:
    """Revoke `owner` (tenant/device), enrolled or not, for the gateways; delete the device's records and labels."""
    tenant, _, device = owner.partition("/")
    of_owner = (devices.c.id == device) & (devices.c.tenant == tenant)
    await connection.execute(update(devices).where(of_owner).values(revoked=now))
    for table in (records, labels):
        await connection.execute(delete(table).where(table.c.device.in_(select(devices.c.id).where(of_owner))))
    adding = insert_of(connection, revocations).values(owner=owner, at=now)
    await connection.execute(adding.on_conflict_do_update(index_elements=["owner"], set_={"at": now}))
    await connection.execute(delete(revocations).where(revocations.c.at < now - KEPT_S))
    await advance(connection, REVOCATIONS)


async def read_revocations(connection: AsyncConnection) -> Revocations:
    """Return the whole list."""
    version = await connection.scalar(select(generations.c.counter).where(generations.c.name == REVOCATIONS))
    rows = await connection.execute(select(revocations.c.owner, revocations.c.at))
    return Revocations(epoch=1, version=version or 0, tokens={}, devices={row.owner: row.at for row in rows})


async def revoked_devices(connection: AsyncConnection) -> frozenset[str]:
    return frozenset(await connection.scalars(select(devices.c.id).where(devices.c.revoked.is_not(None))))
