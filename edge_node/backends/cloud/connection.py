"""The cloud's health as requests and probes observe it, and the header lines that tell it about a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from yarl import URL

from causeway_server.router.ledger.log import HEADER as EGRESS
from causeway_server.router.residency import region_tags
from causeway_server.router.serving.http_client import (
    ConnectError,
    HttpClientError,
    HttpResponse,
    KnownAnswer,
    field_lines,
)
from causeway_server.router.serving.request import TAGS
from causeway_server.router.serving.responses import SERVER
from causeway_server.router.serving.tls.contexts import TlsFiles
from causeway_server.router.serving.upstream.responses import MAX_ERROR_BYTES, read_body
from causeway_server.router.serving.upstream.server import HeaderLines, OpenAIServer
from causeway_server.router.trackers import Breaker, Ewma
from causeway_server.router.types import Request

from ...config.schema import CloudConfig
from ...observability.logs import Fault
from ..backend import BackendRequest

if TYPE_CHECKING:
    from causeway_server.router.serving.egress.ledger import EgressLedger

log = logging.getLogger(__name__)

_RTT_HALF_LIFE_S = 60.0
_EGRESS = EGRESS.encode()
PROBE_S = 5.0
"""Maximum time of a probe."""
_PROBE_BACKOFF = 4.0  # maximum pause between probes, in intervals
_SUSPICIOUS_S = 0.4  # silence after a request until a cloud with alternatives is probed
_SUSPECT_PROBE_S = 1.0  # maximum time of that probe


class CloudHealth:
    """The cloud's health as requests and probes observe it: reachable, token accepted, circuit breaker (owned here).

    Each change is logged once, by whichever request or probe observes it first; `problems` lists the present faults. Of
    `url` only host and port are logged. `advice`: about a refused token. `now`: monotonic seconds.
    """

    def __init__(self, url: str, breaker: Breaker, now: Callable[[], float], advice: str) -> None:
        self._name = f"The cloud at {URL(url).host}:{URL(url).port}"
        self._now = now
        self._advice = advice
        self._gone = Fault(log, logging.WARNING, now)
        self._token_refused = Fault(log, logging.ERROR, now)
        self._breaker_open = Fault(log, logging.WARNING, now)
        self._models_unavailable: dict[str, Fault] = {}
        self._refused_by_probe = False
        self.breaker = breaker
        self.reachable: bool | None = None  # None: neither a response nor a failure yet

    @property
    def token_refused(self) -> bool:
        return bool(self._token_refused.problem)

    @property
    def problems(self) -> tuple[str, ...]:
        faults = (self._gone, self._token_refused, self._breaker_open, *self._models_unavailable.values())
        return tuple(fault.problem for fault in faults if fault.problem)

    def answered(self, status: int, *, probe: bool = False) -> None:
        """Record a response, whatever its HTTP status."""
        if self.reachable is not True:
            if self.reachable is None:
                log.info("%s is reachable.", self._name)
            self.reachable = True
            self._gone.end(f"{self._name} is reachable again")
        if status == 401:
            self._refused_by_probe = probe and (self._refused_by_probe or not self.token_refused)
            self._token_refused.begin(f"{self._name} refuses the token (HTTP 401): {self._advice}")
        # A server may list its models without a token: a probe that succeeds does not test the token.
        elif self._token_refused.problem and status < 400 and (not probe or self._refused_by_probe):
            self._token_refused.end(f"{self._name} accepts the token again")

    def lost(self, error: Exception) -> None:
        """Record a failed connection attempt or a failed probe."""
        self.reachable = False
        self._gone.begin(f"{self._name} cannot be reached: {_reason(error)}")

    def model_unavailable(self, model: str, reason: str) -> None:
        """Record that the server answers, but has no backend for this model."""
        fault = self._models_unavailable.setdefault(model, Fault(log, logging.WARNING, self._now))
        fault.begin(f"{self._name} has no server for {model} ({reason}): requests go to other targets.")

    def model_answered(self, model: str) -> None:
        """Record that a request to the model succeeded."""
        if fault := self._models_unavailable.pop(model, None):
            fault.end(f"{self._name} answers for {model} again")

    def succeeded(self) -> None:
        """Record a request that the server answered."""
        self.breaker.success(self._now())
        if self._breaker_open.problem and self.breaker.state(self._now()) == "closed":
            self._breaker_open.end("The cloud's circuit breaker is closed again")

    def failed(self) -> None:
        """Record a failure that counts against the server."""
        now = self._now()
        self.breaker.failure(now)
        if self.breaker.state(now) == "open":
            self._breaker_open.begin(
                f"{self._name} failed repeatedly, and its circuit breaker is open: "
                f"requests go to other targets, the next attempt is in {self.breaker.retry_after_s(now):.0f} s."
            )


def _reason(error: Exception) -> str:
    """Return the operating system's message if there is one; the message of an exception may quote request content."""
    cause = error.cause if isinstance(error, ConnectError) and error.cause is not None else error
    if isinstance(cause, ssl.SSLError):
        return cause.reason or type(cause).__name__
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return type(cause).__name__


def tls_files(config: CloudConfig, issued: str = "") -> TlsFiles:
    """Return the files for TLS with a cloud. `issued`: the certificate of the fleet, used unless one is configured."""
    configured = config.client_cert_file or config.client_key_file
    return TlsFiles(
        where=f"clouds.{config.name}",
        ca_file=config.ca_file,
        cert_file=config.client_cert_file if configured else issued,
        key_file=config.client_key_file if configured else issued,
        is_renewed=not configured,
        cert_key="client_cert_file",
        key_key="client_key_file",
    )


