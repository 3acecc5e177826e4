"""/v1/jobs over HTTP, in the gateway's shape. Every handler acts for the authenticated client alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
from aiohttp import hdrs, web

from router.decision.attempts import no_route
from router.errors import CausewayError, ClientGone, InvalidRequest, QueueFull, UnsupportedFeature
from router.jobs.submission import Priority, key_digest, parse_job_request, split_body
from router.openai import check_media_type, error_event
from router.types import RoutingHints

from ..config.schema import JobsConfig
from ..http.request_reader import RequestReader, routing_hints
from ..http.responses import EVENTS, JSON, SERVER, EventStream
from ..serving.service import Service
from .entry import PATH
from .events import EventReader, read_last_id
from .record import EdgeJob, EdgeJobFields, EdgeJobView, edge_job_view
from .runner import JobRunner
from .store import JobStore

_PRIORITIES: Mapping[str, Priority] = {"interactive": "interactive", "standard": "standard", "bulk": "bulk"}
_MOST_LISTED = 100
_MOST_FOLLOWERS = 64
_encoder = msgspec.json.Encoder()


class JobList(msgspec.Struct):
    """The body of `GET /v1/jobs`."""

    data: list[EdgeJobView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class JobApi:
    """The handlers of jobs."""

    def __init__(
        self, config: JobsConfig, store: JobStore, runner: JobRunner, service: Service, reader: RequestReader
    ) -> None:
        self._config = config
        self._store = store
        self._runner = runner
        self._service = service
        self._reader = reader
        self._followers = 0

    async def create(self, http: web.BaseRequest) -> web.StreamResponse:
        """POST /v1/jobs"""
        headers = http.headers
        hints = routing_hints(headers, self._reader.caller(http))
        check_media_type(headers.get(hdrs.CONTENT_TYPE), headers.get(hdrs.CONTENT_ENCODING))
        key = key_digest(headers.get("idempotency-key", ""))
        self._service.admit(hints.client)
        body = await self._reader.body(http)
        job, plain = await self._job(body, hints, _priority(headers), key)
        accepted = await self._store.accept(job, plain)
        if not accepted.known:
            self._runner.wake()
        replayed = {"Idempotent-Replayed": "true"} if accepted.known else {}
        return self._response(accepted.job, status=202, headers={"Location": f"{PATH}/{accepted.job.id}"} | replayed)

    async def _job(
        self, body: bytes, hints: RoutingHints, priority: Priority | None, key: str
    ) -> tuple[EdgeJob, bytes]:
        """The checked job, and its request. Raises InvalidRequest, ModelNotFound, UnsupportedFeature or NoRoute."""
        fields, plain = split_body(body, EdgeJobFields)
        if fields.webhook:
            raise UnsupportedFeature("a device sends no webhooks: leave `webhook` out", param="webhook")
        request = parse_job_request(fields.endpoint, plain, hints)
        decision = await self._service.preview(request)
        if not decision.attempts:
            raise no_route(decision)
        now = self._store.time.now()
        time_ms = fields.deadline_ms or request.hints.deadline_ms or int(self._config.default_deadline_s * 1000.0)
        if time_ms <= fields.not_before_ms or fields.not_before_ms < 0 or time_ms < 0:
            raise InvalidRequest("`not_before_ms` is at least 0 and less than the deadline", param="not_before_ms")
        ranked = fields.priority or priority or "standard"
        job = EdgeJob(
            owner=hints.client,
            key=key,
            digest=_digest(body, hints, ranked) if key else "",
            priority=ranked,
            endpoint=fields.endpoint,
            model=request.model,
            tags=hints.tags,
            prefer=hints.prefer,
            may_leave=not decision.on_device,
            lane=decision.attempts[0].target.at,
            due=now + fields.not_before_ms / 1000.0,
            deadline=now + min(time_ms / 1000.0, self._config.max_deadline_s),
            accepted_unix=self._store.time.unix(),
        )
        return job, plain

    async def list(self, http: web.BaseRequest) -> web.StreamResponse:
        """GET /v1/jobs"""
        owner = self._reader.caller(http).name
        limit, after = _page(http.query)
        jobs = await self._store.list_owned(owner, after, limit + 1)
        rows = [self._view(job) for job in jobs[:limit]]
        first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
        return _json(JobList(rows, len(jobs) > limit, first, last))

    async def get(self, http: web.BaseRequest, job_id: str) -> web.StreamResponse:
        """GET /v1/jobs/{id}"""
        job, result = await self._store.get(job_id, self._reader.caller(http).name)
        return _json(self._view(job, result))

    async def cancel(self, http: web.BaseRequest, job_id: str) -> web.StreamResponse:
        """DELETE /v1/jobs/{id}"""
        job = await self._store.cancel(job_id, self._reader.caller(http).name)
        self._runner.stop_job(job)
        return self._response(job)

    async def events(self, http: web.BaseRequest, job_id: str) -> web.StreamResponse:
        """GET /v1/jobs/{id}/events"""
        owner = self._reader.caller(http).name
        last = read_last_id(http.headers.get("last-event-id", ""))
        await self._store.get(job_id, owner)  # an unknown job is a 404
        if self._followers >= _MOST_FOLLOWERS:
            raise QueueFull("too many clients follow events here; poll the job instead", retry_after_s=5.0)
        stream = EventStream(http, f"Content-Type: {EVENTS}\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n")
        self._followers += 1
        try:
            reader = EventReader(self._store, self._runner.feed, job_id, owner, last)
            async for events in reader.read(lambda: self._service.draining):
                stream.send(events)
                await stream.drain()
            stream.end()
        except CausewayError as error:  # the client reconnects with its Last-Event-ID
            stream.end(error_event(error))
        except ConnectionError as error:
            raise ClientGone(str(error)) from error
        finally:
            self._followers -= 1
        return stream

    async def retry(self, http: web.BaseRequest, job_id: str) -> web.StreamResponse:
        """POST /v1/jobs/{id}/retry"""
        job = await self._store.retry(job_id, self._reader.caller(http).name)
        self._runner.wake()
        return self._response(job)

    async def purge(self, http: web.BaseRequest, job_id: str) -> web.StreamResponse:
        """POST /v1/jobs/{id}/purge"""
        return self._response(await self._store.purge(job_id, self._reader.caller(http).name))

    def _view(self, job: EdgeJob, result: bytes = b"") -> EdgeJobView:
        return edge_job_view(job, self._store.time.now(), self._store.time.unix(), result)

    def _response(self, job: EdgeJob, *, status: int = 200, headers: Mapping[str, str] = {}) -> web.Response:
        return _json(self._view(job), status=status, headers=headers)


def _priority(headers: Mapping[str, str]) -> Priority | None:
    """Raises InvalidRequest."""
    text = headers.get("x-causeway-priority")
    if text is None:
        return None
    if text not in _PRIORITIES:
        known = ", ".join(_PRIORITIES)
        raise InvalidRequest(f"`x-causeway-priority` must be one of {known}, not {text[:32]!r}")
    return _PRIORITIES[text]


def _digest(body: bytes, hints: RoutingHints, priority: Priority) -> str:
    """Of everything that must be the same under the same Idempotency-Key."""
    headers = ",".join((priority, hints.prefer or "", *hints.tags)).encode("utf-8", "replace")
    return hashlib.sha256(headers + b"\0" + body).hexdigest()


def _page(query: Mapping[str, str]) -> tuple[int, str]:
    """`limit` and `after`. Raises InvalidRequest."""
    text = query.get("limit", "20")
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST_LISTED:
        raise InvalidRequest(f"`limit` must be a number from 1 to {_MOST_LISTED}, not {text[:32]!r}", param="limit")
    return int(text), query.get("after", "")


def _json(value: object, *, status: int = 200, headers: Mapping[str, str] = {}) -> web.Response:
    fields = {"Content-Type": JSON, "Server": SERVER, **headers}
    return web.Response(status=status, body=_encoder.encode(value), headers=fields)
