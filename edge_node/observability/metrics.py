"""Prometheus metrics: `causeway_edge_*` for the daemon, OpenTelemetry's GenAI names for the models.

The values of every label are bounded: targets come from the policy, error codes from the error tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf

import msgspec

from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S
from causeway_server.router.serving.metrics import (
    Counter,
    Histogram,
    LateRegistry,
    ModelMetrics,
    Sample,
    SampleCollector,
)
from causeway_server.router.types import AUTO, AttemptRecord, Outcome, Request, Target, Usage

_REQUEST_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, *LATENCY_BOUNDS_S, 16.0, 30.0, 60.0)
_TRAFFIC_BUCKETS = [bisect_left(LATENCY_BOUNDS_S, bound) for bound in (*_REQUEST_SECONDS, inf)]
_REQUEST = ("route", "target", "status", "cache")
_ATTEMPT = ("target", "state", "error")
_TARGET = ("target",)


class RequestCount(msgspec.Struct, frozen=True):
    """The number of requests with the same route and result."""

    route: str
    target: str
    status: str
    cache: str
    count: int


class Metrics:
    """All metrics of one daemon.

    Attributes:
        cost: US dollars, by target.
        shadow_requests: Number by target and result.
        variant_answers: Answers of targets with variants, by target, variant and result.
        feedback: Scores of clients, by target, variant and result.
        semantic_checks: Semantic answers that were compared with new ones, or should have been, by result.
    """

    def __init__(self) -> None:
        self.registry = LateRegistry()
        counter, histogram = partial(Counter, self.registry), partial(Histogram, self.registry)
        self._requests = counter("causeway_edge_requests", _REQUEST)
        self._request_s = histogram("causeway_edge_request_seconds", ("route",), _REQUEST_SECONDS)
        self._rejected = counter("causeway_edge_requests_rejected", ("code",))
        self._attempts = counter("causeway_edge_attempts", _ATTEMPT)
        self._handoffs = counter("causeway_edge_handoffs", _TARGET)
        self._fallbacks = counter("causeway_edge_fallbacks", _TARGET)
        self._tokens = counter("causeway_edge_tokens", ("target", "type"))
        self.cost = counter("causeway_edge_cost_usd", _TARGET)
        self.shadow_requests = counter("causeway_edge_shadow_requests", ("target", "result"))
        self.semantic_checks = counter("causeway_edge_semantic_checks", ("result",))
        self.variant_answers = counter("causeway_edge_variant_answers", ("target", "variant", "result"))
        self.feedback = counter("causeway_edge_feedback", ("target", "variant", "result"))
        self._session_turns = counter("causeway_edge_session_turns", ("target", "status"))
        self._lost_prefix = counter("causeway_edge_session_lost_tokens", _TARGET)
        self._policy_loads = counter("causeway_edge_policy_loads", ("result",))
        self._answers = ModelMetrics(self.registry)
        self._models: frozenset[str] = frozenset({AUTO})
        # by target: requests, their seconds, attempts, tokens of input and output
        self._direct: dict[str, tuple[list[float], ...]] = {}

    def watch(self, read_samples: Callable[[], Iterable[Sample]]) -> None:
        """Read further samples at each scrape."""
        self.registry.register(SampleCollector(read_samples))

    def set_targets(self, names: Iterable[str]) -> None:
        """Set the target names. Other model names become the label value "other", since clients can invent any."""
        self._models = frozenset({AUTO, *names})

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self.registry.text()

    def request_counts(self) -> tuple[RequestCount, ...]:
        """Return the finished requests by route and result."""
        return tuple(
            RequestCount(route, target, status, cache, int(count))
            for (route, target, status, cache), count in self._requests.items()
        )

    def request_rejected(self, code: str) -> None:
        """Count a request for an answer that was rejected before routing. `code`: the error's code."""
        self._rejected.add((code,))

    def policy_loaded(self, activated: bool) -> None:
        """Count a policy file that was read, and whether it was activated."""
        self._policy_loads.add(("activated" if activated else "refused",))

    def request_finished(self, outcome: Outcome) -> None:
        """Count a request when its outcome is known."""
        self._requests.add((outcome.route, outcome.target, outcome.status, outcome.cache))
        self._request_s.observe((outcome.route,), outcome.total_ms / 1000.0)
        if (session := outcome.session) is not None:
            self._session_turns.add((outcome.target, session.status))
            if session.lost_tokens:
                self._lost_prefix.add((outcome.target,), session.lost_tokens)

    def traffic(self) -> Traffic:
        """Return the sums of all requests until now; computed from the counters, so requests pay nothing for it."""
        requests = errors = on_device = cached = 0
        for (route, _, status, _), count in self._requests.items():
            requests += int(count) if status in ("ok", "error") else 0
            errors += int(count) if status == "error" else 0
            on_device += int(count) if status == "ok" and route in ("edge", "cache") else 0
            cached += int(count) if status == "ok" and route == "cache" else 0
        latency = [0] * (len(LATENCY_BOUNDS_S) + 1)
        for series in self._request_s.values():
            for bucket, count in zip(_TRAFFIC_BUCKETS, series, strict=False):
                latency[bucket] += int(count)
        degraded = sum(count for _, count in self._fallbacks.items())
        usd = sum(count for _, count in self.cost.items())
        counts = {"on_device": on_device, "cached": cached, "micro_usd": round(usd * 1e6)}
        return Traffic(requests, errors, int(degraded), tuple(latency), **counts)

    def generation_finished(
        self,
        request: Request,
        attempts: Sequence[AttemptRecord],
        target: Target | None,
        usage: Usage,
        *,
        usd: float,
        degraded: bool,
    ) -> None:
        """Count a generation and all its attempts, in order, once for all requests that shared it. `target`: the one
        that answered, if any; `usd`: the cost of all attempts, US dollars.
        """
        for attempt in attempts:
            self._attempts.add((attempt.target, attempt.state, attempt.error))
            if attempt.state == "handed_off":
                self._handoffs.add((attempt.target,))
        if target is None:
            return
        if degraded:
            self._fallbacks.add((target.name,))
        if usd > 0.0:
            self.cost.add((target.name,), usd)
        self._record_model(request, target, attempts[-1], usage)

    def passed_on(
        self, request: Request, target: Target, usage: Usage, attempt: AttemptRecord, *, usd: float, total_s: float
    ) -> None:
        """Count a request, its generation and its only attempt, whose answer came from a cloud and was not cached: as
        `generation_finished` and `request_finished` do, with the series looked up once.
        """
        name = target.name
        series = self._direct.get(name)
        if series is None:
            series = self._direct[name] = (
                self._requests.series(("cloud", name, "ok", "bypass")),
                self._request_s.series(("cloud",)),
                self._attempts.series((name, "done", "")),
                *(self._tokens.series((name, kind)) for kind in ("input", "output")),
            )
        requests, seconds, attempts, received, sent = series
        requests[0] += 1
        seconds[bisect_left(_REQUEST_SECONDS, total_s)] += 1
        seconds[-1] += total_s
        attempts[0] += 1
        received[0] += usage.prompt_tokens
        sent[0] += usage.completion_tokens
        if usd > 0.0:
            self.cost.add((name,), usd)
        model = request.model if request.model in self._models else "other"
        times = (attempt.duration_ms or 0.0) / 1000.0, (attempt.ttft_ms or 0.0) / 1000.0
        self._answers.observe_answer(request.kind, (model, target.model), usage, *times, attempt.tokens)

    def _record_model(self, request: Request, target: Target, attempt: AttemptRecord, usage: Usage) -> None:
        model = request.model if request.model in self._models else "other"
        for kind, count in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
            self._tokens.add((target.name, kind), count)
        self._answers.observe(
            request.kind,
            (model, target.model),
            usage,
            (attempt.duration_ms or 0.0) / 1000.0,
            error=attempt.error,
            ttft_s=None if attempt.ttft_ms is None else attempt.ttft_ms / 1000.0,
            tokens=attempt.tokens,
        )


