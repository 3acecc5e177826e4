"""The routes /v1/jobs and /v1/webhooks/secret. Every handler acts only for the authenticated principal."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import anyio
import msgspec

from causeway_server.router import errors
from causeway_server.router.jobs.job import JobFailed, JobState, JobView, WebhookSecrets, wait_of
from causeway_server.router.jobs.submission import ENDPOINTS, Endpoint, key_digest
from causeway_server.router.numbers import read_page
from causeway_server.router.openai.answer import error_event
from causeway_server.router.parts.uploads import FILE_MARK
from causeway_server.router.residency import permits, regions_of
from causeway_server.router.serving.logs import REQUEST
from causeway_server.router.serving.request import TAGS, AiohttpRequest, allowed_methods, read_tags, served_method
from causeway_server.router.serving.responses import (
    STALLED_S,
    STREAMED,
    Handler,
    ServerResponse,
    body_response,
    json_response,
)
from causeway_server.router.trackers import FairShare

from ...accounts.audit import AuditLog, AuditRecord
from ...accounts.tenants.config import TenantLimits
from ...cache.caching_service import STATUS_HEADER
from ...core.principal import Principal, Scope
from ...core.request_context import BodyMemory
from ...degradation.tier_sessions import TierSessions
from ...http.request_admission import read_body, read_headers
from ...storage.config import JobsConfig
from ...storage.record import JobRecord, job_view
from ...storage.stores import JobStores
from ..submission import CheckCost, JobSubmission, NamedFileReader, SubmissionParser, submission_digest
from .event_stream import EventReader, Position, read_last_id

if TYPE_CHECKING:
    from aiohttp import web

    from ...observability.tracing import JobTrace

ACCEPTED = "accepted"
NO_AUDIT: Final = AuditLog("")
AcceptedKind = Literal["job", "batch"]
OwnedHandler = Callable[[AiohttpRequest, Principal, str], Awaitable[ServerResponse]]
"""Handles a request, given the request, its principal and the id in its path."""
ROWS_A_READ = 10  # of a list: a read more
IdentifyCaller = Callable[[AiohttpRequest], Principal]
"""Returns the principal of a request's headers. Raises AuthenticationFailed."""
AdmitSubmission = Callable[[Principal], Awaitable[None]]
AdmitReads = Callable[[Principal, int], Awaitable[None]]
"""Counts a submission or reads against a tenant's rate. Raises RateLimited."""
_READ_S = 20.0
_PLAIN: Final[Mapping[str, Endpoint]] = {each: each for each in ENDPOINTS}
_APPLIED: Final = {"preference-applied": "respond-async"}
log = logging.getLogger(__name__)


class WebhookDisabled(errors.InvalidRequest, code="webhook_disabled"):
    """The URL has answered 410 Gone, so no webhooks are sent to it for now."""


def acceptance(principal: Principal, kind: AcceptedKind, name: str, tier: str, created_ms: int) -> AuditRecord:
    """Return the audit record of an acceptance, written before the caller is told."""
    return AuditRecord(
        at=created_ms / 1000.0,
        id=name,
        tenant=principal.tenant,
        device=principal.device,
        token_id=principal.token_id,
        policy="",
        route=kind,
        tier=tier,
        outcome=ACCEPTED,
    )


class Route(msgspec.Struct, frozen=True):
    """A path (`pattern` may hold the handler's id), its handlers by method, and `scopes`: a token needs one."""

    pattern: re.Pattern[str]
    methods: Mapping[str, OwnedHandler]
    scopes: tuple[Scope, ...] = ("jobs",)

    @property
    def path(self) -> str:
        """Path with `{id}` in place of the group."""
        return re.sub(r"\(.*\)", "{id}", self.pattern.pattern)


def route(pattern: str, scopes: tuple[Scope, ...] = ("jobs",), /, **methods: OwnedHandler) -> Route:
    """Return a route, as `route("/v1/jobs", GET=..., POST=...)`. `scopes`: a token needs one of them."""
    return Route(re.compile(pattern), methods, scopes)


def reads_of_page(request: AiohttpRequest) -> int:
    """Return how many reads a list counts as: one, plus one for every ROWS_A_READ rows. Raises InvalidRequest."""
    limit, _ = read_page(request.query)
    return 1 + limit // ROWS_A_READ


async def begin_response(response: web.StreamResponse, request: AiohttpRequest) -> bool:
    """Send the response's head. Return whether a body follows (not for HEAD). Raises ClientGone if the client left."""
    try:
        await response.prepare(request)
    except ConnectionError as error:
        raise errors.ClientGone("The client left before its response began.") from error
    return request.method != "HEAD"


