"""The operators' routes: devices, join tokens, audit log, the fleet, rollouts, two bundles' policies."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from anyio import CapacityLimiter, to_thread

from causeway_server.router.bundle.manifest import position
from causeway_server.router.bundle.protocol import ErasureOrder
from causeway_server.router.checks.replay import check_draft
from causeway_server.router.errors import InvalidRequest, NotFound
from causeway_server.router.numbers import whole_number
from causeway_server.router.serving.aiohttp_connection import json_response
from causeway_server.router.serving.console.apart import run_apart
from causeway_server.router.types import DecisionRecord

from ..controller.forecast import happened, read_evidence
from ..controller.loop import Controller
from ..controller.publisher import Publisher
from ..prover.proof import prove
from ..rollout.settings import RolloutEvent, is_silent
from ..rollout.verdict import ROLLED_BACK, SILENT, Verdict
from ..server.plane import ControlPlane
from ..server.routes import ApiRoute, decode_body, read_body
from ..store.audit import append_audit, audit_of, read_audit
from ..store.devices import (
    Device,
    Erasure,
    cohort_devices,
    count_devices,
    device_history,
    lock_devices,
    page_of_devices,
    read_device,
    set_operator_columns,
)
from ..store.enrolment import new_join_token
from ..store.generations import advance, revoke
from ..store.history import CohortFigures, DeviceEvent, Happened
from ..store.records import cohort_figures, read_records
from ..store.rollouts import ENDED, LookRecord, RolloutRecord, list_rollouts, read_looks, read_rollout, working_rollouts
from .answers import (
    AuditPage,
    CohortAnswer,
    DeviceAnswer,
    DevicePage,
    ErasureAnswer,
    ErasureRequest,
    FleetAnswer,
    JoinTokenAnswer,
    LookAnswer,
    MetricAnswer,
    NewJoinToken,
    NewRollout,
    OperatorReason,
    PinRequest,
    PolicyDraft,
    PolicyPair,
    ProvedDraft,
    RolloutAnswer,
    RolloutDetail,
    RolloutEventAnswer,
)
from .decisions import BundleUnknown, WrongState, begin_rollout, decide
from .operators_file import Role
from .sign_in import SignIn

_ACTIONS = ("revoke", "hold", "release", "pin")
_MOST = 1000
_LATER_S = 0.001  # a device carries out no order that is as old as its last one
RECENT_S = 900.0
DRAFT_S = 10.0
_EVENTS: dict[str, tuple[RolloutEvent, Role]] = {
    "pause": (RolloutEvent.PAUSE, "operator"),
    "resume": (RolloutEvent.RESUME, "operator"),
    "accept": (RolloutEvent.ACCEPT, "approver"),
    "abort": (RolloutEvent.ABORT, "operator"),
}


class OperatorApi(msgspec.Struct, frozen=True):
    """The handlers of operators' requests."""

    plane: ControlPlane
    publisher: Publisher
    controller: Controller
    sign_in: SignIn
    trying: CapacityLimiter = msgspec.field(default_factory=lambda: CapacityLimiter(1))  # drafts at a time

    async def devices(self, http: web.Request) -> web.StreamResponse:
        await self.sign_in.require(http, "viewer")
        limit = max(1, number(http, "limit", 100))
        filters = {name: http.query.get(name, "")[:128] for name in ("cohort", "state", "site", "after")}
        async with self.plane.store.read() as connection:
            found = await page_of_devices(connection, **filters, query=http.query.get("q", "")[:128], limit=limit + 1)
        page = found[:limit]
        following = page[-1].id if len(found) > limit else None
        return json_response(DevicePage(tuple(map(device_answer, page)), following))

    async def device(self, http: web.Request) -> web.StreamResponse:
        await self.sign_in.require(http, "viewer")
        name = path_part(http)
        async with self.plane.store.read() as connection:
            device = await read_device(connection, name)
            if device is None:
                raise NotFound(f"Device {name} not found.")
            history = await device_history(connection, name)
        return json_response(device_answer(device, tuple(history)))

    async def act(self, action: str, http: web.Request) -> web.StreamResponse:
        name, now = path_part(http), self.plane.clock()
        operator = await self.sign_in.require(http, "operator")
        body = await read_body(http) or b"{}"
        bundle = None
        if action == "pin":
            request = decode_body(body, PinRequest)
            bundle, reason = request.bundle, request.reason
            if await to_thread.run_sync(self.publisher.manifest, bundle) is None:
                raise BundleUnknown(f"Bundle {bundle} is not signed on this control plane.", param="bundle")
        else:
            reason = decode_body(body, OperatorReason).reason
        async with self.plane.store.write() as connection:
            if action == "revoke":
                exists = await revoke(connection, name, now)
            else:
                exists = await set_operator_columns(connection, name, held=action == "hold", pin=bundle)
            if not exists:
                raise NotFound(f"Device {name} not found.")
            what = {"device": name, "reason": reason} | ({} if bundle is None else {"bundle": bundle})
            await append_audit(connection, now, operator.name, f"device.{action}", what)
            device = await read_device(connection, name)
        assert device is not None
        self.controller.notify()
        return json_response(device_answer(device))

    async def erase(self, http: web.Request) -> web.StreamResponse:
        """Order a device to erase; an order for the same client that it has not carried out yet stays as it is."""
        name, now = path_part(http), self.plane.clock()
        operator = await self.sign_in.require(http, "operator")
        request = decode_body(await read_body(http) or b"{}", ErasureRequest)
        client = request.client or ""
        if not await to_thread.run_sync(self.publisher.published):
            raise WrongState(
                "No rollout was published yet, so devices cannot verify an erasure order. Begin a rollout first."
            )
        async with self.plane.store.write() as connection:
            device = (await lock_devices(connection, [name])).get(name)
            if device is None:
                raise NotFound(f"Device {name} not found.")
            before = device.erasure
            if before is not None and not before.finished and client and before.client != client:
                waiting = before.client or "all clients"
                raise WrongState(
                    f"{name} has not carried out the erasure order for {waiting} yet. Send the new order after that."
                )
            if before is None or before.finished or before.client != client:
                at = now if before is None else max(now, before.ordered + _LATER_S)
                order = ErasureOrder(device=name, id=secrets.token_hex(8), at=at, client=client)
                signed = await to_thread.run_sync(self.publisher.sign_order, order)
                erasure = Erasure(order.id, order.client, at, signed)
                text = msgspec.json.encode(erasure).decode()
                await set_operator_columns(connection, name, erasure_json=text)
                what = {"device": name, "client": client, "reason": request.reason}
                await append_audit(connection, now, operator.name, "device.erase", what)
                device = msgspec.structs.replace(device, erasure_json=text)
                await advance(connection, device.cohort)  # wakes it
        return json_response(device_answer(device))

    async def join_token(self, http: web.Request) -> web.StreamResponse:
        now = self.plane.clock()
        operator = await self.sign_in.require(http, "operator")
        request = decode_body(await read_body(http), NewJoinToken)
        if request.cohort and request.cohort not in self.plane.fleet.cohorts:
            names = ", ".join(self.plane.fleet.cohorts)
            raise InvalidRequest(f"Cohort {request.cohort} not found. The fleet's cohorts: {names}.", param="cohort")
        async with self.plane.store.write() as connection:
            token = await new_join_token(connection, **msgspec.structs.asdict(request), now=now)
            await append_audit(connection, now, operator.name, "join_token.new", msgspec.structs.asdict(request))
        return json_response(JoinTokenAnswer(token, now + request.expires_s, request.uses), 201)

    async def audit(self, http: web.Request) -> web.StreamResponse:
        await self.sign_in.require(http, "viewer")
        after = number(http, "after", 0, most=1 << 53)
        async with self.plane.store.read() as connection:
            rows = await read_audit(connection, after, max(1, number(http, "limit", 500)))
        return json_response(AuditPage(tuple(rows)))

    async def fleet(self, http: web.Request) -> web.StreamResponse:
        await self.sign_in.require(http, "viewer")
        async with self.plane.store.read() as connection:
            counts = await count_devices(connection, self.plane.clock() - RECENT_S)
            figures = await cohort_figures(connection, self.plane.clock() - RECENT_S)
            records, _ = await working_rollouts(connection)
        names = dict.fromkeys((*self.plane.fleet.cohorts, *(count.cohort for count in counts)))
        cohorts = []
        for name in names:
            of_cohort = [count for count in counts if count.cohort == name]
            rollouts = (one.rollout for one in records if one.rollout.cohort == name)
            cohorts.append(
                CohortAnswer(
                    name,
                    sum(count.devices for count in of_cohort),
                    sum(count.recently_seen for count in of_cohort),
                    {count.running or "": count.devices for count in of_cohort},
                    next((one.id for one in rollouts if one.state not in ENDED), None),
                    self.controller.ahead.get(name, 0),
                    figures.get(name, CohortFigures()),
                )
            )
        return json_response(FleetAnswer(self.plane.fleet.name, tuple(cohorts), self.controller.problems))

    async def rollouts(self, http: web.Request) -> web.StreamResponse:
        await self.sign_in.require(http, "viewer")
        async with self.plane.store.read() as connection:
            records = await list_rollouts(connection, http.query.get("cohort", ""), readable=True)
        return json_response([rollout_answer(record) for record in records])

    async def rollout(self, http: web.Request) -> web.StreamResponse:
        await self.sign_in.require(http, "viewer")
        name = path_part(http)
        async with self.plane.store.read() as connection:
            record = await read_rollout(connection, name)
            if record is None:
                raise NotFound(f"Rollout {name} not found.")
            looks = await read_looks(connection, name)
            rows = await audit_of(connection, name)
            devices = await cohort_devices(connection, record.rollout.cohort)
            evidence = await read_evidence(connection, record.rollout.cohort, records=False)
        to_bundle = record.rollout.to_bundle
        members = {device.id for device in devices if device.running == to_bundle}
        compared = happened(record.rollout.predictions, evidence, to_bundle, members)
        events = tuple(RolloutEventAnswer(row.at, row.actor, row.action, _reason(row.what)) for row in rows)
        states = _members(record, devices, self.plane.clock())
        return json_response(rollout_detail(record, tuple(looks), states, events, compared))

    async def begin(self, http: web.Request) -> web.StreamResponse:
        operator = await self.sign_in.require(http, "operator")
        request = decode_body(await read_body(http), NewRollout)
        record = await begin_rollout(
            self.plane.store, self.plane.folder, self.publisher, operator, request, self.plane.clock()
        )
        self.controller.notify()
        return json_response(rollout_answer(record), 201)

    async def decide(self, action: str, http: web.Request) -> web.StreamResponse:
        event, role = _EVENTS[action]
        operator = await self.sign_in.require(http, role)
        reason = decode_body(await read_body(http) or b"{}", OperatorReason).reason
        record = await decide(self.plane.store, path_part(http), event, reason, operator, self.plane.clock())
        self.controller.notify()
        return json_response(rollout_answer(record))

    async def policies(self, http: web.Request) -> web.StreamResponse:
        await self.sign_in.require(http, "viewer")
        bundles = [http.query.get(side, "") for side in ("from", "to")]
        if not all(bundles):
            raise InvalidRequest("Give two bundle ids: ?from=BUNDLE&to=BUNDLE.", param="from")
        texts = [await to_thread.run_sync(policy_text, self.publisher, bundle) for bundle in bundles]
        return json_response(PolicyPair(*texts))

    async def try_policy(self, http: web.Request) -> web.StreamResponse:
        await self.sign_in.require(http, "operator")
        draft = decode_body(await read_body(http), PolicyDraft)
        manifest = await to_thread.run_sync(self.publisher.manifest, draft.bundle)
        old = await to_thread.run_sync(policy_text, self.publisher, draft.bundle)
        assert manifest is not None
        async with self.plane.store.read() as connection:
            records = await read_records(connection, manifest.cohort)
        recorded = [one.record for one in records]
        work = partial(run_apart, 3 * DRAFT_S, try_draft, draft.policy, old, recorded, manifest.adapters)
        return json_response(await to_thread.run_sync(work, limiter=self.trying))


