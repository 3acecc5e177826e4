"""The cloud as a Backend: any OpenAI-compatible server behind one URL.

An answer is streamed when the client streams, or when its first tokens may be held back for a handoff; otherwise it is
fetched complete. First token and complete answer each have a timeout. A circuit breaker skips a failing server, and a
probe (`connection`) detects when it is back. A 503 with Retry-After does not trip the breaker; the model is skipped
until then. A job is sent as a job (`CloudJobs`) where the server has any.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
from yarl import URL

from causeway_server.router.errors import (
    BreakerOpen,
    CausewayError,
    ClientGone,
    CloudRefused,
    CloudRejected,
    CloudSaturated,
    CloudTimeout,
    CloudUnavailable,
    CloudUnreadable,
    InvalidRequest,
    ModelNotFound,
    TargetNotConfigured,
)
from causeway_server.router.jobs.job import JobEvent
from causeway_server.router.openai.embeddings import decode_embeddings
from causeway_server.router.openai.upstream.decode import decode_answer
from causeway_server.router.openai.upstream.wire import encode_request
from causeway_server.router.residency import check_region
from causeway_server.router.serving.http_client import HttpClientError, HttpResponse, field_lines
from causeway_server.router.serving.upstream.responses import (
    UpstreamCall,
    read_error,
    read_error_body,
    read_whole,
    server_error,
)
from causeway_server.router.serving.upstream.server import (
    PATHS,
    Credentials,
    FixedToken,
    HeaderLines,
    OpenAIServer,
    ServerAddress,
    StreamReader,
)
from causeway_server.router.trackers import Breaker
from causeway_server.router.types import Chunk, CloudSignals, Embeddings, Target

from ...config.schema import CloudConfig
from ..backend import BackendRequest, CloudJobEnded, JobTerms, UpstreamInfo
from .connection import PROBE_S, CloudHealth, CloudProbe, header_lines, tls_files

if TYPE_CHECKING:
    from causeway_server.router.serving.egress.ledger import EgressLedger

_MAX_HEADER = 200  # maximum number of characters that are kept of a response header
_TIMER_STEP_S = 0.005  # timers may fire this much early
_MAX_AWAY_S = 60.0  # upper bound of a server's Retry-After
_FLEET_ADVICE = "it is the fleet's: see `causeway-edge fleet status`, and whether the gateway trusts the fleet"
# The server is healthy: it rejected the request as invalid, or its answer cannot be parsed.
_ANSWERED = (InvalidRequest, CloudRejected, CloudRefused, CloudUnreadable)
NO_INFO = UpstreamInfo("", "", degraded=False)

log = logging.getLogger(__name__)


class CloudBackend:
    """The cloud server: its circuit breaker and the signals about it. `credentials` replace the configured key: read
    for each request, renewed once after a 401. `has_alternative`: the device has other clouds. `now`: monotonic
    seconds.
    """

    def __init__(
        self,
        config: CloudConfig,
        *,
        credentials: Credentials | None = None,
        breaker: Breaker | None = None,
        now: Callable[[], float] = time.monotonic,
        has_alternative: bool = False,
        ledger: EgressLedger | None = None,
    ) -> None:
        self._config = config
        self.now = now
        advice = _FLEET_ADVICE
        if credentials is None:
            advice = f"correct clouds.{config.name}.key or clouds.{config.name}.key_file and restart"
        self.name = config.name
        self.region = config.region
        self.health = CloudHealth(config.url, breaker or Breaker(), now, advice)
        self._probe = CloudProbe(config, self.health, now, has_alternative=has_alternative, ledger=ledger)
        self.address = ServerAddress(
            url=config.url,
            tls=tls_files(config, "" if credentials is None else credentials.certificate_file),
            max_connections=config.max_connections,
            connect_timeout_s=config.connect_timeout_s,
            user_agent="causeway-edge",
        )
        self._server = OpenAIServer(self.address, credentials or FixedToken(config.key), self._probe)
        self._jobs = CloudJobs(config.url, self._server, self._probe, now)
        self._skip_until: dict[str, float] = {}  # time until which a model is skipped, from Retry-After

    async def start(self) -> None:
        """Prepare the client, without connecting. Raises ConfigError for unusable certificates."""
        self._server.start()

    async def close(self) -> None:
        self._probe.close()
        await self._server.close()

    async def watch(self) -> None:
        """Probe the server forever, except while its responses show that it is reachable."""
        await self._probe.watch(self._server)

    async def probe(self) -> bool:
        """Return whether the server answers, with any HTTP status. Updates the signals."""
        return await self._probe.probe(self._server)

    def signals(self) -> CloudSignals:
        now = self.now()
        return CloudSignals(
            reachable=self.health.reachable,
            rtt_ms=self._probe.rtt_ms(now),
            breaker=self.health.breaker.state(now),
            tier=self._probe.tier,
            unavailable_models=self._skipped(now) if self._skip_until else (),
        )

    # --- Backend -----------------------------------------------------------------------------------------------------

    def complete(self, call: BackendRequest) -> Awaitable[Sequence[Chunk]] | None:
        streams = call.job is None and (call.request.stream or call.confidence_tokens > 0)
        return None if streams else self._complete(call)

    async def _complete(self, call: BackendRequest) -> Sequence[Chunk]:
        with _Guard(self, call, streams=False):
            if call.job is not None and (answer := await self._jobs.answer(call, call.job)) is not None:
                return decode_answer(answer, call.id)
            body = encode_request(call.request, call.target.model, stream=False)
            until = min(call.deadline, call.first_token_by)
            return decode_answer(await self._fetch(call, body, until), call.id)

    @property
    def is_ready(self) -> bool:
        """Whether `begin` may send a request: the server is well, no model is skipped, and a connection is idle."""
        is_well = self.health.reachable is not False and self.health.breaker.state(self.now()) == "closed"
        return is_well and not self._skip_until and self._server.is_ready

    def begin(self, call: BackendRequest) -> HttpResponse | None:
        """Send a request at once. Returns its response, whose head is yet to arrive; None if no connection is idle. The
        caller awaits the answer with `BackendRequest.begun`, or gets it in callbacks: `answered`, `reader`,
        `succeeded`.
        """
        self.asked()
        request, lines = call.request, self._lines(call)
        until = min(call.deadline, call.first_token_by) if request.stream else call.deadline
        return self._server.begin_request(request, call.target.model, until, lines, call.encoded)

    def answered(self, response: HttpResponse) -> None:
        """Record the head of a response to a request that was sent by `begin`."""
        self._probe.answered(response)

    def reader(self, call: BackendRequest, response: HttpResponse) -> StreamReader:
        """Return the reader of a streamed answer, whose head has arrived."""
        call.report_upstream(upstream_info(response))
        return StreamReader(response, _upstream_call(call), min(call.deadline, call.first_token_by))

    def succeeded(self, call: BackendRequest) -> None:
        """Record a good answer to a request that was sent by `begin`."""
        self.health.succeeded()
        self.health.model_answered(call.target.model)

    async def generate(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        if (answer := self.complete(call)) is not None:
            for chunk in await answer:
                yield chunk
            return
        with _Guard(self, call, streams=True):
            begun, reader = (None, None) if call.begun is None else (call.begun.response, call.begun.reader)
            if reader is None:
                until, model, lines = min(call.deadline, call.first_token_by), call.target.model, self._lines(call)
                response = await self._server.post_stream(
                    _upstream_call(call), call.request, model, until, lines, begun
                )
                reader = self.reader(call, response)
            try:
                while chunks := await reader.next():
                    for chunk in chunks:
                        yield chunk
            finally:
                reader.close()  # closes the connection unless the answer is complete, which stops the work

    async def embed(self, call: BackendRequest) -> Embeddings:
        body = encode_request(call.request, call.target.model, stream=False)
        with _Guard(self, call, streams=False):
            return decode_embeddings(await self._fetch(call, body, call.deadline))

    async def cancel_job(self, key: str) -> Cancelled:
        """Cancel the job that was sent under this Idempotency-Key."""
        return await self._jobs.cancel(key)

    async def _fetch(self, call: BackendRequest, body: bytes, until: float) -> bytes:
        """Return the body of a complete answer. `until`: its deadline, the loop's clock."""
        upstream_call = UpstreamCall(call.id, call.target.name, until)
        begun = None if call.begun is None else call.begun.response
        response = await self._server.post(upstream_call, call.request.kind, body, until, self._lines(call), begun)
        try:
            call.report_upstream(upstream_info(response))
            return await read_whole(response, upstream_call)
        finally:
            response.release()

    def _lines(self, call: BackendRequest) -> HeaderLines:
        lines = header_lines(call, self.now(), is_gateway=self._probe.is_gateway)
        if call.job is not None:
            lines += field_lines({"Idempotency-Key": call.job.key})  # a server without jobs may still support it
        return self._probe.recorded(call, lines)

    def _skipped(self, now: float) -> tuple[str, ...]:
        return tuple([model for model, until in self._skip_until.items() if now < until])

    def asked(self) -> None:
        """Record that a request goes to the server."""
        self._probe.asked()

    def refuse_skipped(self, call: BackendRequest, now: float) -> None:
        """Raise CloudUnavailable until the server's Retry-After has passed."""
        left_s = self._skip_until.get(call.target.model, now) - now
        if left_s > 0.0:
            message = "skipped: it was unavailable a moment ago, and the cloud asked to retry later"
            raise CloudUnavailable(message, phase="connect", retry_after_s=left_s)
        self._skip_until.pop(call.target.model, None)

    def skip(self, model: str, error: CloudUnavailable, now: float) -> None:
        """Skip a model until the server's Retry-After, if the error has one."""
        if error.retry_after_s is not None:
            self._skip_until[model] = now + min(error.retry_after_s, _MAX_AWAY_S)
            self.health.model_unavailable(model, error.message)

    def timeout_s(self, call: BackendRequest, error: CausewayError, *, streams: bool) -> float:
        """Return the timeout from policy and configuration, or the client's own deadline if that is shorter."""
        if streams and isinstance(error, CloudTimeout) and error.phase == "first_token":
            return call.target.first_token_timeout_s or self._config.first_token_timeout_s
        return call.target.timeout_s or self._config.timeout_s


