"""Devices whose tokens are refused. Gateways read the list; a device stays on it while a token could be valid."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from sqlalchemy import delete, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from .generations import REVOCATIONS, advance
from .tables import devices, generations, revocations

KEPT_S = 367 * 86400.0
"""How long a revocation is listed: more than any gateway's `max_lifetime_s`."""


class Revocations(msgspec.Struct, frozen=True):
    """The list as the gateways read it.

    Attributes:
        epoch: Grows when a list begins anew; always 1 here.
        version: Grows with each revocation.
        tokens: Token id → unix time of its expiry.
        devices: tenant/device → unix time; tokens that were issued until then are refused.
    """

    epoch: int
    version: int
    tokens: Mapping[str, float]
    devices: Mapping[str, float]


async def revoke(connection: AsyncConnection, device: str, now: float) -> bool:
    """Revoke a device for good: its tokens, its key and its reports are refused from now on.

    Returns:
        Whether the device exists.
    """
    tenant = await connection.scalar(select(devices.c.tenant).where(devices.c.id == device))
    if tenant is None:
        return False
    await revoke_owner(connection, f"{tenant}/{device}", now)
    return True


async def revoke_owner(connection: AsyncConnection, owner: str, now: float) -> None:
    """Revoke `owner` (tenant/device), also one that is not enrolled here, for gateways to refuse its tokens."""
    tenant, _, device = owner.partition("/")
    of_owner = (devices.c.id == device) & (devices.c.tenant == tenant)
    await connection.execute(update(devices).where(of_owner).values(revoked=now))
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    await connection.execute(
        insert(revocations)
        .values(owner=owner, at=now)
        .on_conflict_do_update(index_elements=["owner"], set_={"at": now})
    )
    await connection.execute(delete(revocations).where(revocations.c.at < now - KEPT_S))
    await advance(connection, REVOCATIONS)


async def read_revocations(connection: AsyncConnection) -> Revocations:
    """Return the whole list."""
    version = await connection.scalar(select(generations.c.counter).where(generations.c.name == REVOCATIONS))
    rows = await connection.execute(select(revocations.c.owner, revocations.c.at))
    return Revocations(epoch=1, version=version or 0, tokens={}, devices={row.owner: row.at for row in rows})


async def revoked_devices(connection: AsyncConnection) -> frozenset[str]:
    """Return the ids of all revoked devices."""
    return frozenset(await connection.scalars(select(devices.c.id).where(devices.c.revoked.is_not(None))))