def operator_routes(api: OperatorApi) -> list[ApiRoute]:
    """Return the routes of operators, except those of sign-in."""
    return [
        ApiRoute("GET", "/v1/devices", api.devices),
        ApiRoute("GET", "/v1/devices/{id}", api.device),
        *(ApiRoute("POST", f"/v1/devices/{{id}}/{action}", partial(api.act, action)) for action in _ACTIONS),
        ApiRoute("POST", "/v1/devices/{id}/erase", api.erase),
        ApiRoute("POST", "/v1/join-tokens", api.join_token),
        ApiRoute("GET", "/v1/audit", api.audit),
        ApiRoute("GET", "/v1/fleet", api.fleet),
        ApiRoute("GET", "/v1/rollouts", api.rollouts),
        ApiRoute("POST", "/v1/rollouts", api.begin),
        ApiRoute("GET", "/v1/rollouts/{id}", api.rollout),
        *(ApiRoute("POST", f"/v1/rollouts/{{id}}/{action}", partial(api.decide, action)) for action in _EVENTS),
        ApiRoute("GET", "/v1/policies/diff", api.policies),
        ApiRoute("POST", "/v1/policies/try", api.try_policy),
    ]


def path_part(http: web.Request) -> str:
    """Return the id in the path. Raises NotFound if it is not a valid id."""
    value = http.match_info["id"]
    if not value or len(value) > 128:
        raise NotFound(f"{value[:128]!r} not found.")
    return value