class _Guard:
    """Reports exactly one result per request to the breaker, also when the request is cancelled."""

    __slots__ = ("_backend", "_call", "_started", "_streams")

    def __init__(self, backend: CloudBackend, call: BackendRequest, *, streams: bool) -> None:
        self._backend = backend
        self._call = call
        self._streams = streams

    def __enter__(self) -> None:
        backend, call = self._backend, self._call
        breaker, now = backend.health.breaker, backend.now()
        if call.begun is not None:  # `begin` looked at the breaker
            self._started = call.begun.started
            return
        self._started = now
        backend.refuse_skipped(call, now)
        backend.asked()
        if call.is_shadow:
            if breaker.state(now) != "closed":
                raise BreakerOpen("The cloud failed repeatedly, so it gets no shadow requests now.", phase="connect")
        elif not breaker.allow(now):
            raise BreakerOpen(
                "The cloud failed repeatedly, so its circuit breaker is open.",
                phase="connect",
                retry_after_s=breaker.retry_after_s(now),
            )

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        backend, call = self._backend, self._call
        health, now = backend.health, backend.now()
        if call.is_shadow:
            return
        if error is None:
            health.succeeded()
            health.model_answered(call.target.model)
        elif isinstance(error, _ANSWERED):
            health.succeeded()
        elif isinstance(error, ClientGone):  # found in callbacks
            health.breaker.cancelled(now)
        elif isinstance(error, CausewayError):
            timeout_s = backend.timeout_s(call, error, streams=self._streams)
            if _is_server_failure(error, now - self._started, timeout_s):
                health.failed()
            else:
                health.breaker.cancelled(now)
            if isinstance(error, CloudUnavailable):
                backend.skip(call.target.model, error, now)
        else:
            health.breaker.cancelled(now)


