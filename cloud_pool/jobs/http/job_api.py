"""Jobs over HTTP. Every handler acts for the principal whom the gateway authenticated: nothing of others is seen."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import anyio
import msgspec
from aiohttp import hdrs, web

from router.errors import ClientGone, InvalidRequest, MethodNotAllowed, QueueFull
from router.openai import error_event

from ...accounts.identity.principal import Principal
from ...accounts.tenants.config import TenantLimits
from ...http.request_reader import read_body, read_headers
from ...http.responses import JSON, STALLED_S
from ...observability.tracing import JobTrace
from ..config import JobsConfig
from ..errors import JobStoreUnavailable, WebhookDisabled
from ..record import JobView, view
from ..states import JobState
from ..store.durability import DurabilityCheck
from ..store.job_store import JobStore
from ..store.redis_client import RedisClient
from ..submission import JobSubmission, SubmissionParser
from ..webhooks.outbox import WebhookOutbox
from .event_stream import read_last_id, stream_events
from .tracing import enqueue_span

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
OwnedHandler = Callable[[web.BaseRequest, Principal, str], Awaitable[web.StreamResponse]]
IdentifyCaller = Callable[[web.BaseRequest], Principal]
"""Who asks, from the request's headers. Raises AuthenticationFailed."""
_READ_S = 20.0
MAX_PAGE = 100


class Route(msgspec.Struct, frozen=True):
    """`pattern` may hold one group: the id that the handler gets beside the principal."""

    pattern: re.Pattern[str]
    methods: Mapping[str, OwnedHandler]


class _JobList(msgspec.Struct):
    data: list[JobView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class _WebhookSecrets(msgspec.Struct):
    secret: str
    previous: str | None
    object: str = "webhook.secret"


class JobApi:
    """`limits` are a principal's own, where its tenant has any."""

    def __init__(
        self,
        config: JobsConfig,
        database: RedisClient,
        store: JobStore,
        intake: SubmissionParser,
        hooks: WebhookOutbox,
        durability: DurabilityCheck,
        who: IdentifyCaller,
        limits: Callable[[Principal], TenantLimits],
        trace: JobTrace | None = None,
    ) -> None:
        self._config = config
        self._db = database
        self._store = store
        self._intake = intake
        self._hooks = hooks
        self._durability = durability
        self._who = who
        self._limits = limits
        self._trace = trace
        self._streams = 0
        self.routes: list[Route] = [
            route("/v1/jobs", POST=self._create, GET=self._list),
            route(r"/v1/jobs/([\w.-]{1,80})", GET=self._get, DELETE=self._cancel),
            route(r"/v1/jobs/([\w.-]{1,80})/events", GET=self._events),
            route("/v1/webhooks/secret", GET=self._get_secret, POST=self._rotate_secret),
        ]

    def handler(self, http: web.BaseRequest) -> Handler | None:
        """None: the path is not one of ours. Raises MethodNotAllowed."""
        for one in self.routes:
            found = one.pattern.fullmatch(http.path)
            if found is None:
                continue
            handle = one.methods.get(http.method)
            if handle is None:
                raise MethodNotAllowed(f"{http.method} is not possible here. Use {' or '.join(one.methods)}.")
            return partial(self._handle, handle, found[1] if found.re.groups else "")
        return None

    async def _handle(self, handle: OwnedHandler, name: str, http: web.BaseRequest) -> web.StreamResponse:
        principal = self._who(http)
        principal.require("jobs")
        return await handle(http, principal, name)

    async def _create(self, http: web.BaseRequest, principal: Principal, _: str) -> web.StreamResponse:
        inbound = read_headers(http.headers)
        limits = self._limits(principal)
        body = await read_body(http, limits.body_bytes(self._config.max_body_bytes), _READ_S)
        ask = JobSubmission(
            owner=principal.owner,
            body=body,
            priority=inbound.priority,
            deadline_ms=inbound.deadline_ms,
            key=http.headers.get("idempotency-key", ""),
            tags=inbound.tags,
        )
        offer = self._intake.offer(ask, self._store.now_ms, limits)
        await self._durability.ensure()
        if offer.webhook and await self._hooks.is_disabled(principal.owner, offer.webhook):
            raise WebhookDisabled("`webhook` answered 410 Gone: it gets nothing for now", param="webhook")
        with enqueue_span(self._trace, offer.id, offer.tier, inbound.traceparent) as traceparent:
            accepted = await self._store.accept(msgspec.structs.replace(offer, traceparent=traceparent))
        record = await self._store.get(accepted.id, principal.owner)
        headers = {"location": f"/v1/jobs/{record.id}"} | ({"idempotent-replayed": "true"} if accepted.known else {})
        return reply(view(record), 202, headers)

    async def _get(self, http: web.BaseRequest, principal: Principal, job: str) -> web.StreamResponse:
        record = await self._store.get(job, principal.owner)
        result = await self._store.result(job) if record.state is JobState.SUCCEEDED else b""
        return reply(view(record, result))

    async def _list(self, http: web.BaseRequest, principal: Principal, _: str) -> web.StreamResponse:
        limit, after = page(http)
        found = await self._store.owned(principal.owner, after=after, limit=limit + 1)
        rows = [view(record) for record in found[:limit]]
        first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
        return reply(_JobList(rows, len(found) > limit, first, last))

    async def _cancel(self, http: web.BaseRequest, principal: Principal, job: str) -> web.StreamResponse:
        await self._store.cancel(job, principal.owner)
        return reply(view(await self._store.get(job, principal.owner)))

    async def _events(self, http: web.BaseRequest, principal: Principal, job: str) -> web.StreamResponse:
        last = read_last_id(http.headers.get("last-event-id", ""))
        await self._store.get(job, principal.owner)
        if self._streams >= self._config.max_event_streams:
            raise QueueFull("Too many clients follow events here. Ask for the job itself.", retry_after_s=5.0)
        self._streams += 1
        try:
            return await self._stream_events(http, job, last)
        finally:
            self._streams -= 1

    async def _stream_events(self, http: web.BaseRequest, job: str, last: str) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(http)
        try:
            async for data in stream_events(self._db, job, last):
                await _write(response, data)
        except JobStoreUnavailable as error:
            await _write(response, error_event(error))  # the client comes back with its Last-Event-ID
        return response

    async def _get_secret(self, http: web.BaseRequest, principal: Principal, _: str) -> web.StreamResponse:
        return _secrets_response(await self._hooks.keys(principal.owner))

    async def _rotate_secret(self, http: web.BaseRequest, principal: Principal, _: str) -> web.StreamResponse:
        return _secrets_response(await self._hooks.keys(principal.owner, rotate=True))


def route(pattern: str, **methods: OwnedHandler) -> Route:
    return Route(re.compile(pattern), methods)


def reply(body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON, headers=headers)


def page(http: web.BaseRequest) -> tuple[int, str]:
    """`limit` and `after` of the query. Raises InvalidRequest."""
    limit = http.query.get("limit", "20")
    if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_PAGE:
        raise InvalidRequest(f"`limit` is 1 to {MAX_PAGE}", param="limit")
    return int(limit), http.query.get("after", "")[:80]


def _secrets_response(keys: tuple[str, ...]) -> web.Response:
    return reply(_WebhookSecrets(keys[0], keys[1] if len(keys) > 1 else None), headers={hdrs.CACHE_CONTROL: "no-store"})


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        with anyio.fail_after(STALLED_S):
            await response.write(data)
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone("the client does not take the events any more") from error