async def write_chunk(response: web.StreamResponse, data: bytes) -> None:
    """Write to the client. Raises ClientGone if the client left or stopped reading."""
    try:
        with anyio.fail_after(STALLED_S):
            await response.write(data)
    except (ConnectionError, TimeoutError) as error:
        raise errors.ClientGone("The client has stopped reading the stream.") from error


@contextmanager
def enqueue_span(
    trace: JobTrace | None, job: str, queue: str, traceparent: str, tags: Iterable[str] = ()
) -> Iterator[str]:
    """Trace the submission of a job or batch, unless `tags` bind it to regions that are not the collector's.

    Yields the traceparent for the job's later spans: this span's, or without tracing the caller's.
    """
    if trace is None:
        yield traceparent
        return
    if not permits(regions_of(tags), trace.region):
        yield trace.untraced(traceparent)
        return
    span = trace.send(job, queue, traceparent)
    try:
        yield span.traceparent
    except errors.CausewayError as error:
        span.end(error.code)
        raise
    finally:
        span.end()


class JobCallers(msgspec.Struct, frozen=True):
    """The clients of the jobs API, and the limits of their tenants."""

    identify: IdentifyCaller
    limits: Callable[[Principal], TenantLimits] = lambda _: TenantLimits()
    # refuses a job that exceeds its tenant's whole budget, so that it could never run
    check_cost: CheckCost = lambda *_: 0
    # counts a POST against the rate of submissions; None if submissions are not limited
    admit: AdmitSubmission | None = None
    # counts other requests against the rate of reads, by the amount that they read
    admit_reads: AdmitReads | None = None
    region: str = ""  # region of this gateway
    sessions: TierSessions | None = None  # None: sessions are off