class CloudProbe:
    """Probes the cloud while nothing else shows that it is reachable, and records every response and lost connection in
    its health (`ServerObserver`). With `has_alternative`, another cloud that may answer, a silent cloud is probed at
    once, for a short time. `now`: monotonic seconds.
    """

    def __init__(
        self,
        config: CloudConfig,
        health: CloudHealth,
        now: Callable[[], float],
        *,
        has_alternative: bool = False,
        ledger: EgressLedger | None = None,
    ) -> None:
        self._ledger = ledger
        self._region = config.region
        self._has_alternative = has_alternative
        self._suspicion: asyncio.TimerHandle | None = None
        self._suspected = asyncio.Event()
        self._interval_s = config.probe_interval_s
        self._models = URL(config.url + "/models").raw_path_qs
        self._health = health
        self._now = now
        self._rtt_ms = Ewma(_RTT_HALF_LIFE_S)
        self._last_response = float("-inf")
        self.tier: str | None = None  # the tier that answered last
        self._known: KnownAnswer | None = None  # the head of the last response, if it had come before
        self.is_gateway = False  # whether a response came from a gateway of ours

    def rtt_ms(self, now: float) -> float | None:
        """Return the recent round-trip time of probes; None: not measured."""
        return self._rtt_ms.value(now)

    def answered(self, response: HttpResponse, *, probe: bool = False) -> None:
        self._health.answered(response.status, probe=probe)
        self._last_response = self._now()
        if response.known is None or response.known is not self._known:
            self._known = response.known
            self.tier = response.header(b"x-causeway-tier") or self.tier
            self.is_gateway = self.is_gateway or self.tier is not None or response.header(b"server") == SERVER
        if self._ledger is not None and (receipt := response.header(_EGRESS)):
            self._ledger.confirmed(receipt)

    def recorded(self, call: BackendRequest, lines: str) -> HeaderLines:
        """Return the header lines of a request, which the egress ledger records each time it is sent."""
        ledger = self._ledger
        if ledger is None:
            return lines

        def record(body: bytes) -> str:
            private = "private" in call.request.hints.tags
            claim = ledger.sent(body, call.id, call.target.full_name, self._region, private=private)
            # A server that answered and is not a gateway of ours need not know this device.
            is_told = bool(claim) and (self.is_gateway or self._last_response == float("-inf"))
            return f"{lines}{EGRESS}: {claim}\r\n" if is_told else lines

        return record

    def lost(self, error: Exception) -> None:
        self._health.lost(error)

    def asked(self) -> None:
        """Record that a request goes to the server: without any response soon, `watch` probes it."""
        if self._has_alternative and self._suspicion is None:
            loop = asyncio.get_running_loop()
            self._suspicion = loop.call_later(_SUSPICIOUS_S, self._suspect, self._last_response)

    def _suspect(self, last_response: float) -> None:
        self._suspicion = None
        if self._last_response == last_response and self._health.reachable is not False:
            self._suspected.set()

    def close(self) -> None:
        if self._suspicion is not None:
            self._suspicion.cancel()

    async def watch(self, server: OpenAIServer) -> None:
        """Probe the server forever, except while its responses show that it is reachable."""
        pause_s = self._interval_s
        while True:
            quiet = self._now() - self._last_response >= self._interval_s
            if self._suspected.is_set():
                await self.probe(server, _SUSPECT_PROBE_S)
            elif quiet or self._rtt_ms.value(self._now()) is None:
                await self.probe(server)
            self._suspected.clear()
            longest_s = self._interval_s * _PROBE_BACKOFF
            pause_s = self._interval_s if self._health.reachable else min(longest_s, pause_s * 2.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._suspected.wait()

    async def probe(self, server: OpenAIServer, most_s: float = PROBE_S) -> bool:
        """Return whether the server answers, with any HTTP status, in `most_s`. Updates `reachable` and `rtt_ms`."""
        started, until = self._now(), asyncio.get_running_loop().time() + most_s
        try:
            response = await server.request("GET", self._models, until)
            try:
                self.answered(response, probe=True)
                self._rtt_ms.add((self._now() - started) * 1000.0, self._now())
                await read_body(response, MAX_ERROR_BYTES)
            finally:
                response.release()
        except (HttpClientError, TimeoutError) as error:
            self._health.lost(error)
        return self._health.reachable is True


def header_lines(call: BackendRequest, now: float, *, is_gateway: bool, priority: str = "") -> str:
    """Return the header lines that tell the cloud about a request. Only a gateway of ours (`is_gateway`) gets its id:
    llama_cpp.server 0.3.36 answers 400 to an `x-request-id` that is not a UUID. `priority`: "" for the request's.
    """
    left_ms = max(1, int((call.deadline - now) * 1000.0))
    id_line = f"x-request-id: {call.id}\r\n" if is_gateway else ""
    return (
        f"Content-Type: application/json\r\n{id_line}x-causeway-deadline-ms: {left_ms}\r\n"
        f"{_usual_lines(priority or _priority(call.request), call.traceparent, call.policy, cacheable=call.cacheable)}"
        f"{'' if call.regions is None else field_lines({TAGS: ','.join(region_tags(call.regions))})}"
    )


@lru_cache(64)
def _usual_lines(priority: str, traceparent: str, policy: str, *, cacheable: bool) -> str:
    fields = {
        "x-causeway-priority": priority,
        "traceparent": traceparent,
        "Cache-Control": "" if cacheable else "no-store",
        "x-causeway-policy": policy,
    }
    return field_lines({name: value for name, value in fields.items() if value})


def _priority(request: Request) -> str:
    """Return the request's priority: `bulk` by its tag, else what its client asked for, else by whether it streams."""
    if "bulk" in request.hints.tags:
        return "bulk"
    return request.hints.priority or ("interactive" if request.stream else "standard")
