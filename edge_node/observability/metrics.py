"""Prometheus metrics: `causeway_edge_*` for the daemon, OpenTelemetry's GenAI names for the models.

The GenAI names follow semantic conventions 1.37 (status Development). The values of every label are bounded: targets
come from the policy, error codes from the error tree. Counting costs one addition, because the values are plain
numbers; prometheus_client only encodes them at a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from math import inf

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S
from causeway_server.router.serving.gauges import Gauge, GaugeCollector
from causeway_server.router.types import AUTO, AttemptRecord, Kind, Outcome, Request, Target, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, *LATENCY_BOUNDS_S, 16.0, 30.0, 60.0)
_TRAFFIC_BUCKETS = [bisect_left(LATENCY_BOUNDS_S, bound) for bound in (*_REQUEST_SECONDS, inf)]
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_OPERATIONS: dict[Kind, str] = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}
_GEN_AI = ("gen_ai_operation_name", "gen_ai_request_model", "gen_ai_response_model")
_GEN_AI_ERROR = (*_GEN_AI, "error_type")
_REQUEST = ("route", "target", "status", "cache")
_ATTEMPT = ("target", "state", "error")
_TARGET = ("target",)


class RequestCount(msgspec.Struct, frozen=True):
    """Requests with the same route and result."""

    route: str
    target: str
    status: str
    cache: str
    count: int


class Metrics:
    """All metrics of one daemon.

    Attributes:
        cost: US dollars, by target.
        shadow_requests: by target and result.
        semantic_checks: semantic answers that were compared with new ones, or should have been, by result.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = partial(_Counter, self.registry), partial(_Histogram, self.registry)
        self._requests = counter("causeway_edge_requests", "Requests, by route and result.", _REQUEST)
        self._request_s = histogram(
            "causeway_edge_request_seconds", "Seconds from arrival to the last byte.", ("route",), _REQUEST_SECONDS
        )
        self._rejected = counter(
            "causeway_edge_requests_rejected",
            "Requests for an answer that were rejected before routing, by error code.",
            ("code",),
        )
        self._attempts = counter("causeway_edge_attempts", "Attempts, by target and result.", _ATTEMPT)
        self._handoffs = counter(
            "causeway_edge_handoffs", "Attempts handed off for low confidence, by target.", _TARGET
        )
        self._fallbacks = counter(
            "causeway_edge_fallbacks", "Answers from a fallback attempt, by the target that answered.", _TARGET
        )
        self._tokens = counter("causeway_edge_tokens", "Tokens, by target and type.", ("target", "type"))
        self.cost = counter(
            "causeway_edge_cost_usd", "Cost of answers in US dollars, by target; shadow requests included.", _TARGET
        )
        self.shadow_requests = counter(
            "causeway_edge_shadow_requests",
            "Shadow requests by target and result (agreed, disagreed, failed, interrupted, over_budget, dropped).",
            ("target", "result"),
        )
        self.semantic_checks = counter(
            "causeway_edge_semantic_checks",
            "Semantic answers that were to be made anew and compared, by result (agreed, disagreed, failed).",
            ("result",),
        )
        self._policy_loads = counter(
            "causeway_edge_policy_loads", "Policy files read, by result (activated, refused).", ("result",)
        )
        self._ttft = histogram("gen_ai_server_time_to_first_token", "Seconds to the first token.", _GEN_AI, _SECONDS)
        self._tpot = histogram(
            "gen_ai_server_time_per_output_token", "Seconds per token after the first.", _GEN_AI, _SECONDS
        )
        self._duration = histogram(
            "gen_ai_server_request_duration", "Seconds of the attempt that answered.", _GEN_AI_ERROR, _SECONDS
        )
        self._usage = histogram(
            "gen_ai_client_token_usage", "Tokens per request.", (*_GEN_AI, "gen_ai_token_type"), _TOKENS
        )
        self._models: frozenset[str] = frozenset({AUTO})

    def watch(self, read_gauges: Callable[[], Iterable[Gauge]]) -> None:
        """Read further gauges at each scrape."""
        self.registry.register(GaugeCollector(read_gauges))

    def set_targets(self, names: Iterable[str]) -> None:
        """Set the target names. Other model names become the label value "other", since clients can invent any."""
        self._models = frozenset({AUTO, *names})

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

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

    def traffic(self) -> Traffic:
        """Return the sums of all requests until now; sums the counters, which costs requests nothing."""
        requests = errors = 0
        for (_, _, status, _), count in self._requests.items():
            requests += int(count) if status in ("ok", "error") else 0
            errors += int(count) if status == "error" else 0
        latency = [0] * (len(LATENCY_BOUNDS_S) + 1)
        for series in self._request_s.values():
            for bucket, count in zip(_TRAFFIC_BUCKETS, series, strict=False):
                latency[bucket] += int(count)
        degraded = sum(count for _, count in self._fallbacks.items())
        return Traffic(requests, errors, int(degraded), tuple(latency))

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
        """Count a generation and its attempts, once for all requests that shared it.

        Args:
            request: the request.
            attempts: all attempts, in order.
            target: the target that answered; None if none did.
            usage: the tokens of the answer.
            usd: the cost of all attempts, US dollars.
            degraded: whether the answer is a fallback.
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

    def _record_model(self, request: Request, target: Target, attempt: AttemptRecord, usage: Usage) -> None:
        model = request.model if request.model in self._models else "other"
        labels = (_OPERATIONS[request.kind], model, target.model)
        for kind, count in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
            self._tokens.add((target.name, kind), count)
            self._usage.observe((*labels, kind), count)
        duration_s = (attempt.duration_ms or 0.0) / 1000.0
        self._duration.observe((*labels, attempt.error), duration_s)
        if attempt.ttft_ms is not None:
            ttft_s = attempt.ttft_ms / 1000.0
            self._ttft.observe(labels, ttft_s)
            if attempt.tokens > 1:
                self._tpot.observe(labels, max(0.0, duration_s - ttft_s) / (attempt.tokens - 1))


class _Counter(Collector):
    """Sums by label values. Only the event loop's thread writes and scrapes, so that no lock is needed."""

    def __init__(self, registry: CollectorRegistry, name: str, help_text: str, labels: tuple[str, ...]) -> None:
        self._family = partial(CounterMetricFamily, name, help_text, labels=labels)
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def add(self, labels: tuple[str, ...], amount: float = 1.0) -> None:
        self._sums[labels] = self._sums.get(labels, 0.0) + amount

    def items(self) -> Iterable[tuple[tuple[str, ...], float]]:
        return self._sums.items()

    def describe(self) -> Iterable[Metric]:
        return (self._family(),)

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for labels, value in self._sums.items():
            family.add_metric(labels, value)
        return (family,)


