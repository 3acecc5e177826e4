"""Routes of devices, join tokens and the audit log."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web
from anyio import to_thread

from router.errors import InvalidRequest, NotFound
from router.serving.responses import json_response

from ..server.routes import ApiRoute, decode_body, read_body
from ..store.audit import append_audit, read_audit
from ..store.devices import device_history, page_of_devices, read_device, set_operator_columns
from ..store.enrolment import new_join_token
from ..store.generations import revoke
from .answers import (
    AuditAnswer,
    AuditPage,
    DeviceAnswer,
    DevicePage,
    JoinTokenAnswer,
    NewJoinToken,
    OperatorReason,
    PinRequest,
    device_answer,
)
from .decisions import BundleUnknown
from .parts import OperatorParts, number, path_part
from .sign_in import ALWAYS

_FILTERS = {
    "cohort": "Only this cohort.",
    "state": "Only this state of the agent, or `revoked`, `cloned`, `held` or `pinned`.",
    "site": "Only this site.",
    "q": "A part of the id.",
    "after": "`next` of the page before.",
    "limit": "At most so many, up to 1000.",
}
_ACTIONS = {
    "revoke": "Refuse its tokens and its key, here and at the gateways, for good.",
    "hold": "Let it keep what it runs.",
    "release": "Let it follow its cohort again: ends a hold and a pin.",
    "pin": "Let it run a bundle of its own.",
}


class DeviceRoutes:
    """The handlers."""

    def __init__(self, parts: OperatorParts) -> None:
        self._parts = parts

    async def devices(self, http: web.Request) -> web.StreamResponse:
        await self._parts.sign_in.require(http, "viewer")
        limit = max(1, number(http, "limit", 100))
        filters = {name: http.query.get(name, "")[:128] for name in ("cohort", "state", "site", "after")}
        async with self._parts.store.read() as connection:
            found = await page_of_devices(connection, **filters, query=http.query.get("q", "")[:128], limit=limit + 1)
        page = found[:limit]
        following = page[-1].id if len(found) > limit else None
        return json_response(DevicePage(tuple(map(device_answer, page)), following))

    async def device(self, http: web.Request) -> web.StreamResponse:
        await self._parts.sign_in.require(http, "viewer")
        name = path_part(http)
        async with self._parts.store.read() as connection:
            device = await read_device(connection, name)
            if device is None:
                raise NotFound(f"there is no device {name}")
            history = await device_history(connection, name)
        return json_response(device_answer(device, tuple(history)))

    async def act(self, action: str, http: web.Request) -> web.StreamResponse:
        parts, name, now = self._parts, path_part(http), self._parts.clock()
        operator = await parts.sign_in.require(http, "operator")
        body = await read_body(http) or b"{}"
        bundle = None
        if action == "pin":
            request = decode_body(body, PinRequest)
            bundle, reason = request.bundle, request.reason
            if await to_thread.run_sync(parts.publisher.manifest, bundle) is None:
                raise BundleUnknown(f"bundle {bundle} is not signed here", param="bundle")
        else:
            reason = decode_body(body, OperatorReason).reason
        async with parts.store.write() as connection:
            if action == "revoke":
                exists = await revoke(connection, name, now)
            else:
                exists = await set_operator_columns(connection, name, held=action == "hold", pin=bundle)
            if not exists:
                raise NotFound(f"there is no device {name}")
            what = {"device": name, "reason": reason} | ({} if bundle is None else {"bundle": bundle})
            await append_audit(connection, now, operator.name, f"device.{action}", what)
            device = await read_device(connection, name)
        assert device is not None
        parts.controller.notify()
        return json_response(device_answer(device))

    async def join_token(self, http: web.Request) -> web.StreamResponse:
        parts, now = self._parts, self._parts.clock()
        operator = await parts.sign_in.require(http, "operator")
        request = decode_body(await read_body(http), NewJoinToken)
        if request.cohort and request.cohort not in parts.cohorts:
            names = ", ".join(parts.cohorts)
            raise InvalidRequest(f"there is no cohort {request.cohort}; the fleet has: {names}", param="cohort")
        async with parts.store.write() as connection:
            token = await new_join_token(connection, **msgspec.structs.asdict(request), now=now)
            await append_audit(connection, now, operator.name, "join_token.new", msgspec.structs.asdict(request))
        return json_response(JoinTokenAnswer(token, now + request.expires_s, request.uses), 201)

    async def audit(self, http: web.Request) -> web.StreamResponse:
        await self._parts.sign_in.require(http, "viewer")
        after = number(http, "after", 0, most=1 << 53)
        async with self._parts.store.read() as connection:
            rows = await read_audit(connection, after, max(1, number(http, "limit", 500)))
        shown = (
            AuditAnswer(row.n, row.at, row.actor, row.action, msgspec.Raw(row.what.encode()), row.previous, row.hash)
            for row in rows
        )
        return json_response(AuditPage(tuple(shown)))


def device_routes(parts: OperatorParts) -> list[ApiRoute]:
    """Return the routes."""
    routes = DeviceRoutes(parts)
    errors = (*ALWAYS, InvalidRequest)
    by_row = {"after": "The row before the page.", "limit": "Up to 1000."}
    return [
        ApiRoute("GET", "/v1/devices", routes.devices, "A page of devices, sorted by id.", "viewer",
                 response=DevicePage, errors=errors, query=_FILTERS),
        ApiRoute("GET", "/v1/devices/{id}", routes.device, "One device and its history.", "viewer",
                 response=DeviceAnswer, errors=(*ALWAYS, NotFound)),
        *(
            ApiRoute("POST", f"/v1/devices/{{id}}/{action}", partial(routes.act, action), summary, "operator",
                     PinRequest if action == "pin" else OperatorReason, DeviceAnswer,
                     errors=(*errors, NotFound, *((BundleUnknown,) if action == "pin" else ())))
            for action, summary in _ACTIONS.items()
        ),
        ApiRoute("POST", "/v1/join-tokens", routes.join_token, "Make a join token; it is shown once.", "operator",
                 NewJoinToken, JoinTokenAnswer, 201, errors),
        ApiRoute("GET", "/v1/audit", routes.audit, "Rows of the audit log, oldest first.", "viewer",
                 response=AuditPage, errors=errors, query=by_row),
    ]  # fmt: skip