def number(http: web.Request, name: str, default: int, most: int = _MOST) -> int:
    """Return a whole number from the query, between 0 and `most`. Raises InvalidRequest."""
    text = http.query.get(name, "")
    if not text:
        return default
    value = whole_number(text, most)
    if value is None:
        raise InvalidRequest(f"`{name}` must be a whole number from 0 to {most}, not {text[:40]!r}.", param=name)
    return value


def policy_text(publisher: Publisher, bundle: str) -> str:
    """Return the policy of a signed bundle. Raises BundleUnknown."""
    manifest = publisher.manifest(bundle)
    path: Path | None = None if manifest is None else publisher.blob(manifest.policy.sha256)
    if path is None or not path.is_file():
        raise BundleUnknown(f"Bundle {bundle[:64]} is not signed, or this control plane does not have its policy.")
    return path.read_text(encoding="utf-8", errors="replace")


def try_draft(
    text: str, old_text: str, records: Sequence[DecisionRecord], adapters: Mapping[str, Sequence[str]]
) -> ProvedDraft:
    """Check a draft, replay records under it, and prove it, for at most `DRAFT_S`."""
    policy, old, report = check_draft(text, old_text, records, adapters)
    proofs = () if policy is None else prove(policy, old, all_s=DRAFT_S)
    return ProvedDraft(**msgspec.structs.asdict(report), proofs=proofs)