class JobList(msgspec.Struct):
    data: list[JobView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


@dataclass(eq=False, repr=False)
class JobApi:
    """Handlers of jobs, and the routes of the whole jobs API."""

    config: JobsConfig
    stores: JobStores
    parser: SubmissionParser
    callers: JobCallers
    trace: JobTrace | None = None
    _: KW_ONLY
    # memory limit of request bodies; the server releases their bytes
    bodies: BodyMemory = field(default_factory=BodyMemory)
    more_routes: Sequence[Route] = ()  # routes of other handlers, such as BatchApi's
    audit: AuditLog = NO_AUDIT  # audit log, which gets a record of each acceptance

    def __post_init__(self) -> None:
        self._files = NamedFileReader(self.stores.files, self.callers.region)
        self._event_streams = FairShare(self.config.max_event_streams)
        self._routes = (
            route("/v1/jobs", POST=self._create, GET=self._list, DELETE=self._cancel_key),
            route(r"/v1/jobs/([\w.-]{1,80})", GET=self._get, DELETE=self._cancel),
            route(r"/v1/jobs/([\w.-]{1,80})/events", GET=self._events),
            route("/v1/webhooks/secret", GET=self._secret, POST=self._secret),
            *self.more_routes,
        )

    @property
    def paths(self) -> Mapping[str, str]:
        """Methods by path; `{id}` stands for an identifier in the path."""
        return {entry.path: ", ".join(entry.methods) for entry in self._routes}

    def handler(self, request: AiohttpRequest) -> Handler | None:
        """Return the handler of a request, or None for a path outside the jobs API. Raises MethodNotAllowed."""
        for candidate in self._routes:
            match = candidate.pattern.fullmatch(request.path)
            if match is None:
                continue
            handle = candidate.methods.get(served_method(request.method, request.headers))
            if handle is None:
                raise errors.MethodNotAllowed(
                    f"{request.method[:20]} is not allowed for this path. Use {' or '.join(candidate.methods)}.",
                    allow=allowed_methods(", ".join(candidate.methods)),
                )
            return partial(self._handle, handle, match[1] if match.re.groups else "", candidate.scopes)
        return None

    async def _handle(
        self, handle: OwnedHandler, name: str, scopes: tuple[Scope, ...], request: AiohttpRequest
    ) -> ServerResponse:
        principal = self.callers.identify(request)
        self.bodies.enter(request, principal.caller)
        principal.require(next((scope for scope in scopes if scope in principal.scopes), scopes[0]))
        tags = read_tags(request.headers.get(TAGS, ""))
        if handle != self._create:  # which is checked once its session is bound
            self.parser.check_store(tags, self.callers.limits(principal))  # also of reads: content leaves the store
        if request.method == "POST":
            if self.callers.admit is not None:
                await self.callers.admit(principal)  # before its body is read
        elif self.callers.admit_reads is not None:
            is_list = not name and request.method != "DELETE"
            await self.callers.admit_reads(principal, reads_of_page(request) if is_list else 1)
        return await handle(request, principal, name)

    async def respond_async(self, request: AiohttpRequest) -> ServerResponse | None:
        """Accept a plain request with `Prefer: respond-async` as a job; return its answer if in time (`wait`), else
        202.

        Returns None if the preference is ignored: for other paths and preferences, for a token without the scope
        `jobs`, and while no job can be accepted. Raises CausewayError for an invalid request, or a job that failed in
        that time.
        """
        wait_s = wait_of(request.headers.getall("Prefer", ()))
        endpoint = _PLAIN.get(request.path) if request.method == "POST" else None
        if wait_s is None or endpoint is None:
            return None
        principal = self.callers.identify(request)
        if "jobs" not in principal.scopes:
            return None
        self.bodies.enter(request, principal.caller)
        try:
            await self.stores.durability.ensure()
        except errors.JobStoreUnavailable as error:
            log.info(
                "A request with `Prefer: wait` cannot become a job now, so it is answered as a plain request: %s",
                error.message,
            )
            return None
        if self.callers.admit is not None:
            await self.callers.admit(principal)
        record, accepted = await self._accept(request, principal, endpoint)
        record = await self._wait_for_end(record, wait_s, principal.caller)
        if not record.ended:
            return _accepted_response(record, accepted | _APPLIED)
        if record.state is not JobState.SUCCEEDED:
            raise JobFailed(record.state.value, record.error)
        headers = {"x-request-id": REQUEST.get(), "x-causeway-tier": record.tier, **accepted, **_APPLIED}
        if record.cache:
            headers[STATUS_HEADER] = record.cache
        return body_response(await self.stores.jobs.read_result(record.id, record.owner), headers=headers)

    async def _wait_for_end(self, record: JobRecord, wait_s: float, caller: str) -> JobRecord:
        """Return the record once it has ended, or after `wait_s`; at once if the caller has too many waits."""
        stream = object()
        if not self._event_streams.hold(stream, caller):
            wait_s = 0.0
        try:
            with suppress(errors.JobStoreUnavailable), anyio.move_on_after(wait_s):  # it is accepted in any case
                async for _ in EventReader(self.stores, record.id, record.owner, with_text=False).read():
                    pass
                return await self.stores.jobs.get(record.id, record.owner)
            return record
        finally:
            self._event_streams.release(stream)

    async def _create(self, request: AiohttpRequest, principal: Principal, _: str) -> ServerResponse:
        await self.stores.durability.ensure()
        return _accepted_response(*await self._accept(request, principal))

    async def _accept(
        self, request: AiohttpRequest, principal: Principal, endpoint: Endpoint | None = None
    ) -> tuple[JobRecord, dict[str, str]]:
        """Return the accepted job, and headers that tell whether it was known. `endpoint`: of a plain request."""
        headers = read_headers(request.headers.items())
        limits = self.callers.limits(principal)
        max_bytes = limits.body_bytes(self.config.max_body_bytes)
        body = sent = await read_body(request, max_bytes, _READ_S, self.bodies, principal)
        key = request.headers.get("idempotency-key", "")
        if FILE_MARK in sent:  # an accepted job has their bytes, so that they may go
            hold = partial(self.bodies.hold, request, principal.caller)
            try:
                body = await self._files.inline(sent, principal.owner, max_bytes, hold)
            except errors.NotFound:
                digest = submission_digest(headers.priority, headers.tags, endpoint, sent)
                known = await self.stores.jobs.known(principal.owner, key_digest(key), digest)
                if not known:
                    raise
                return await self.stores.jobs.get(known, principal.owner), {"idempotent-replayed": "true"}
        submission = JobSubmission(
            principal=principal,
            body=body,
            sent=sent,
            priority=headers.priority,
            deadline_ms=headers.deadline_ms,
            key=key,
            tags=headers.tags,
            endpoint=endpoint,
        )
        return await self.submit(submission, headers.traceparent)

    async def submit(self, submission: JobSubmission, parent: str) -> tuple[JobRecord, dict[str, str]]:
        """Accept a job, and return it as `_accept` does. `parent`: the caller's traceparent. Raises CausewayError."""
        principal = submission.principal
        limits = self.callers.limits(principal)
        job = await self.parser.parse(submission, await self.stores.database.now_ms(), limits)
        if job.webhook and await self.stores.outbox.is_disabled(principal.owner, job.webhook):
            raise WebhookDisabled(
                "The URL in `webhook` has answered 410 Gone, so nothing is delivered to it for now.", param="webhook"
            )
        with enqueue_span(self.trace, job.id, job.tier, parent, job.tags) as traceparent:
            accepted = await self.stores.jobs.accept(msgspec.structs.replace(job, traceparent=traceparent), limits)
        record = await self.stores.jobs.get(accepted.id, principal.owner)
        await self.audit.write(acceptance(principal, "job", record.id, record.tier, record.created))
        return record, {"idempotent-replayed": "true"} if accepted.known else {}

    async def _get(self, _: AiohttpRequest, principal: Principal, job: str) -> ServerResponse:
        check = partial(self._check_region, principal)
        return json_response(job_view(*await self.stores.jobs.read_answer(job, principal.owner, check)))

    def _check_region(self, principal: Principal, record: JobRecord) -> None:
        """Raise OutsideRegion if the content of a job may not be read through this gateway."""
        self.parser.check_store(record.tag_list, self.callers.limits(principal))

    async def _list(self, request: AiohttpRequest, principal: Principal, _: str) -> ServerResponse:
        limit, after = read_page(request.query)
        records = await self.stores.jobs.list_owned(principal.owner, after=after, limit=limit + 1)
        rows = [job_view(record) for record in records[:limit]]
        first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
        return json_response(JobList(rows, len(records) > limit, first, last))

    async def _cancel(self, _: AiohttpRequest, principal: Principal, job: str) -> ServerResponse:
        await self.stores.jobs.cancel(job, principal.owner)
        return json_response(job_view(await self.stores.jobs.get(job, principal.owner)))

    async def _cancel_key(self, request: AiohttpRequest, principal: Principal, _: str) -> ServerResponse:
        """Cancel the job of an Idempotency-Key, for a device that never received the job's id."""
        key = key_digest(request.headers.get("idempotency-key", ""))
        if not key:
            raise errors.InvalidRequest(
                "Send the `Idempotency-Key` of the job that you want to cancel, or its id in the path."
            )
        return await self._cancel(request, principal, await self.stores.jobs.of_key(principal.owner, key))

    async def _events(self, request: AiohttpRequest, principal: Principal, job: str) -> ServerResponse:
        last = read_last_id(request.headers.get("last-event-id", ""))
        self._check_region(principal, await self.stores.jobs.get(job, principal.owner))
        if not self._event_streams.hold(id(request), principal.caller):
            raise errors.QueueFull(
                f"Your tenant has {self._event_streams.held_by(principal.caller)} open event streams on this gateway, "
                f"which is its share of {self.config.max_event_streams} (jobs.max_event_streams). Poll the job "
                "instead.",
                retry_after_s=5.0,
            )
        try:
            return await self._stream_events(request, job, principal.owner, last)
        finally:
            self._event_streams.release(id(request))

    def _still_accepted(self, request: AiohttpRequest) -> None:
        """Raise AuthenticationFailed if the token of a request in progress has expired or is revoked."""
        with suppress(errors.IdentityUnavailable):  # It was accepted, and nothing says that it was revoked since.
            self.callers.identify(request)

    async def _stream_events(self, request: AiohttpRequest, job: str, owner: str, last: Position) -> ServerResponse:
        from aiohttp import web

        response = web.StreamResponse(headers=STREAMED | {"x-request-id": REQUEST.get()})
        if not await begin_response(response, request):
            return response
        try:
            check = partial(self._still_accepted, request)
            async for data in EventReader(self.stores, job, owner, last, check=check).read():
                await write_chunk(response, data)
        except (errors.JobStoreUnavailable, errors.RecordUnreadable, errors.AuthenticationFailed) as error:
            await write_chunk(response, error_event(error))  # the client reconnects with its Last-Event-ID
        return response

    async def _secret(self, request: AiohttpRequest, principal: Principal, _: str) -> ServerResponse:
        rotate = request.method == "POST"
        secrets = await self.stores.outbox.signing_secrets(principal.owner, rotate=rotate)
        body = WebhookSecrets(secrets[0], secrets[1] if len(secrets) > 1 else None)
        return json_response(body, headers={"Cache-Control": "no-store"})


def _accepted_response(record: JobRecord, headers: Mapping[str, str]) -> ServerResponse:
    return json_response(job_view(record), 202, {"location": f"/v1/jobs/{record.id}", **headers})
