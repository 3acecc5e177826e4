"""Sources of jobs: /v1/jobs and /v1/webhooks/secret over HTTP, in the gateway's shape; their events and acceptance.

Every handler acts for the authenticated client alone. A job from any source is checked, decided once, and stored before
it is acknowledged (`JobIntake`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

import msgspec

from causeway_server.router.decision.abilities import no_route
from causeway_server.router.errors import (
    CausewayError,
    ClientGone,
    InvalidRequest,
    NotFound,
    QueueFull,
    UnsupportedFeature,
)
from causeway_server.router.jobs.job import JobFailed, JobState, WebhookSecrets
from causeway_server.router.jobs.submission import (
    RANK,
    Endpoint,
    answer_text,
    body_digest,
    key_digest,
    parse_job_request,
    split_body,
)
from causeway_server.router.jobs.webhooks import allowed_networks, check_webhook_url
from causeway_server.router.numbers import read_page
from causeway_server.router.openai.answer import error_event
from causeway_server.router.openai.request_body import check_media_type
from causeway_server.router.parts.uploads import FILE_MARK, named_files
from causeway_server.router.policy.signals import modalities
from causeway_server.router.residency import check_webhook_region, region_tags
from causeway_server.router.serving.request import PRIORITY, AiohttpRequest, one_value, read_choice, read_credential
from causeway_server.router.serving.responses import (
    STREAMED,
    EventStream,
    ServerResponse,
    body_response,
    header_lines,
    json_response,
)
from causeway_server.router.trackers import FairShare, network_of
from causeway_server.router.types import Priority, RoutingHints, replace_surrogates

from ..config.schema import OutboxConfig
from ..http.api import RequestReader, routing_hints
from ..serving.service import Service
from . import PATH
from .record import Accepted, EdgeJob, EdgeJobView, ReplyTo, edge_job_view
from .run import JobFeed
from .runner import OutboxRunner
from .store import JobOutbox

_MAX_FOLLOWERS = 64
COMMENT: Final = b": still there\n\n"
_ID = re.compile(r"([0-9]{1,9})-([0-9]{1,9}|wait|end)")
_WAIT, _END = 1 << 40, 1 << 41  # position after all text
_PLACES = {"wait": _WAIT, "end": _END}
_POLL_S = 1.0  # interval of checking a job that does not run
_SILENT_POLLS = 15  # interval of comments that keep proxies from closing the connection
Position = tuple[int, int]
"""A position in a job's event stream: the number of a run, and a number of characters of its text or a later position.
"""


class _EventData(msgspec.Struct, omit_defaults=True):
    event: str
    text: str = ""
    error: msgspec.Raw | None = None


def read_last_id(header: str) -> Position | None:
    """Return the position after which a client continues; None for the start. Raises InvalidRequest."""
    if not header:
        return None
    match = _ID.fullmatch(header)
    if match is None:
        raise InvalidRequest("`Last-Event-ID` must be an id of this stream, or absent.")
    place = _PLACES.get(match[2])
    return int(match[1]), int(match[2]) if place is None else place


def _show_place(place: int) -> str:
    return {_WAIT: "wait", _END: "end"}.get(place, str(place))


class OutboxEventReader:
    """Reads the events of one job after a position: its states, and the text of its answer while it is made. Ids are
    run and position: `2-17` is after 17 characters of run 2, `2-wait` its end before another run, `2-end` the job's. A
    client that reconnects with `Last-Event-ID` gets the events after it; a run that failed is void, and the next begins
    at 0.
    """

    def __init__(self, store: JobOutbox, feed: JobFeed, job_id: str, owner: str, last: Position | None) -> None:
        self._store = store
        self._feed = feed
        self._job_id = job_id
        self._owner = owner
        self._last = last or (-1, 0)

    async def read(self, stopping: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield events until the one that ends the job, or until `stopping`, which may raise CausewayError. Raises
        NotFound or JobStoreUnavailable.
        """
        silent = _SILENT_POLLS  # a client that is up to date gets the response's head at once
        while not stopping():
            job, result = await self._store.get(self._job_id, self._owner)
            events = b"".join(self._states(job, result))
            if events:
                yield events
            if job.has_ended:
                return
            silent = 0 if events else silent + 1
            if silent >= _SILENT_POLLS:
                silent = 0
                yield COMMENT
            text = self._feed.get(job.seq)
            if text is None:
                await self._feed.change(_POLL_S)
                continue
            while not text.ended and not stopping():
                if delta := self._delta(text.run, text.text):
                    silent = 0
                    yield delta
                await text.change(_POLL_S)

    def _states(self, job: EdgeJob, result: bytes) -> list[bytes]:
        run, events = job.run, []
        if job.state is JobState.QUEUED and self._last < (0, 0):
            events.append(self._event((run, 0), "queued"))
        if job.state is JobState.RUNNING and (self._last[0] < run or self._last < (0, 0)):
            events.append(self._event((run, 0), "running"))
        if job.state is JobState.WAITING and self._last < (run, _WAIT):
            events.append(self._event((run, _WAIT), "waiting", job.error))
        if job.has_ended and self._last < (run, _END):
            if job.state is JobState.SUCCEEDED:
                events.append(self._delta(run, answer_text(result)))
            events.append(self._event((run, _END), job.state.value, job.error))
        return events

    def _delta(self, run: int, text: str) -> bytes:
        """Return the text that this client has not received yet; empty if there is none."""
        known = self._last[1] if self._last[0] == run else 0
        if self._last[0] > run or known >= len(text):
            return b""
        return self._event((run, len(text)), "delta", text=text[known:])

    def _event(self, position: Position, name: str, error: bytes = b"", *, text: str = "") -> bytes:
        self._last = position
        run, place = position
        data = msgspec.json.encode(_EventData(name, text, msgspec.Raw(error) if error else None))
        return f"id: {run}-{_show_place(place)}\nevent: {name}\ndata: ".encode() + data + b"\n\n"


