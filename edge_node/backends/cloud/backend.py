"""The cloud as a Backend: any OpenAI-compatible server behind one URL.

An answer is streamed when the client streams, or when its first tokens may be held back for a handoff; otherwise it is
fetched complete. First token and complete answer each have a timeout. A circuit breaker skips a failing server, and a
probe (`connection`) detects when it is back. A 503 with Retry-After does not trip the breaker; the model is skipped
until then. A job is sent as a job (`job_answers`) where the server has any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager

import aiohttp
import msgspec
from yarl import URL

from router.decision.attempts import join_token, split_token
from router.errors import (
    BreakerOpen,
    CausewayError,
    CloudRefused,
    CloudRejected,
    CloudSaturated,
    CloudTimeout,
    CloudUnavailable,
    CloudUnprocessable,
    CloudUnreadable,
    InvalidRequest,
)
from router.openai import decode_answer, decode_embeddings, encode_request
from router.trackers import Breaker
from router.types import Chunk, CloudSignals, Embeddings

from ...config.schema import CloudConfig
from ..backend import BackendRequest, UpstreamInfo
from .connection import PATHS, CloudConnection, Credentials
from .health import CloudHealth
from .job_answers import Cancelled, CloudJobs
from .response_reader import StreamReader, read_error, read_whole

_MAX_HEADER = 200  # characters of a response header that are kept
_TIMER_STEP_S = 0.005  # timers may fire this much early
_LONGEST_AWAY_S = 60.0  # upper bound of a server's Retry-After
_KEY_ADVICE = "correct cloud.api_key or cloud.api_key_file and restart"
_FLEET_ADVICE = "it is the fleet's: see `causeway-edge fleet status`, and whether the gateway trusts the fleet"
# The server is healthy: it answered, that the request is wrong, or with something that we cannot read.
_ANSWERED = (InvalidRequest, CloudRejected, CloudRefused, CloudUnreadable)
_STREAM_OPTIONS = "stream_options"

log = logging.getLogger(__name__)


class CloudBackend:
    """One server: its circuit breaker and the signals about it.

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
        self._now = now
        advice = _KEY_ADVICE if credentials is None else _FLEET_ADVICE
        self.health = CloudHealth(config.url, breaker or Breaker(), now, advice)
        self.connection = CloudConnection(config, self.health, credentials, now)
        self._jobs = CloudJobs(config.url, self.connection, now)
        self._asks_usage = True  # until the server refuses `stream_options`
        self._skip_until: dict[str, float] = {}  # by model, from Retry-After
        self._urls = {kind: URL(config.url + path) for kind, path in PATHS.items()}

    async def start(self) -> None:
        """Prepare the connection. Raises OSError or ssl.SSLError for an unusable `cloud.ca_file`."""
        await self.connection.start()

    async def close(self) -> None:
        await self.connection.close()

    def signals(self) -> CloudSignals:
        now = self._now()
        return CloudSignals(
            reachable=self.health.reachable,
            rtt_ms=self.connection.rtt_ms(now),
            breaker=self.health.breaker.state(now),
            tier=self.connection.tier,
            unavailable_models=tuple(model for model, until in self._skip_until.items() if now < until),
        )

    # --- Backend -----------------------------------------------------------------------------------------------------

    async def generate(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        streams = call.request.stream or call.confidence_tokens > 0
        with self._guarded(call, streams=streams):
            if call.job is not None and (answer := await self._jobs.answer(call, call.job)) is not None:
                for chunk in decode_answer(answer, call.id):
                    yield chunk
                return
            if not streams:
                for chunk in decode_answer(await self._fetch(call, _encode(call, stream=False)), call.id):
                    yield _with_target(chunk, call) if chunk.resume else chunk
                return
            until = min(call.deadline, call.first_token_by)
            response = await self._post_stream(call, until)
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

    async def cancel_job(self, key: str) -> Cancelled:
        """Cancel the job that was sent under this Idempotency-Key."""
        return await self._jobs.cancel(key)

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
        except _ANSWERED:
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

    async def _post_stream(self, call: BackendRequest, until: float) -> aiohttp.ClientResponse:
        """Send the request for a stream; a server that refuses `stream_options` is not sent them again. See `_post`."""
        if self._asks_usage:
            try:
                return await self._post(call, _encode(call, stream=True), until)
            except (InvalidRequest, CloudUnprocessable) as error:
                if _STREAM_OPTIONS not in f"{error.param} {error.message}":
                    raise
                log.info("%s does not take stream_options: its streams are counted here", call.target.name)
                self._asks_usage = False
        return await self._post(call, _encode(call, stream=True, ask_usage=False), until)

    async def _post(self, call: BackendRequest, body: bytes, until: float) -> aiohttp.ClientResponse:
        """Send the request. Returns a response with status 200, its body unread; the caller must release it."""
        # A server without jobs may know the key all the same.
        headers = {} if call.job is None else {"Idempotency-Key": call.job.key}
        response = await self.connection.send(
            call, "POST", self._urls[call.request.kind], until, body=body, headers=headers
        )
        if response.status != 200:
            raise await read_error(response, call, until)
        call.report_upstream(_upstream_info(response.headers))
        return response


def _encode(call: BackendRequest, *, stream: bool, ask_usage: bool = True) -> bytes:
    resume = split_token(call.request.resume)[1]
    return encode_request(call.request, call.target.model, stream=stream, resume=resume, ask_usage=ask_usage)


def _with_target(chunk: Chunk, call: BackendRequest) -> Chunk:
    """Add the target's name to the continue token of a truncated answer."""
    return msgspec.structs.replace(chunk, resume=join_token(call.target.name, chunk.resume))


def _is_server_failure(error: CausewayError, took_s: float, timeout_s: float) -> bool:
    """Whether the error counts against the server: not a refusal with Retry-After, nor a client's short deadline."""
    if isinstance(error, CloudSaturated | CloudUnavailable):
        return error.retry_after_s is None
    return not isinstance(error, CloudTimeout) or took_s >= timeout_s - _TIMER_STEP_S


def _upstream_info(headers: Mapping[str, str]) -> UpstreamInfo:
    return UpstreamInfo(
        tier=headers.get("x-causeway-tier", "")[:_MAX_HEADER],
        reason=headers.get("x-causeway-tier-reason", "")[:_MAX_HEADER],
        degraded=headers.get("x-causeway-degraded", "") == "true",
        modalities=headers.get("x-causeway-modalities", "")[:_MAX_HEADER],
        loosened=headers.get("x-causeway-loosened", "")[:_MAX_HEADER],
    )
