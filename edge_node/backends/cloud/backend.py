"""The cloud as a Backend: any OpenAI-compatible server behind one URL.

An answer is streamed when the client streams, or when its first tokens may be held back for a handoff; otherwise it is
fetched complete. Connect, first token and complete answer each have a timeout. A circuit breaker skips a failing
server, and a probe detects when it is back. A 503 with Retry-After does not trip the breaker; the model is skipped
until then. Proxies and netrc of the environment are ignored and redirects are not followed: data leaves this box only
for the configured URL.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager

import aiohttp
import anyio
import msgspec
from yarl import URL

from router.decision.breaker import Breaker
from router.decision.continue_token import join_token, split_token
from router.decision.latency import Ewma
from router.errors import (
    BreakerOpen,
    CausewayError,
    ClientGone,
    CloudRejected,
    CloudSaturated,
    CloudTimeout,
    CloudUnavailable,
    InvalidRequest,
)
from router.openai import decode_answer, decode_embeddings, encode_request
from router.types import Chunk, CloudSignals, Embeddings, Kind, Request

from ...config.schema import CloudConfig
from ..backend import BackendRequest, JobTerms, UpstreamInfo
from .credentials import BearerToken, Credentials
from .error_mapping import client_error
from .health import CloudHealth
from .job_answers import NO_JOBS, CloudJob, as_job, check_no_jobs, end_of, read_job
from .response_reader import MAX_ERROR_BYTES, StreamReader, read_body, read_error, read_whole, too_slow

_PATHS: dict[Kind, str] = {"chat": "/chat/completions", "completion": "/completions", "embedding": "/embeddings"}
_IDLE_S = 15.0  # shorter than common servers' idle timeout, so that few pooled connections are closed already
_RTT_HALF_LIFE_S = 60.0
_PROBE_S = 5.0
_MAX_HEADER = 200  # characters of a response header that are kept
_PROBE_BACKOFF = 4.0  # the longest pause between probes, in intervals
_TIMER_STEP_S = 0.005  # timers may fire this much early
_LONGEST_AWAY_S = 60.0  # upper bound of a server's Retry-After
_NO_JOBS_S = 600.0  # then a server without jobs is asked for them again
_POLL_S, _LONGEST_POLL_S, _POLL_GROWTH = 0.2, 5.0, 1.5  # pauses between looks at a job
_KEY_ADVICE = "correct cloud.api_key or cloud.api_key_file and restart"
_FLEET_ADVICE = "it is the fleet's: see `causeway-edge fleet status`, and whether the gateway trusts the fleet"
# The server is healthy: it answered that the request is wrong.
_REJECTIONS = (InvalidRequest, CloudRejected)


class CloudBackend:
    """One server: its connections, its circuit breaker and the signals about it.

    Args:
        credentials: Take the place of `cloud.api_key`: read at each request, and renewed once for a 401.
        breaker: The circuit breaker.
        now: The clock, monotonic seconds.
    """

    def __init__(
        self,
        config: CloudConfig,
        *,
        credentials: Credentials | None = None,
        breaker: Breaker | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._bearer = BearerToken(config.api_key, credentials)
        self._now = now
        advice = _KEY_ADVICE if credentials is None else _FLEET_ADVICE
        self.health = CloudHealth(config.url, breaker or Breaker(), now, advice)
        self._rtt_ms = Ewma(_RTT_HALF_LIFE_S)
        self._tier: str | None = None
        self._skip_until: dict[str, float] = {}  # by model, from Retry-After
        self._last_response = float("-inf")
        self._no_jobs_until = float("-inf")
        self._session: aiohttp.ClientSession | None = None
        self._urls = {kind: URL(config.url + path) for kind, path in _PATHS.items()}

    async def start(self) -> None:
        """Prepare the session, without connecting. Raises OSError or ssl.SSLError for an unusable `cloud.ca_file`."""
        verify: ssl.SSLContext | bool = True
        if self._config.ca_file:
            verify = ssl.create_default_context(cafile=self._config.ca_file)
        connector = aiohttp.TCPConnector(limit=self._config.max_connections, keepalive_timeout=_IDLE_S, ssl=verify)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Accept-Encoding": "identity", "User-Agent": "causeway-edge"},
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s),
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def signals(self) -> CloudSignals:
        now = self._now()
        return CloudSignals(
            reachable=self.health.reachable,
            rtt_ms=self._rtt_ms.value(now),
            breaker=self.health.breaker.state(now),
            tier=self._tier,
            unavailable_models=tuple(model for model, until in self._skip_until.items() if now < until),
        )

    # --- Backend -----------------------------------------------------------------------------------------------------

    async def generate(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        streams = call.request.stream or call.confidence_tokens > 0
        body = encode_request(
            call.request, call.target.model, stream=streams, resume=split_token(call.request.resume)[1]
        )
        with self._guarded(call, streams=streams):
            if call.job is not None and self._now() >= self._no_jobs_until:
                answer = await self._answer_of_job(call, call.job)
                if answer is not None:
                    for chunk in decode_answer(answer):
                        yield chunk
                    return
            if not streams:
                for chunk in decode_answer(await self._fetch(call, body)):
                    yield _with_target(chunk, call) if chunk.resume else chunk
                return
            until = min(call.deadline, call.first_token_by)
            response = await self._post(call, body, until)
            reader = StreamReader(response, call, until)
            try:
                while chunks := await reader.next():
                    for chunk in chunks:
                        yield _with_target(chunk, call) if chunk.resume else chunk
                await reader.read_end()
            finally:
                reader.close()
                response.release()  # closes the connection unless the body is complete, which stops the work

    async def embed(self, call: BackendRequest) -> Embeddings:
        body = encode_request(call.request, call.target.model, stream=False)
        with self._guarded(call, streams=False):
            return decode_embeddings(await self._fetch(call, body))

    async def _answer_of_job(self, call: BackendRequest, job: JobTerms) -> bytes | None:
        """Send the request as a job, and wait for its answer. None: this server has no jobs."""
        if not await job.pin(call.target.name):
            raise ClientGone("the job was cancelled")
        url = URL(self._config.url + "/jobs")
        state = await self._submit(call, job, url)
        # The reply to a submission has no result, also where the key finds a job that has ended.
        pause_s = 0.0 if state is not None and state.ended else _POLL_S
        while state is not None:
            await asyncio.sleep(min(pause_s, max(0.0, call.deadline - self._now())))
            pause_s = min(_LONGEST_POLL_S, max(_POLL_S, pause_s * _POLL_GROWTH))
            state = await self._read_job(call, await self._send(call, "GET", url / state.id, call.deadline))
            if state.status == "succeeded":
                return bytes(state.result)
            if (error := end_of(state)) is not None:
                raise error
        return None

    async def _submit(self, call: BackendRequest, job: JobTerms, url: URL) -> CloudJob | None:
        """The job of this key, new or known. None: this server has no jobs."""
        resume = split_token(call.request.resume)[1]
        plain = encode_request(call.request, call.target.model, stream=False, resume=resume)
        body = as_job(plain, "/v1" + _PATHS[call.request.kind])
        headers = {"Idempotency-Key": job.key, "x-causeway-priority": job.priority}
        response = await self._send(call, "POST", url, call.deadline, body=body, headers=headers)
        if response.status in NO_JOBS:
            await check_no_jobs(response, call)
            self._no_jobs_until = self._now() + _NO_JOBS_S
            return None
        return await self._read_job(call, response)

    async def _read_job(self, call: BackendRequest, response: aiohttp.ClientResponse) -> CloudJob:
        if response.status not in (200, 202):
            raise await read_error(response, call, call.deadline)
        try:
            return read_job(await read_whole(response, call), call)
        finally:
            response.release()

    async def _fetch(self, call: BackendRequest, body: bytes) -> bytes:
        """The body of a complete answer."""
        response = await self._post(call, body, call.deadline)
        try:
            return await read_whole(response, call)
        finally:
            response.release()

    @contextmanager
    def _guarded(self, call: BackendRequest, *, streams: bool) -> Iterator[None]:
        """Report exactly one result per call to the breaker, also when the call is cancelled."""
        started = self._now()
        self._refuse_skipped(call, started)
        if call.is_shadow:
            if self.health.breaker.state(started) != "closed":
                raise BreakerOpen("the cloud failed repeatedly; no shadow request tries it", phase="connect")
            yield
            return
        if not self.health.breaker.allow(self._now()):
            wait_s = self.health.breaker.retry_after_s(self._now())
            raise BreakerOpen(
                "the cloud failed repeatedly; its circuit breaker is open", phase="connect", retry_after_s=wait_s
            )
        try:
            yield
        except _REJECTIONS:
            self.health.succeeded()
            raise
        except CausewayError as error:
            timeout_s = self._timeout_s(call, error, streams=streams)
            failed = _is_server_failure(error, self._now() - started, timeout_s)
            if failed:
                self.health.failed()
            else:
                self.health.breaker.cancelled(self._now())
            if isinstance(error, CloudUnavailable) and error.retry_after_s is not None:
                self._skip_until[call.target.model] = self._now() + min(error.retry_after_s, _LONGEST_AWAY_S)
                self.health.model_unavailable(call.target.model, error.message)
            raise
        except BaseException:
            self.health.breaker.cancelled(self._now())
            raise
        else:
            self.health.succeeded()
            self.health.model_answered(call.target.model)

    def _refuse_skipped(self, call: BackendRequest, now: float) -> None:
        """Raises CloudUnavailable until the server's Retry-After has passed."""
        left_s = self._skip_until.get(call.target.model, now) - now
        if left_s > 0.0:
            message = "skipped: it was unavailable a moment ago, and the cloud asked to retry later"
            raise CloudUnavailable(message, phase="connect", retry_after_s=left_s)
        self._skip_until.pop(call.target.model, None)

    def _timeout_s(self, call: BackendRequest, error: CausewayError, *, streams: bool) -> float:
        """The timeout from policy and configuration; the client's own deadline may be shorter."""
        if streams and isinstance(error, CloudTimeout) and error.phase == "first_token":
            return call.target.first_token_timeout_s or self._config.first_token_timeout_s
        return call.target.timeout_s or self._config.timeout_s

    async def _post(self, call: BackendRequest, body: bytes, until: float) -> aiohttp.ClientResponse:
        """Send the request. Returns a response with status 200, its body unread; the caller must release it."""
        # A server without jobs may know the key all the same.
        headers = {} if call.job is None else {"Idempotency-Key": call.job.key}
        response = await self._send(call, "POST", self._urls[call.request.kind], until, body=body, headers=headers)
        if response.status != 200:
            raise await read_error(response, call, until)
        call.report_upstream(_upstream_info(response.headers))
        return response

    async def _send(
        self,
        call: BackendRequest,
        method: str,
        url: URL,
        until: float,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        retry: bool = True,
        renew: bool = True,
    ) -> aiohttp.ClientResponse:
        """Send a request. Returns a response of any status but 401 of a stale token; the caller must release it."""
        again = functools.partial(self._send, call, method, url, until, body=body, headers=headers)
        assert self._session is not None, "start() comes first"
        token = self._bearer.put(self._session)
        try:
            async with asyncio.timeout_at(until):
                response = await self._session.request(
                    method, url, data=body, headers={**_headers(call, self._now()), **headers}, allow_redirects=False
                )
        except aiohttp.ServerDisconnectedError as error:
            if retry:  # the server closed an idle connection just as it was reused
                return await again(retry=False, renew=renew)
            raise client_error(error, call.target.name, "send") from error
        except aiohttp.ClientError as error:
            failure = client_error(error, call.target.name, "send")
            if failure.phase == "connect":
                self.health.lost(error)
            raise failure from error
        except TimeoutError as error:
            raise too_slow(call, "first_token") from error
        except OSError as error:
            raise client_error(error, call.target.name, "send") from error
        if response.status == 401 and renew and await self._bearer.renewed(token, until):
            response.release()
            return await again(retry=retry, renew=False)
        self._note_response(response, probe=False)
        return response

    def _note_response(self, response: aiohttp.ClientResponse, *, probe: bool) -> None:
        self.health.answered(response.status, probe=probe)
        self._last_response = self._now()
        self._tier = response.headers.get("x-causeway-tier", self._tier)

    # --- the probe ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe the server forever, except while its answers show that it is reachable."""
        interval_s = pause_s = self._config.probe_interval_s
        while True:
            quiet = self._now() - self._last_response >= interval_s
            if quiet or self._rtt_ms.value(self._now()) is None:
                await self.probe()
            pause_s = interval_s if self.health.reachable else min(interval_s * _PROBE_BACKOFF, pause_s * 2.0)
            await asyncio.sleep(pause_s)

    async def probe(self) -> bool:
        """Whether the server answers, with any HTTP status. Updates `reachable` and `rtt_ms`."""
        assert self._session is not None, "start() comes first"
        started, token = self._now(), self._bearer.put(self._session)
        try:
            with anyio.fail_after(_PROBE_S):
                async with self._session.get(self._config.url + "/models", allow_redirects=False) as response:
                    if response.status == 401 and await self._bearer.renewed(token, started + _PROBE_S):
                        return await self.probe()
                    self._note_response(response, probe=True)
                    self._rtt_ms.add((self._now() - started) * 1000.0, self._now())
                    await read_body(response, MAX_ERROR_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.health.lost(error)
        return self.health.reachable is True


def _with_target(chunk: Chunk, call: BackendRequest) -> Chunk:
    """Add the target's name to the continue token of a truncated answer."""
    return msgspec.structs.replace(chunk, resume=join_token(call.target.name, chunk.resume))


def _is_server_failure(error: CausewayError, took_s: float, timeout_s: float) -> bool:
    """Whether the error counts against the server: not a refusal with Retry-After, nor a client's short deadline."""
    if isinstance(error, CloudSaturated | CloudUnavailable):
        return error.retry_after_s is None
    return not isinstance(error, CloudTimeout) or took_s >= timeout_s - _TIMER_STEP_S


def _headers(call: BackendRequest, now: float) -> dict[str, str]:
    left_ms = max(1, int((call.deadline - now) * 1000.0))
    headers = {
        "Content-Type": "application/json",
        "x-request-id": call.id,
        "x-causeway-deadline-ms": str(left_ms),
        "x-causeway-priority": _priority(call.request),
    }
    if call.traceparent:
        headers["traceparent"] = call.traceparent
    if not call.cacheable:
        headers["Cache-Control"] = "no-store"
    if call.policy:
        headers["x-causeway-policy"] = call.policy
    return headers


def _upstream_info(headers: Mapping[str, str]) -> UpstreamInfo:
    return UpstreamInfo(
        tier=headers.get("x-causeway-tier", "")[:_MAX_HEADER],
        reason=headers.get("x-causeway-tier-reason", "")[:_MAX_HEADER],
        degraded=headers.get("x-causeway-degraded", "") == "true",
    )


def _priority(request: Request) -> str:
    """A streamed answer is read as it arrives; the tag `bulk` marks work that can wait."""
    if "bulk" in request.hints.tags:
        return "bulk"
    return "interactive" if request.stream else "standard"
