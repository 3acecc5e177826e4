"""Rollouts as rows, their looks, and the rollouts that devices report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import msgspec
from sqlalchemy import and_, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.router.bundle.refusals import MetadataRollback
from causeway_server.router.errors import CausewayError

from ..rollout.rollout import Rollout
from ..rollout.settings import RolloutState
from ..rollout.verdict import Verdict
from .tables import devices, looks, rollouts

ENDED = (RolloutState.DRAFT, RolloutState.DONE, RolloutState.REVERTED)
"""The states that a rollout leaves only by an operator's decision."""
_MAX_LISTED = 200  # rollouts, or looks of one
METADATA_ROLLBACK = MetadataRollback.code


class RolloutChanged(CausewayError, status=409, code="changed_meanwhile", retryable=True):
    """The rollout was changed by another request or by the controller in the meantime."""


class RolloutUnreadable(CausewayError, code="record_unreadable"):
    """The row of a rollout is damaged, or a newer version of the control plane wrote it."""


class RolloutRecord(msgspec.Struct, frozen=True):
    """A stored rollout."""

    rollout: Rollout
    version: int  # grows with each change
    author: str  # the operator who began it, or `controller`
    created: float  # Unix seconds, like `updated`
    updated: float
    allow_leaving: bool = False  # an approver accepts that recorded requests that stayed on the device leave it
    without_replay: bool = False  # whether an approver accepts that there are no records to replay
    acknowledged: frozenset[str] = frozenset()  # reported ids and codes, unknown here, that an operator accepts


class LookRecord(msgspec.Struct, frozen=True):
    """A look: its time (unix seconds), its stage, and the verdict as JSON text."""

    at: float
    stage: int
    verdict_json: str


class ReportedPlan(msgspec.Struct, frozen=True):
    """The devices that follow a rollout's plan. `refuses`: they refuse the published metadata as too old."""

    cohort: str
    rollout: str
    refuses: bool
    devices: int


_COLUMNS = [
    *(rollouts.c[name] for name in ("id", "cohort", "body_json", "version", "author", "created", "updated")),
    *(rollouts.c[name] for name in ("allow_leaving", "without_replay", "acknowledged_json")),
]
_NEWEST = (rollouts.c.created.desc(), rollouts.c.id)


async def insert_rollout(connection: AsyncConnection, record: RolloutRecord) -> None:
    """Store a new rollout. Raises IntegrityError: the id is taken."""
    row = _values(record) | {"id": record.rollout.id, "author": record.author, "created": record.created}
    await connection.execute(insert(rollouts).values(row))


async def change_rollout(connection: AsyncConnection, record: RolloutRecord) -> None:
    """Store a changed rollout. Raises RolloutChanged if the stored version is not `record.version` any more."""
    same = and_(rollouts.c.id == record.rollout.id, rollouts.c.version == record.version)
    changed = msgspec.structs.replace(record, version=record.version + 1)
    done = await connection.execute(update(rollouts).where(same).values(_values(changed)))
    if not done.rowcount:
        raise RolloutChanged(f"The rollout {record.rollout.id} was changed in the meantime. Read the rollout again.")


async def read_rollout(connection: AsyncConnection, rollout: str) -> RolloutRecord | None:
    """Return a rollout; None if there is none. Raises RolloutUnreadable."""
    row = (await connection.execute(select(*_COLUMNS).where(rollouts.c.id == rollout))).first()
    return None if row is None else _record(*row)


async def list_rollouts(
    connection: AsyncConnection, cohort: str = "", *, readable: bool = False
) -> list[RolloutRecord]:
    """Return the newest rollouts of a cohort ("": of all), newest first.

    Raises RolloutUnreadable; with `readable` such a rollout is left out instead.
    """
    chosen = select(*_COLUMNS).order_by(*_NEWEST).limit(_MAX_LISTED)
    if cohort:
        chosen = chosen.where(rollouts.c.cohort == cohort)
    found = []
    for row in await connection.execute(chosen):
        with suppress(RolloutUnreadable) if readable else nullcontext():
            found.append(_record(*row))
    return found


async def working_rollouts(connection: AsyncConnection) -> tuple[list[RolloutRecord], tuple[str, ...]]:
    """Return active rollouts and each cohort's newest begun one, and the faults of unreadable ones."""
    newest = select(func.max(rollouts.c.created)).where(rollouts.c.begun).group_by(rollouts.c.cohort)
    chosen = select(*_COLUMNS).where(or_(rollouts.c.state.not_in(ENDED), rollouts.c.created.in_(newest)))
    return _readable((await connection.execute(chosen.order_by(*_NEWEST))).all())