class Clouds:
    """The clouds that the configuration lists, in its order; a target without a cloud's name is at the first one."""

    def __init__(self, clouds: Sequence[CloudBackend] = ()) -> None:
        self._by_name = {cloud.name: cloud for cloud in clouds}
        self._first = next(iter(self._by_name.values()), None)

    def __iter__(self) -> Iterator[CloudBackend]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def first(self) -> CloudBackend | None:
        return self._first

    @property
    def is_reachable(self) -> bool:
        """Whether one of the clouds answered last."""
        return any(cloud.health.reachable is True for cloud in self)

    @property
    def is_unreachable(self) -> bool:
        """Whether none of the clouds answered last."""
        return all(cloud.health.reachable is False for cloud in self)

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(problem for cloud in self for problem in cloud.health.problems)

    def signals(self) -> dict[str, CloudSignals]:
        return {name: cloud.signals() for name, cloud in self._by_name.items()}

    async def start(self) -> None:
        """Prepare the connections. Raises ConfigError for unusable certificates."""
        for cloud in self:
            await cloud.start()

    # --- Backend -----------------------------------------------------------------------------------------------------

    def generate(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        return self._of(call).generate(call)

    def complete(self, call: BackendRequest) -> Awaitable[Sequence[Chunk]] | None:
        return self._of(call).complete(call)

    async def embed(self, call: BackendRequest) -> Embeddings:
        return await self._of(call).embed(call)

    async def close(self) -> None:
        for cloud in self:
            await cloud.close()

    def of(self, target: Target) -> CloudBackend | None:
        """Return the cloud of a target; None if this device does not have it."""
        return self._by_name.get(target.cloud) if target.cloud else self._first

    def _of(self, call: BackendRequest) -> CloudBackend:
        """Return the cloud of a request's target. Raises TargetNotConfigured, or OutsideRegion: whatever was decided,
        no byte of a bound request goes to a cloud outside its regions.
        """
        target = call.target
        cloud = self.of(target)
        if cloud is None:
            raise TargetNotConfigured(
                f"{target.key}: clouds.{target.cloud} is not set on this device.", phase="connect"
            )
        if call.regions is not None:
            check_region(call.regions, cloud.region, f"clouds.{cloud.name}")
        return cloud

    async def cancel_job(self, key: str, name: str = "") -> Cancelled:
        """Cancel the job that was sent under this Idempotency-Key. `name`: its cloud; "": each, as any may have it."""
        clouds = [self._by_name[name]] if name in self._by_name else [*self]
        outcomes = [await cloud.cancel_job(key) for cloud in clouds]
        found: Sequence[Cancelled] = ("settled", "later")
        return next((outcome for outcome in found if outcome in outcomes), "unknown")


class CloudCredentials(Protocol):
    """Returns the token source of a cloud, which replaces its configured key; None: it has none."""

    def __call__(self, cloud: CloudConfig, /) -> Credentials | None: ...


def make_clouds(
    configs: Sequence[CloudConfig], credentials: CloudCredentials | None, ledger: EgressLedger | None = None
) -> Clouds:
    """Return the clouds of a device. `credentials` None: each has its configured key."""
    tokens = [None if credentials is None else credentials(config) for config in configs]
    several = len(configs) > 1
    return Clouds(
        [
            CloudBackend(config, credentials=token, has_alternative=several, ledger=ledger)
            for config, token in zip(configs, tokens, strict=True)
        ]
    )


def _upstream_call(call: BackendRequest) -> UpstreamCall:
    return UpstreamCall(call.id, call.target.name, call.deadline, call.choices, call.relay)


def _is_server_failure(error: CausewayError, took_s: float, timeout_s: float) -> bool:
    """Return whether the error counts against the server: no refusal with Retry-After, no short deadline."""
    if isinstance(error, CloudSaturated | CloudUnavailable):
        return error.retry_after_s is None
    return not isinstance(error, CloudTimeout) or took_s >= timeout_s - _TIMER_STEP_S


def upstream_info(response: HttpResponse) -> UpstreamInfo:
    """Return what a gateway's headers say about an answer."""
    known = response.known
    if known is not None and isinstance(known.facts, UpstreamInfo):
        return known.facts
    info = _read_info(response)
    if known is not None:
        known.facts = info
    return info


def _read_info(response: HttpResponse) -> UpstreamInfo:
    if b"x-causeway-" not in b" ".join(response.headers):
        return NO_INFO
    return UpstreamInfo(
        tier=response.header(b"x-causeway-tier")[:_MAX_HEADER],
        reason=response.header(b"x-causeway-tier-reason")[:_MAX_HEADER],
        degraded=response.header(b"x-causeway-degraded") == "true",
        modalities=response.header(b"x-causeway-modalities")[:_MAX_HEADER],
        loosened=response.header(b"x-causeway-loosened")[:_MAX_HEADER],
        trimmed=response.header(b"x-causeway-trimmed")[:_MAX_HEADER],
    )


_NO_JOBS_S = 600.0  # then a server without jobs is asked for them again
_SURE_S, _SURE_AFTER_JOBS_S = 5.0, 600.0  # duration of refusals until a server counts as one without jobs
_AGAIN_S = 2.0  # pause until a refused submission is tried again
_POLL_S, _MAX_POLL_S, _POLL_GROWTH = 0.2, 5.0, 1.5  # pauses between checks of a job
_NO_JOBS = (403, 404, 405, 501)  # status codes of a server without jobs, or for a token without the right to send them
_ASK_AGAIN = (401, 408, 429)
Cancelled = Literal["settled", "unknown", "later"]
"""The cloud's response to a cancellation. settled: nothing is left to do; later: it must be sent again."""
_ENDS = {"failed": JobEvent.FAIL, "dead": JobEvent.EXHAUST, "expired": JobEvent.EXPIRE, "cancelled": JobEvent.FAIL}


class CloudJobs:
    """Sends requests as jobs: the cloud runs each once, however often it is sent. `now`: monotonic seconds.

    A server counts as one without jobs once it has refused them for some seconds, and for minutes if it accepted one
    before: a gateway behind a proxy may answer 404 for a moment, and a plain request is not done exactly once.
    """

    def __init__(self, url: str, server: OpenAIServer, probe: CloudProbe, now: Callable[[], float]) -> None:
        self._url = URL(url + "/jobs")
        self._server = server
        self._probe = probe
        self._now = now
        self._none_until = float("-inf")
        self._refused_since: float | None = None
        self._had_jobs = False

    async def answer(self, call: BackendRequest, job: JobTerms) -> bytes | None:
        """Send the request as a job, and return its answer; None if this server has no jobs."""
        if self._now() < self._none_until:
            return None
        if not await job.pin(call.target.full_name):
            raise ClientGone("The job was cancelled.")
        state = await self._submit(call, job)
        # The response to a submission has no result, even if the key belongs to a job that has ended.
        pause_s = 0.0 if state is not None and state.ended else _POLL_S
        while state is not None:
            await asyncio.sleep(min(pause_s, max(0.0, call.deadline - self._now())))
            pause_s = min(_MAX_POLL_S, max(_POLL_S, pause_s * _POLL_GROWTH))
            response = await self._send(call, "GET", (self._url / state.id).raw_path_qs)
            state = await self._read_job(call, response)
            if state.status == "succeeded":
                return bytes(state.result)
            if (error := _end_of(state)) is not None:
                raise error
        return None

    async def cancel(self, key: str) -> Cancelled:
        until = asyncio.get_running_loop().time() + PROBE_S
        try:
            response = await self._server.request(
                "DELETE", self._url.raw_path_qs, until, lines=field_lines({"Idempotency-Key": key})
            )
        except (HttpClientError, TimeoutError):
            return "later"
        response.release()
        status = response.status
        if status == 404:
            return "unknown"
        is_final = status not in _ASK_AGAIN and (status < 500 or status in _NO_JOBS)
        return "settled" if is_final else "later"

    async def _submit(self, call: BackendRequest, job: JobTerms) -> _CloudJob | None:
        """Return the job of this key, new or known; None if this server has no jobs."""
        plain = encode_request(call.request, call.target.model, stream=False)
        body = _as_job(plain, "/v1" + PATHS[call.request.kind])
        response = await self._send(call, "POST", self._url.raw_path_qs, body, job)
        if response.status in _NO_JOBS:
            await _check_no_jobs(response, call)
            self._note_refusal(call, response.status)
            return None
        state = await self._read_job(call, response)
        self._had_jobs, self._refused_since = True, None
        return state

    async def _send(
        self, call: BackendRequest, method: str, path: str, body: bytes | None = None, job: JobTerms | None = None
    ) -> HttpResponse:
        priority = "" if job is None else job.priority
        lines = header_lines(call, self._now(), is_gateway=self._probe.is_gateway, priority=priority)
        if job is not None:
            lines += field_lines({"Idempotency-Key": job.key})
        recorded = lines if body is None else self._probe.recorded(call, lines)
        return await self._server.send(_upstream_call(call), method, path, call.deadline, body=body, lines=recorded)

    def _note_refusal(self, call: BackendRequest, status: int) -> None:
        """Return if the server evidently has no jobs. Raises CloudSaturated while it must be asked again."""
        now = self._now()
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since < (_SURE_AFTER_JOBS_S if self._had_jobs else _SURE_S):
            raise CloudSaturated(
                f"{call.target.name} answered HTTP {status} to /jobs, so it may not support jobs. The job waits until "
                "that is certain.",
                phase="first_token",
                retry_after_s=_AGAIN_S,
            )
        self._none_until = now + _NO_JOBS_S

    async def _read_job(self, call: BackendRequest, response: HttpResponse) -> _CloudJob:
        if response.status not in (200, 202):
            raise await read_error(response, _upstream_call(call), call.deadline)
        try:
            return msgspec.json.decode(await read_whole(response, _upstream_call(call)), type=_CloudJob)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise CloudUnreadable(f"{call.target.name} returned an invalid job object.", phase="stream") from None
        finally:
            response.release()


class _CloudJob(msgspec.Struct, frozen=True):
    """The fields that a device reads of a job in the cloud."""

    id: str
    status: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def ended(self) -> bool:
        return self.status == "succeeded" or self.status in _ENDS


def _as_job(body: bytes, endpoint: str) -> bytes:
    """Return the body of a submission. It is the same at each attempt, as the cloud compares it under the key."""
    document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**document, "endpoint": endpoint})


async def _check_no_jobs(response: HttpResponse, call: BackendRequest) -> None:
    """Check that a refusal means that this server has no jobs, and release the response. Raises ModelNotFound."""
    sent = server_error(await read_error_body(response, call.deadline))
    if sent.code == ModelNotFound.code:
        raise ModelNotFound(f"{call.target.name}: {sent.message[:500]}")


def _end_of(job: _CloudJob) -> CloudJobEnded | None:
    """Return how the job ended without an answer; None while it waits or runs."""
    event = _ENDS.get(job.status)
    if event is None:
        return None
    code = server_error(bytes(job.error)).code
    why = f" ({code})" if code else ""
    return CloudJobEnded(event, bytes(job.error), f"the cloud ended the job: {job.status}{why}")
