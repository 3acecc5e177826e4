"""Join tokens, of which only the hash is kept, and the devices that they enrol."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

import msgspec
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .tables import devices, join_tokens

PREFIX = "cwjoin_"  # for secret scanners
_LABELS = dict[str, str]


class JoinToken(msgspec.Struct, frozen=True):
    """A join token and its grants.

    Attributes:
        hash: sha256 of the token, hex.
        cohort: "": the cohort that matches the box's labels.
        labels: The device's labels; they win over those that the box reports.
        uses_left: How many boxes may still enrol with it.
        expires: Unix seconds.
    """

    hash: str
    cohort: str
    tenant: str
    labels: Mapping[str, str]
    uses_left: int
    created: float
    expires: float


class EnrolledDevice(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    cohort: str
    public_key: str
    join_token: str
    revoked: float | None


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


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
    """Make a join token and return it; it cannot be read again. Tokens that expired a month ago are deleted.

    Args:
        connection: The connection of a transaction.
        cohort: "": the cohort that matches the box's labels.
        tenant: The tenant of the devices.
        labels: The devices' labels; they win over those that the box reports.
        uses: How many boxes may enrol with it.
        expires_s: How long it is valid, in seconds.
        now: Unix seconds.
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


async def find_device(connection: AsyncConnection, *, public_key: str = "", name: str = "") -> EnrolledDevice | None:
    """Return the device with this key, or with this name."""
    condition = devices.c.public_key == public_key if public_key else devices.c.id == name
    columns = [devices.c[name] for name in EnrolledDevice.__struct_fields__]
    row = (await connection.execute(select(*columns).where(condition))).first()
    return None if row is None else EnrolledDevice(*row)


async def enrol(
    connection: AsyncConnection,
    token: JoinToken,
    *,
    device: str,
    cohort: str,
    public_key: str,
    labels: Mapping[str, str],
    site: str,
    daemon: str,
    now: float,
) -> None:
    """Add a device and take one use from its token.

    Args:
        connection: The connection of a transaction.
        token: The join token, which names the tenant.
        device: The device's id.
        cohort: The device's cohort.
        public_key: Ed25519, base64url.
        labels: The device's labels.
        site: "": a site of its own.
        daemon: The version of its daemon.
        now: Unix seconds.

    Raises:
        IntegrityError: The name or the key is taken.
    """
    left = join_tokens.c.uses_left
    await connection.execute(update(join_tokens).where(join_tokens.c.hash == token.hash).values(uses_left=left - 1))
    row = {
        "id": device,
        "tenant": token.tenant,
        "cohort": cohort,
        "labels_json": msgspec.json.encode(labels, order="sorted").decode(),
        "site": site,
        "public_key": public_key,
        "join_token": token.hash,
        "enrolled": now,
        "daemon": daemon,
    }
    await connection.execute(insert(devices).values(NEVER_SEEN | row))


NEVER_SEEN = {
    "revoked": None,
    "held": False,
    "pin": None,
    "last_seen": 0.0,
    "token_sent": 0.0,
    "boots_json": "{}",
    "cloned": False,
    "state": "idle",
    "state_since": 0.0,
    "running": None,
    "running_since": 0.0,
    "wanted": None,
    "rollout": "",
    "code": "",
    "reason": "",
    "quarantined_json": "[]",
    "unproven": False,
    "weekday": 1,
    "minute": 0,
    "granted": 0.0,
}
