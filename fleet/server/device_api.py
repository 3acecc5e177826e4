"""The requests of devices (enrol, token, wake, status, telemetry) and of gateways (JWKS, revocations)."""

from __future__ import annotations

import hashlib
import sys
from typing import TypeVar
from urllib.parse import parse_qsl

import anyio
from aiohttp import web

from causeway_server.router.bundle.protocol import (
    MAC_HEADER,
    SIGNATURE_HEADER,
    Enrolment,
    EnrolmentRequest,
    ErasureDone,
    IssuedToken,
    StatusReport,
    Telemetry,
    TokenRequest,
    Wake,
)
from causeway_server.router.errors import AuthenticationFailed, CausewayError, InvalidRequest
from causeway_server.router.serving.aiohttp_connection import json_response
from causeway_server.router.serving.request import one_value

from ..store.devices import Device
from ..store.generations import read_revocations
from ..trust.published import PublishedFolder
from . import refusals
from .enrolment import check_proof
from .messages import Answer, Message, SignedMessage
from .plane import ControlPlane
from .routes import ApiRoute, decode_body, read_body
from .tokens import TOKEN_S

MAX_POLL_S = 300.0
_Message = TypeVar("_Message", StatusReport, Telemetry, TokenRequest, ErasureDone)


class DeviceApi:
    """The handlers of requests from devices and gateways. `enrolled`: the number of enrolled devices."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._published = PublishedFolder(plane.folder)
        self._revocations = (b"", "")  # the document and its ETag for a generation
        self._revocations_of = ""
        self._revocations_turn = anyio.Lock()

    async def enrol(self, http: web.Request) -> web.StreamResponse:
        plane = self._plane
        request = decode_body(await read_body(http), EnrolmentRequest)
        root = self._published.newest("root")
        if root is None:
            raise NotPublished("Nothing is signed yet. Run `causeway-fleet sign` to make the root that devices trust.")
        check_proof(request)
        device = await plane.enrolments.submit(request)
        return json_response(
            Enrolment(
                device=device.id,
                tenant=device.tenant,
                cohort=device.cohort,
                fleet=plane.fleet.name,
                root=root[1].decode(),
            )
        )

    async def token(self, http: web.Request) -> web.StreamResponse:
        answer = await self._submit(http, TokenRequest)
        asked = decode_body(await read_body(http), TokenRequest).certificate_request
        now = self._plane.clock()
        device, key = answer.device, self._plane.key
        authority, fleet = self._plane.authority, self._plane.fleet.name
        certificate = authority.device(fleet, device.tenant, device.id, asked, now) if authority and asked else ""
        return json_response(
            IssuedToken(
                token=key.issue(device.id, device.tenant, now),
                expires_in_s=TOKEN_S,
                now=now,
                cohort=device.cohort,
                report_key=key.report_keys.issue(device.id, now + TOKEN_S),
                certificate=certificate,
            ),
            headers={"cache-control": "no-store"},
        )

    async def status(self, http: web.Request) -> web.StreamResponse:
        return json_response((await self._submit(http, StatusReport)).reply)

    async def telemetry(self, http: web.Request) -> web.StreamResponse:
        await self._submit(http, Telemetry)
        return web.Response(status=204)

    async def erased(self, http: web.Request) -> web.StreamResponse:
        await self._submit(http, ErasureDone)
        return web.Response(status=204)

    async def wake(self, http: web.Request) -> web.StreamResponse:
        """Answer at once if the ETag is out of date, else at the next change."""
        wakes = self._plane.wakes
        await read_body(http)  # bytes after a poll belong to the next request
        device = await self._caller(http)
        etag, wait_s = http.headers.get("if-none-match", ""), _seconds(http.query_string)
        generation = wakes.current(device.cohort)
        headers = {"etag": generation.etag, "cache-control": "no-store"}
        if generation.etag != etag:
            return json_response(Wake(cohort=device.cohort, now=self._plane.clock()), headers=headers)
        if wait_s > 0 and not wakes.closing:  # answered at once if there is no room
            wakes.polls.park(http, device.id, sys.intern(device.cohort), wait_s)
        return web.Response(status=304, headers=headers)

    async def _caller(self, http: web.Request) -> Device:
        """Return the calling device. It is refused if this process knows of its revocation."""
        name = self._plane.key.device_of(http.headers.get("authorization", ""), self._plane.clock())
        revocations = self._plane.wakes.revocations
        device = await self._plane.lookups.submit(name)
        while revocations != self._plane.wakes.revocations:
            revocations = self._plane.wakes.revocations
            device = await self._plane.lookups.submit(name)
        if device.revoked is not None:
            raise refusals.DeviceRevoked(f"{name} was revoked. Enrol with a new key and a new join token.")
        return device

    async def jwks(self, _http: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._plane.key.jwks, content_type="application/json", headers={"cache-control": "max-age=30"}
        )

    async def revocations(self, http: web.Request) -> web.StreamResponse:
        """Answer with the revocations, read once per change, since every gateway polls all the time."""
        async with self._revocations_turn:
            generation = self._plane.wakes.revocations.etag
            if generation != self._revocations_of:
                async with self._plane.store.read() as connection:
                    read = await read_revocations(connection)
                body = bytes(json_response(read).body or b"")  # type: ignore[arg-type]
                self._revocations = (body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
                self._revocations_of = generation
        body, etag = self._revocations
        headers = {"etag": etag, "cache-control": "no-cache"}
        if http.headers.get("if-none-match") == etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _submit(self, http: web.Request, kind: type[_Message]) -> Answer:
        body = await read_body(http)
        message: Message = decode_body(body, kind)
        signature, mac = (one_value(name, http.headers.getall(name, ())) for name in (SIGNATURE_HEADER, MAC_HEADER))
        try:
            return await self._plane.messages.submit(SignedMessage(message, http.path, body, signature, mac))
        except refusals.SignatureInvalid:
            self._check_sender(http, message.device)
            raise

    def _check_sender(self, http: web.Request, device: str) -> None:
        """Refuse a message whose bearer token belongs to another device than the one that the message names."""
        try:
            sender = self._plane.key.device_of(http.headers.get("authorization", ""), self._plane.clock())
        except AuthenticationFailed:
            return
        if sender != device:
            raise refusals.ForeignDevice(
                f"The message names the device {device!r}, but the token belongs to {sender!r}."
            )


class NotPublished(CausewayError, status=503, code="not_published"):
    """The fleet has no signed root yet."""


def device_routes(plane: ControlPlane) -> list[ApiRoute]:
    """Return the routes of devices and gateways."""
    api = DeviceApi(plane)
    return [
        ApiRoute("POST", "/v1/enroll", api.enrol),
        ApiRoute("POST", "/v1/token", api.token),
        ApiRoute("GET", "/v1/wake", api.wake),
        ApiRoute("POST", "/v1/status", api.status),
        ApiRoute("POST", "/v1/telemetry", api.telemetry),
        ApiRoute("POST", "/v1/erasures", api.erased),
        ApiRoute("GET", "/.well-known/jwks.json", api.jwks),
        ApiRoute("GET", "/v1/revocations", api.revocations),
    ]


def _seconds(query: str) -> float:
    """Return the parameter `wait` of a query, in seconds."""
    text = dict(parse_qsl(query)).get("wait", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = float("nan")
    if not wait_s >= 0:
        raise InvalidRequest(f"`wait` must be a number of seconds, not {text[:40]!r}.", param="wait")
    return min(wait_s, MAX_POLL_S)