class EdgeJobList(msgspec.Struct):
    """The body of `GET /v1/jobs`."""

    data: list[EdgeJobView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class OutboxApi:
    """The request handlers of jobs."""

    def __init__(
        self, store: JobOutbox, runner: OutboxRunner, intake: JobIntake, service: Service, reader: RequestReader
    ) -> None:
        self._store = store
        self._runner = runner
        self._intake = intake
        self._service = service
        self._reader = reader
        self._followers = FairShare(_MAX_FOLLOWERS)

    async def create(self, http: AiohttpRequest) -> ServerResponse:
        """Handle POST /v1/jobs."""
        return self._accepted(await self._accept(http))

    async def respond_async(self, http: AiohttpRequest, endpoint: Endpoint, wait_s: float) -> ServerResponse:
        """Run a plain request as a job; return its answer if that comes within `wait_s`, else 202 with the job. Raises
        JobFailed with the error of a job that ends within that time.
        """
        accepted = await self._accept(http, endpoint)
        job, result = await self._settled(accepted.job, wait_s)
        if not job.has_ended:
            return self._accepted(msgspec.structs.replace(accepted, job=job), {"Preference-Applied": "respond-async"})
        if not result:
            raise JobFailed(job.state.value, job.error)
        headers = {
            "x-causeway-decision": job.decision,
            "x-causeway-route": job.route,
            "x-causeway-cache": job.cache,
            "x-request-id": job.decision,
            "Preference-Applied": "respond-async",
        }
        return body_response(result, headers=headers)

    async def _settled(self, job: EdgeJob, wait_s: float) -> tuple[EdgeJob, bytes]:
        """Wait at most `wait_s` for the end of a job; do not wait if the caller follows too many jobs already."""
        until, waiter = asyncio.get_running_loop().time() + wait_s, object()
        may_wait = self._followers.hold(waiter, network_of(job.owner))
        try:
            while True:
                job, result = await self._store.get(job.id, job.owner)
                left_s = until - asyncio.get_running_loop().time()
                if job.has_ended or left_s <= 0.0 or not may_wait:
                    return job, result
                await self._runner.feed.change(min(left_s, _POLL_S))
        finally:
            self._followers.release(waiter)

    async def _accept(self, http: AiohttpRequest, endpoint: Endpoint | None = None) -> Accepted:
        headers = http.headers
        caller = self._reader.caller(http, "jobs")
        hints = routing_hints(headers, caller)
        check_media_type(headers.get("Content-Type"), headers.get("Content-Encoding"))
        key = key_digest(one_value("idempotency-key", headers.getall("idempotency-key", ())))
        self._service.admit(hints.client)
        body = await self._reader.body(http)
        priority = read_choice(headers, PRIORITY, RANK)
        return await self._intake.accept(
            SubmittedJob(body, hints, priority, key, endpoint=endpoint, most=caller.priority)
        )

    def _accepted(self, accepted: Accepted, headers: Mapping[str, str] = {}) -> ServerResponse:
        replayed = {"Idempotent-Replayed": "true"} if accepted.known else {}
        located = {"Location": f"{PATH}/{accepted.job.id}", **replayed, **headers}
        return self._response(accepted.job, status=202, headers=located)

    async def list(self, http: AiohttpRequest) -> ServerResponse:
        """Handle GET /v1/jobs."""
        owner = self._reader.caller(http, "jobs").name
        limit, after = read_page(http.query)
        jobs = await self._store.list_owned(owner, after, limit + 1)
        rows = [self._view(job) for job in jobs[:limit]]
        first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
        return json_response(EdgeJobList(rows, len(jobs) > limit, first, last))

    async def get(self, http: AiohttpRequest, job_id: str) -> ServerResponse:
        """Handle GET /v1/jobs/{id}."""
        job, result = await self._store.get(job_id, self._reader.caller(http, "jobs").name)
        return json_response(self._view(job, result))

    async def change(self, http: AiohttpRequest, job_id: str, part: str) -> ServerResponse:
        """Handle DELETE /v1/jobs/{id}, POST /v1/jobs/{id}/retry and POST /v1/jobs/{id}/purge."""
        changes = {"": self._store.cancel, "retry": self._store.retry, "purge": self._store.purge}
        job = await changes[part](job_id, self._reader.caller(http, "jobs").name)
        self._runner.stop_job(job)
        self._runner.wake()
        return self._response(job)

    async def events(self, http: AiohttpRequest, job_id: str) -> ServerResponse:
        """Handle GET /v1/jobs/{id}/events."""
        owner = self._reader.caller(http, "jobs").name
        last = read_last_id(http.headers.get("last-event-id", ""))
        await self._store.get(job_id, owner)  # an unknown job is a 404
        if not self._followers.hold(id(http), network_of(owner)):
            raise QueueFull(
                (
                    f"You have {self._followers.held_by(network_of(owner))} open event streams on this device, which "
                    f"is your share of {_MAX_FOLLOWERS}. Poll the job instead."
                ),
                retry_after_s=5.0,
            )
        try:
            return await self._stream_events(http, job_id, owner, last)
        finally:
            self._followers.release(id(http))

    async def _stream_events(
        self, http: AiohttpRequest, job_id: str, owner: str, last: Position | None
    ) -> ServerResponse:
        stream = EventStream(http, header_lines(STREAMED))
        try:
            if http.method == "HEAD":
                stream.send_head()
                return stream
            credential = read_credential(http)
            reader = OutboxEventReader(self._store, self._runner.feed, job_id, owner, last)

            def stopping() -> bool:
                self._reader.check_again(credential)
                return self._service.draining

            async for events in reader.read(stopping):
                stream.send(events)
                await stream.drain()
            stream.end()
        except ClientGone:
            raise
        except CausewayError as error:  # the client reconnects with its Last-Event-ID
            stream.end(error_event(error))
        return stream

    async def secret(self, http: AiohttpRequest) -> ServerResponse:
        """Handle GET /v1/webhooks/secret, and POST, which makes a new secret."""
        owner, rotate = self._reader.caller(http, "jobs").name, http.method == "POST"
        if rotate:
            self._service.admit(owner)
        secrets_now = await self._store.run(self._store.webhooks.secrets, owner, rotate=rotate)
        body = WebhookSecrets(secrets_now[0], secrets_now[1] if len(secrets_now) > 1 else None)
        return json_response(body, headers={"Cache-Control": "no-store"})

    def _view(self, job: EdgeJob, result: bytes = b"") -> EdgeJobView:
        return edge_job_view(job, self._store.time.now(), self._store.time.unix(), result)

    def _response(self, job: EdgeJob, *, status: int = 200, headers: Mapping[str, str] = {}) -> ServerResponse:
        return json_response(self._view(job), status=status, headers=headers)


class SubmittedJob(msgspec.Struct, frozen=True):
    """A job as submitted. Requests of a client with the same Idempotency key are the same job; "": each is another job.
    `digest` covers all that must be the same under a key; "": body, tags, preference and priority. `endpoint`: set for
    a plain request, which may not be streamed; None: the body names it.
    """

    body: bytes  # an OpenAI request, with the fields of a job
    hints: RoutingHints  # the routing hints of the client
    priority: Priority | None = None  # the priority for a body that names none
    key: str = ""
    digest: str = ""
    endpoint: Endpoint | None = None
    reply: ReplyTo | None = None  # destination of the answer; None: the client fetches it
    most: Priority = "interactive"  # highest priority that the client may have; a higher one is lowered to it


class JobIntake:
    """Accepts jobs. `reader`: replaces the ids of a client's uploaded files in a body by their bytes."""

    def __init__(
        self, config: OutboxConfig, store: JobOutbox, runner: OutboxRunner, service: Service, reader: RequestReader
    ) -> None:
        """Create the intake. Raises ConfigError for invalid `jobs.webhooks.allowed_networks`."""
        self._reader = reader
        self._config = config
        self._networks = allowed_networks(config.webhooks.allowed_networks)
        self._store = store
        self._runner = runner
        self._service = service

    async def accept(self, submitted: SubmittedJob) -> Accepted:
        """Check a job and store it, safe from a power cut. CausewayError: it is invalid, or there is no room."""
        job, plain = await self._job(submitted, await self._whole(submitted))
        try:
            return await self._store.accept(job, plain, submitted.reply)
        finally:  # also if the client disconnected during the commit: the job is stored
            self._runner.wake()

    async def _whole(self, job: SubmittedJob) -> bytes:
        """Return the body with its uploaded files inlined, so that an accepted job does not depend on them. One
        submitted again under its key is known even if its files have been deleted.
        """
        if FILE_MARK not in job.body:
            return job.body
        if job.reply is not None and named_files(job.body) is not None:
            raise UnsupportedFeature("Messages cannot name uploaded files. Send the bytes as a data: URL in base64.")
        try:
            return await self._reader.with_files(job.body, job.hints.client)
        except NotFound:
            if await self._store.known(job.hints.client, job.key) is None:
                raise
            return job.body

    async def _job(self, submitted: SubmittedJob, whole: bytes) -> tuple[EdgeJob, bytes]:
        """Check a `submitted` job, `whole` with its uploaded files; return it with its request. Raises InvalidRequest,
        ModelNotFound, UnsupportedFeature or NoRoute.
        """
        hints, endpoint, key = submitted.hints, submitted.endpoint, submitted.key
        fields, plain = split_body(whole)
        if endpoint is not None:
            fields = msgspec.structs.replace(fields, endpoint=endpoint)
        if fields.webhook:
            webhooks = self._config.webhooks
            check_webhook_url(fields.webhook, allow_http=webhooks.allow_http, allowed=self._networks)
        request = parse_job_request(fields.endpoint, plain, hints)
        await self._service.bind_session(request)
        if modalities(request) != ["text"] and not self._config.accept_parts:
            message = (
                "this device does not store audio, images or files on its disk, where jobs wait "
                "(`jobs.accept_parts`): send a plain request"
            )
            raise UnsupportedFeature(message, param="messages")
        if endpoint is not None and request.stream:
            message = "an answer is either streamed or becomes a job: leave out `stream` or `Prefer: respond-async`"
            raise InvalidRequest(message, param="stream")
        decision = await self._service.preview(request)
        if not decision.attempts:
            raise no_route(decision)
        if decision.regions is not None:
            check_webhook_region(frozenset(decision.regions), fields.webhook, self._config.webhooks.regions)
        now = self._store.time.now()
        time_ms = fields.deadline_ms or request.hints.deadline_ms or int(self._config.default_deadline_s * 1000.0)
        if time_ms <= fields.not_before_ms:
            message = f"`not_before_ms` must be less than the deadline, which is in {time_ms} ms"
            raise InvalidRequest(message, param="not_before_ms")
        ranked = max(fields.priority or submitted.priority or "standard", submitted.most, key=RANK.__getitem__)
        digest = body_digest(",".join((ranked, hints.prefer or "", *hints.tags)), submitted.body) if key else ""
        job = EdgeJob(
            owner=hints.client,
            key=key,
            digest=submitted.digest or digest,
            priority=ranked,
            endpoint=fields.endpoint,
            model=request.model,
            # In the form that signals use. The regions bind it also under a policy that no longer does.
            tags=(*map(replace_surrogates, hints.tags), *region_tags(decision.regions)),
            prefer=hints.prefer,
            may_leave=not decision.on_device,
            lane=decision.attempts[0].target.at,
            due=now + fields.not_before_ms / 1000.0,
            deadline=now + min(time_ms / 1000.0, self._config.max_deadline_s),
            accepted_unix=self._store.time.unix(),
            webhook=fields.webhook,
        )
        return job, plain
