"""What is new, by cohort: a counter that each change moves on. Parked polls wait for it, in every process."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec
from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollout.boxes import MaintenanceWindow
from .tables import generations

REVOCATIONS = "#revocations"
"""The generation that moves on with each revocation; no cohort has this name."""


class CohortPace(msgspec.Struct, frozen=True):
    """When the boxes of a cohort may begin to change.

    Attributes:
        windows: None: always.
        per_site: Boxes of a site that change at once; 0: any number.
        reverting: The rollout is undone, which waits for no window and no site.
        plan: sha256 of the published plan that the boxes were told of.
    """

    windows: tuple[MaintenanceWindow, ...] = ()
    per_site: int = 0
    reverting: bool = False
    plan: str = ""


class Generation(msgspec.Struct, frozen=True):
    """`nonce` is another one after each change: a counter that was restored from a backup comes again, it does not."""

    counter: int = 0
    nonce: str = ""
    pace: CohortPace = CohortPace()

    @property
    def etag(self) -> str:
        return f'"{self.counter}-{self.nonce}"'


async def advance(connection: AsyncConnection, name: str, pace: CohortPace | None = None) -> None:
    """Tell every process and box that something is new for a cohort: a plan was published, or its pace changed.

    Args:
        connection: Of the transaction that makes the change.
        name: The cohort, or REVOCATIONS.
        pace: None: the pace stays.
    """
    nonce = secrets.token_hex(8)
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    values = {"nonce": nonce} if pace is None else {"nonce": nonce, "pace_json": msgspec.json.encode(pace).decode()}
    first = {"name": name, "counter": 1, "pace_json": "{}"} | values
    await connection.execute(
        insert(generations)
        .values(first)
        .on_conflict_do_update(index_elements=["name"], set_={"counter": generations.c.counter + 1} | values)
    )


async def set_pace(connection: AsyncConnection, cohort: str, pace: CohortPace) -> None:
    """Change the pace of a cohort without waking its boxes. Each process reads it within a second."""
    text = msgspec.json.encode(pace).decode()
    await connection.execute(update(generations).where(generations.c.name == cohort).values(pace_json=text))


async def read_generations(connection: AsyncConnection) -> Mapping[str, Generation]:
    """Return the generation of each name that has one."""
    rows = await connection.execute(select(generations))
    return {
        row.name: Generation(row.counter, row.nonce, msgspec.json.decode(row.pace_json, type=CohortPace))
        for row in rows
    }