class Traffic(msgspec.Struct, frozen=True):
    """Sums since the start of the daemon, or between two moments.

    Attributes:
        latency: Requests by bucket of `LATENCY_BOUNDS_S`, the last one for slower ones.
    """

    requests: int = 0  # requests that were answered or failed, without those that clients cancelled
    errors: int = 0  # failed requests
    degraded: int = 0  # answers of a fallback
    latency: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_S) + 1)
    restarts: int = 0  # engine children that ended unexpectedly
    on_device: int = 0  # requests that were answered without the cloud, with those of the cache
    cached: int = 0  # requests that the cache answered
    micro_usd: int = 0  # the cost in millionths of a US dollar, with that of shadow requests

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.requests - earlier.requests,
            self.errors - earlier.errors,
            self.degraded - earlier.degraded,
            tuple(late - early for late, early in zip(self.latency, earlier.latency, strict=True)),
            self.restarts - earlier.restarts,
            self.on_device - earlier.on_device,
            self.cached - earlier.cached,
            self.micro_usd - earlier.micro_usd,
        )


class DeviceCondition(msgspec.Struct, frozen=True):
    """The device's condition at one moment, or over a period."""

    traffic: Traffic = Traffic()
    problem: str = ""  # why no target can answer; "" if one can
    temperature_c: float | None = None  # Temperature; None if this device cannot read it. `throttled` likewise.
    throttled: bool | None = None
