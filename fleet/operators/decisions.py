"""Operators' decisions about rollouts, each in one transaction with its audit row."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from anyio import to_thread
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.router.documents.reader import read_struct
from causeway_server.router.errors import CausewayError, InvalidRequest, NotFound, PermissionDenied

from ..controller.publisher import Publisher
from ..controller.step import positions_of
from ..repository.fleet_file import FLEET_FILE, FleetDoc, rollout_settings
from ..rollout.rollout import Rollout, apply
from ..rollout.settings import DECISIONS, LIFE, OPEN, IllegalTransition, RolloutEvent, RolloutSettings, RolloutState
from ..store.audit import append_audit
from ..store.database import Store
from ..store.devices import cohort_devices
from ..store.rollouts import (
    METADATA_ROLLBACK,
    RolloutChanged,
    RolloutRecord,
    change_rollout,
    insert_rollout,
    known_rollouts,
    list_rollouts,
    read_rollout,
    reported_plans,
)
from .answers import NewRollout
from .operators_file import Operator

S, E = RolloutState, RolloutEvent
_TRIES = 5
_RECENT_S = 3600.0
_Acknowledged = frozenset[str]


class WrongState(CausewayError, status=409, type="invalid_request_error", code="wrong_state"):
    """The state of the rollout, or of the cohort's rollout, does not allow the action."""


class BundleUnknown(NotFound, code="bundle_unknown"):
    """The bundle is not signed by the role artifacts, or its files are not at this server."""


class FleetInvalid(CausewayError, status=409, type="invalid_request_error", code="fleet_invalid"):
    """The server's fleet.yaml has errors."""


async def begin_rollout(
    store: Store, folder: Path, publisher: Publisher, operator: Operator, request: NewRollout, now: float
) -> RolloutRecord:
    """Store a new rollout by this operator, submitted to its checks.

    1. The bundle is signed, and for this cohort.
    2. The cohort has no other rollout under way; a revert may still be running.
    3. The rollout starts from the bundle that the devices have after the newest rollout (`fleet.yaml` is in `folder`).

    Raises:
        BundleUnknown, InvalidRequest: The bundle is not signed (1), or another cohort's.
        NotFound: `fleet.yaml` has no such cohort.
        WrongState: Another rollout is under way (2), or the devices already run the bundle.
        PermissionDenied: `allow_leaving` and `without_replay` need an approver.
    """
    if (request.allow_leaving or request.without_replay) and not operator.may("approver"):
        key = "allow_leaving" if request.allow_leaving else "without_replay"
        raise PermissionDenied(f"Only an operator with the role approver may set `{key}`.")
    manifest = await to_thread.run_sync(publisher.manifest, request.to_bundle)
    if manifest is None:  # (1)
        advice = f"sign it with `causeway-fleet sign`, and copy the folder `published` to {folder}"
        raise BundleUnknown(
            f"Bundle {request.to_bundle} is not signed on this control plane: {advice}.", param="to_bundle"
        )
    if manifest.cohort != request.cohort:
        raise InvalidRequest(f"Bundle {request.to_bundle} is for the cohort {manifest.cohort}.", param="cohort")
    settings = await to_thread.run_sync(_settings, folder, request.cohort)
    async with store.write() as connection:
        before = await list_rollouts(connection, request.cohort)
        busy = next((one.rollout for one in before if one.rollout.state in OPEN), None)
        if busy is not None:  # (2)
            raise WrongState(
                f"The rollout {busy.id} of {request.cohort} is in state {busy.state}. Abort that rollout, or wait "
                "until it ends."
            )
        from_bundle = _left_with(before)  # (3)
        if from_bundle == request.to_bundle:
            raise WrongState(f"The devices of {request.cohort} already have the bundle {request.to_bundle}.")
        name = f"r-{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        made = Rollout(name, request.cohort, request.to_bundle, from_bundle, secrets.token_urlsafe(12), settings)
        record = RolloutRecord(
            apply(made, E.SUBMIT, now, reason=f"by {operator.name}"),
            version=1,
            author=operator.name,
            created=now,
            updated=now,
            allow_leaving=request.allow_leaving,
            without_replay=request.without_replay,
            acknowledged=await _unknown_to_us(connection, request.cohort, now),
        )
        await insert_rollout(connection, record)
        what = {"rollout": name, **msgspec.structs.asdict(request), "from_bundle": from_bundle}
        await append_audit(connection, now, operator.name, "rollout.begin", what)
    return record


