"""Join tokens with the devices that they enrol, and operators' sessions. Only hashes of these secrets are stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

import msgspec
from sqlalchemy import RowMapping, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .devices import Device
from .tables import devices, join_tokens, sessions

PREFIX, SESSION_PREFIX = "cwjoin_", "cwsession_"  # for secret scanners
_LABELS = dict[str, str]


class JoinToken(msgspec.Struct, frozen=True):
    """A join token, with the values that it gives to devices."""

    hash: str  # sha256 of the token, hex
    cohort: str  # the cohort; "": the one that matches the device's labels
    tenant: str
    labels: Mapping[str, str]  # labels that override those that the device reports
    uses_left: int  # the number of devices that may still enrol with it
    created: float
    expires: float  # Unix seconds


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


async def new_join_token(
    connection: AsyncConnection,
    *,
    cohort: str,
    tenant: str,
    labels: Mapping[str, str],
    uses: int,
    expires_s: float,
    now: float,
) -> str:
    """Create a join token, valid for `expires_s` from `now` (Unix, s), and return it; it cannot be read later.

    Tokens that expired a month ago are deleted.
    """
    token = PREFIX + secrets.token_urlsafe(32)
    row = {
        "hash": token_hash(token),
        "cohort": cohort,
        "tenant": tenant,
        "labels_json": msgspec.json.encode(labels).decode(),
        "uses_left": uses,
        "created": now,
        "expires": now + expires_s,
    }
    await connection.execute(insert(join_tokens).values(row))
    await connection.execute(delete(join_tokens).where(join_tokens.c.expires < now - 30 * 86400.0))
    return token


async def find_join_token(connection: AsyncConnection, token: str) -> JoinToken | None:
    """Return the token's row, locked until the transaction ends."""
    chosen = select(join_tokens).where(join_tokens.c.hash == token_hash(token)).with_for_update()
    row = (await connection.execute(chosen)).first()
    if row is None:
        return None
    labels = msgspec.json.decode(row.labels_json, type=_LABELS)
    return JoinToken(row.hash, row.cohort, row.tenant, labels, row.uses_left, row.created, row.expires)


async def enrol(connection: AsyncConnection, device: Device) -> None:
    """Add a device and reduce the uses of its join token by one. Raises IntegrityError for a taken name or key."""
    uses = update(join_tokens).where(join_tokens.c.hash == device.join_token)
    await connection.execute(uses.values(uses_left=join_tokens.c.uses_left - 1))
    await connection.execute(insert(devices).values(msgspec.structs.asdict(device)))


async def new_session(connection: AsyncConnection, operator: str, role: str, now: float, lifetime_s: float) -> str:
    """Begin an operator's session for `lifetime_s` from `now` (Unix, s); return its secret. Ended ones are deleted."""
    secret = SESSION_PREFIX + secrets.token_urlsafe(32)
    row = {"hash": token_hash(secret), "operator": operator, "role": role, "began": now, "expires": now + lifetime_s}
    await connection.execute(delete(sessions).where(sessions.c.expires <= now))
    await connection.execute(insert(sessions).values(row))
    return secret


async def find_session(connection: AsyncConnection, secret: str, now: float) -> RowMapping | None:
    """Return `name` and `role` of the session's operator; None if the session is unknown or has ended."""
    chosen = select(sessions.c.operator.label("name"), sessions.c.role)
    found = await connection.execute(chosen.where(sessions.c.hash == token_hash(secret), sessions.c.expires > now))
    return found.mappings().first()


async def end_session(connection: AsyncConnection, secret: str) -> None:
    await connection.execute(delete(sessions).where(sessions.c.hash == token_hash(secret)))