async def known_rollouts(connection: AsyncConnection, ids: Collection[str]) -> frozenset[str]:
    """Return those of these ids that the store has."""
    chosen = select(rollouts.c.id).where(rollouts.c.id.in_(list(ids)))
    return frozenset(row.id for row in await connection.execute(chosen))


async def add_look(connection: AsyncConnection, rollout: str, at: float, stage: int, verdict: Verdict) -> None:
    text = msgspec.json.encode(verdict).decode()
    await connection.execute(insert(looks).values(rollout=rollout, at=at, stage=stage, verdict_json=text))


async def read_looks(connection: AsyncConnection, rollout: str) -> list[LookRecord]:
    """Return the newest looks, oldest first."""
    chosen = select(looks.c.at, looks.c.stage, looks.c.verdict_json).where(looks.c.rollout == rollout)
    rows = await connection.execute(chosen.order_by(looks.c.n.desc()).limit(_MAX_LISTED))
    return [LookRecord(*row) for row in rows][::-1]


async def reported_plans(connection: AsyncConnection, since: float) -> list[ReportedPlan]:
    """Return the plans of devices that have reported since `since`."""
    refuses = devices.c.code == METADATA_ROLLBACK
    chosen = (
        select(devices.c.cohort, devices.c.rollout, refuses.label("refuses"), func.count())
        .where(devices.c.last_seen >= since, devices.c.revoked.is_(None))
        .group_by(devices.c.cohort, devices.c.rollout, refuses)
    )
    return [ReportedPlan(row[0], row[1], bool(row[2]), row[3]) for row in await connection.execute(chosen)]


async def pins_and_holds(connection: AsyncConnection) -> Mapping[str, tuple[dict[str, str], frozenset[str]]]:
    """Return pins and holds: cohort → (device → pinned bundle, held devices)."""
    decided = and_(or_(devices.c.held, devices.c.pin.is_not(None)), devices.c.revoked.is_(None))
    found: dict[str, tuple[dict[str, str], set[str]]] = {}
    for row in await connection.execute(
        select(devices.c.id, devices.c.cohort, devices.c.held, devices.c.pin).where(decided)
    ):
        pins, holds = found.setdefault(row.cohort, ({}, set()))
        if row.pin is not None:
            pins[row.id] = row.pin
        elif row.held:
            holds.add(row.id)
    return {cohort: (pins, frozenset(holds)) for cohort, (pins, holds) in found.items()}


def _values(record: RolloutRecord) -> dict[str, Any]:
    return {
        "cohort": record.rollout.cohort,
        "state": record.rollout.state.value,
        "begun": record.rollout.has_begun,
        "body_json": msgspec.json.encode(record.rollout).decode(),
        "version": record.version,
        "updated": record.updated,
        "allow_leaving": record.allow_leaving,
        "without_replay": record.without_replay,
        "acknowledged_json": msgspec.json.encode(sorted(record.acknowledged)).decode(),
    }


def _readable(rows: Sequence[Any]) -> tuple[list[RolloutRecord], tuple[str, ...]]:
    """Return the records of cohorts without unreadable rows, and the faults of unreadable rows."""
    records, unreadable = [], {}
    for row in rows:
        try:
            records.append(_record(*row))
        except RolloutUnreadable as error:
            unreadable[row.cohort] = error.message
    return [record for record in records if record.rollout.cohort not in unreadable], tuple(unreadable.values())


def _record(rollout: str, cohort: str, body: str, *columns: Any) -> RolloutRecord:
    """Return the record of a row of `_COLUMNS`. Raises RolloutUnreadable."""
    try:
        record = RolloutRecord(msgspec.json.decode(body, type=Rollout), *columns)
        return msgspec.structs.replace(record, acknowledged=msgspec.json.decode(columns[-1], type=frozenset[str]))
    except (msgspec.DecodeError, ValueError) as error:
        raise RolloutUnreadable(
            f"The cohort {cohort} pauses, because the row of its rollout {rollout} is damaged, or of a newer version "
            "of the control plane. Upgrade the control plane, or restore the row from a backup."
        ) from error