async def decide(
    store: Store, rollout: str, event: RolloutEvent, reason: str, operator: Operator, now: float
) -> RolloutRecord:
    """Pause, resume, accept or abort a rollout, or acknowledge reports ahead of the store. `now`: Unix s, for the
    audit.

    Raises:
        NotFound: The rollout does not exist.
        WrongState: The rollout's state does not allow the event; the message names the allowed ones.
        RolloutChanged: The controller changed the rollout meanwhile; try again.
    """
    for attempt in range(_TRIES):
        try:
            async with store.write() as connection:
                return await _decide(connection, rollout, event, reason, operator, now)
        except RolloutChanged:
            if attempt + 1 == _TRIES:
                raise
    raise AssertionError


async def _decide(
    connection: AsyncConnection, name: str, event: RolloutEvent, reason: str, operator: Operator, now: float
) -> RolloutRecord:
    record = await read_rollout(connection, name)
    if record is None:
        raise NotFound(f"Rollout {name} not found.")
    before = record.rollout
    newer = next(
        (one.rollout for one in await list_rollouts(connection, before.cohort) if one.rollout.has_begun), before
    )
    if event is E.ABORT and before.state is S.DONE and newer.id != before.id:
        raise WrongState(
            f"The rollout {newer.id} is newer than {name}. Abort the newer one, or apply the bundle that the devices "
            "should run."
        )
    devices = await cohort_devices(connection, before.cohort)
    positions = positions_of(before.salt, devices, now - before.settings.silence_s)
    text = f"by {operator.name}" + (f": {reason}" if reason else "")
    try:
        after = apply(before, event, now, reason=text, positions=positions)
    except IllegalTransition as error:
        allowed = ", ".join(one.value for one in DECISIONS if one in LIFE[before.state]) or "no decision any more"
        raise WrongState(
            f"The rollout {name} is in state {before.state}, which does not allow {event}. Allowed: {allowed}."
        ) from error
    known = record.acknowledged | await _unknown_to_us(connection, before.cohort, now)
    changed = msgspec.structs.replace(record, rollout=after, updated=now, acknowledged=known)
    await change_rollout(connection, changed)
    what = {"rollout": name, "cohort": before.cohort, "reason": reason, "state": after.state, "stage": after.stage}
    await append_audit(connection, now, operator.name, f"rollout.{event.value}", what)
    return changed


async def _unknown_to_us(connection: AsyncConnection, cohort: str, now: float) -> _Acknowledged:
    reports = [one for one in await reported_plans(connection, now - _RECENT_S) if one.cohort == cohort]
    reported = {one.rollout for one in reports if one.rollout}
    unknown = reported - await known_rollouts(connection, reported)
    return frozenset(unknown | ({METADATA_ROLLBACK} if any(one.refuses for one in reports) else set()))


def _left_with(records: Sequence[RolloutRecord]) -> str | None:
    """Return the bundle that the cohort has after its newest rollout. `records`: the newest first."""
    for record in records:
        if record.rollout.has_begun:
            return record.rollout.to_bundle if record.rollout.state is S.DONE else record.rollout.from_bundle
    return None


def _settings(folder: Path, cohort: str) -> RolloutSettings:
    """Read the cohort's settings in `fleet.yaml` again, so that changes need no restart of the server."""
    text = (folder / FLEET_FILE).read_text(encoding="utf-8", errors="replace")
    fleet, _, problems = read_struct(text, FLEET_FILE, FleetDoc)
    if fleet is None:
        raise FleetInvalid(f"{problems[0].location}: {problems[0].message}")
    if cohort not in fleet.cohorts:
        raise NotFound(f"{FLEET_FILE} has no cohort {cohort}. Its cohorts: {', '.join(fleet.cohorts)}.", param="cohort")
    try:
        return rollout_settings(fleet.cohorts[cohort].rollout)
    except ValueError as error:
        raise FleetInvalid(f"{FLEET_FILE}: cohorts.{cohort}.rollout.{error}") from error