class _Histogram(Collector):
    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        help_text: str,
        labels: tuple[str, ...],
        bounds: tuple[float, ...],
    ) -> None:
        self._family = partial(HistogramMetricFamily, name, help_text, labels=labels)
        self._bounds = bounds
        self._series: dict[tuple[str, ...], list[float]] = {}  # label values → bucket counts, then the sum
        registry.register(self)

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = [0] * (len(self._bounds) + 2)
        series[bisect_left(self._bounds, value)] += 1
        series[-1] += value

    def values(self) -> Iterable[list[float]]:
        """Return for each label values the count of each bucket, and the sum at the end."""
        return self._series.values()

    def describe(self) -> Iterable[Metric]:
        return (self._family(),)

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        names = [*map(str, self._bounds), "+Inf"]
        for labels, series in self._series.items():
            family.add_metric(labels, list(zip(names, accumulate(series[:-1]), strict=True)), series[-1])
        return (family,)


class Traffic(msgspec.Struct, frozen=True):
    """Sums since the start of the daemon, or between two moments.

    Attributes:
        requests: Requests that were answered or failed; not those that clients cancelled.
        errors: Those that failed.
        degraded: Answers of a fallback.
        latency: Requests by bucket of `LATENCY_BOUNDS_S`, the last one for slower ones.
        restarts: Engine children that ended unexpectedly.
    """

    requests: int = 0
    errors: int = 0
    degraded: int = 0
    latency: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_S) + 1)
    restarts: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.requests - earlier.requests,
            self.errors - earlier.errors,
            self.degraded - earlier.degraded,
            tuple(late - early for late, early in zip(self.latency, earlier.latency, strict=True)),
            self.restarts - earlier.restarts,
        )


class DeviceCondition(msgspec.Struct, frozen=True):
    """The device at one moment, or over a time.

    Attributes:
        problem: Why no target can answer; "" if one can.
        temperature_c: None: this device cannot read it; `throttled` likewise.
    """

    traffic: Traffic = Traffic()
    problem: str = ""
    temperature_c: float | None = None
    throttled: bool | None = None