def _members(record: RolloutRecord, devices: list[Device], now: float) -> dict[str, int]:
    """Count members by state: the agent's, `silent`, `held`, `pinned`, or `commit` if they run the bundle."""
    rollout = record.rollout
    found: dict[str, int] = {}
    for device in devices:
        if position(rollout.salt, device.id) < rollout.share:
            state = _member_state(record, device, now)
            found[state] = found.get(state, 0) + 1
    return found


def _member_state(record: RolloutRecord, device: Device, now: float) -> str:
    rollout = record.rollout
    if device.pin is not None or device.held:
        return "pinned" if device.pin is not None else "held"
    if is_silent(device.last_seen, rollout.began, now, rollout.settings.silence_s):
        return "silent"
    if rollout.to_bundle in device.quarantined:
        return "quarantine"
    if device.running == rollout.to_bundle and device.state in ("idle", "commit"):
        return "commit"
    return "waiting" if device.state == "idle" else device.state


def _reason(what: msgspec.Raw) -> str:
    return str(msgspec.json.decode(what, type=dict[str, object]).get("reason", ""))


def rollout_answer(record: RolloutRecord) -> RolloutAnswer:
    return RolloutAnswer(**_common(record), looks=record.rollout.looks)


def rollout_detail(
    record: RolloutRecord,
    looks: tuple[LookRecord, ...],
    members: dict[str, int],
    events: tuple[RolloutEventAnswer, ...],
    predictions: tuple[Happened, ...] = (),
) -> RolloutDetail:
    settings = record.rollout.settings
    margins = {limit.name: limit.margin for limit in settings.metrics}
    margins |= {ROLLED_BACK: settings.lost_margin, SILENT: settings.lost_margin}
    return RolloutDetail(
        **_common(record),
        looks=tuple(_look(look, margins) for look in looks),
        members=members,
        events=events,
        notes=record.rollout.notes,
        predictions=predictions,
    )


def device_answer(device: Device, history: tuple[DeviceEvent, ...] = ()) -> DeviceAnswer:
    more = ("history", "erasure")
    same = {name: getattr(device, name) for name in DeviceAnswer.__struct_fields__ if name not in more}
    erasure = None
    if (one := device.erasure) is not None:
        erasure = ErasureAnswer(one.client, one.ordered, one.finished or None, one.receipt)
    return DeviceAnswer(**same, history=history, erasure=erasure)


def _common(record: RolloutRecord) -> dict[str, Any]:
    rollout = record.rollout
    names = ("id", "cohort", "stage", "share", "began", "entered", "reason", "to_bundle", "from_bundle")
    return {name: getattr(rollout, name) for name in names} | {
        "state": rollout.state.value,
        "stages": tuple(stage.share for stage in rollout.settings.stages),
        "author": record.author,
        "created": record.created,
    }


def _look(record: LookRecord, margins: dict[str, float]) -> LookAnswer:
    verdict = msgspec.json.decode(record.verdict_json, type=Verdict)
    metrics = []
    for metric in verdict.metrics:
        sides = ("canary", "control", "low", "high")
        canary, control, low, high = (getattr(metric.difference, side, None) for side in sides)
        names = metric.name, metric.outcome.value, metric.reason
        metrics.append(MetricAnswer(*names, canary, control, low, high, metric.p, margins.get(metric.name)))
    return LookAnswer(record.at, record.stage, verdict.outcome.value, tuple(metrics))
