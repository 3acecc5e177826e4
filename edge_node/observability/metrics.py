"""Prometheus metrics: `causeway_edge_*` for the daemon, and OpenTelemetry's GenAI names (semantic conventions 1.37,
status Development) for what models did. Every label is bounded: targets are the policy's, codes the error tree's.

Counting costs an addition: the values are plain numbers here, and prometheus_client writes them out at a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.types import AUTO, AttemptRecord, Kind, Outcome, Target, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_OPERATIONS: dict[Kind, str] = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}
_GEN_AI = ("gen_ai_operation_name", "gen_ai_request_model", "gen_ai_response_model")
_GEN_AI_ERROR = (*_GEN_AI, "error_type")


class Gauge(msgspec.Struct, frozen=True):
    """One number that is read when somebody scrapes. `labels` is ``((name, value), …)``."""

    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    counts: bool = False  # it only grows


class FinishedGeneration(msgspec.Struct, frozen=True):
    """What the making of one answer came to; counted once, however many requests shared it. `target`: who answered."""

    kind: Kind
    requested: str  # the model that was asked for
    attempts: tuple[AttemptRecord, ...]
    target: Target | None = None
    usage: Usage = Usage()
    usd: float = 0.0
    degraded: bool = False


class Metrics:
    """`read` is asked at each scrape for the state of the parts."""

    def __init__(self, read: Callable[[], Iterable[Gauge]] = tuple) -> None:
        self.registry = CollectorRegistry()
        make = _Maker(self.registry)
        self._requests = make.counter("causeway_edge_requests", "Requests by what became of them.", _REQUEST)
        self._seconds = make.histogram("causeway_edge_request_seconds", "Arrival to last byte.", ("route",), _SECONDS)
        self._refused = make.counter("causeway_edge_refused", "Asks that never became a request.", ("code",))
        self._attempts = make.counter("causeway_edge_attempts", "Attempts by how they ended.", _ATTEMPT)
        self._handoffs = make.counter("causeway_edge_handoffs", "Answers given up for low confidence.", _TARGET)
        self._fallbacks = make.counter("causeway_edge_fallbacks", "Answers by a later attempt than the first.", _TARGET)
        self._tokens = make.counter("causeway_edge_tokens", "Tokens by target.", ("target", "type"))
        self._spent = make.counter("causeway_edge_spent_usd", "Cost of the cloud's answers, US dollars.", _TARGET)
        self._policy = make.counter("causeway_edge_policy_loads", "Policy files read.", ("result",))
        self._ttft = make.histogram("gen_ai_server_time_to_first_token", "Seconds.", _GEN_AI, _SECONDS)
        self._tpot = make.histogram("gen_ai_server_time_per_output_token", "Seconds.", _GEN_AI, _SECONDS)
        self._duration = make.histogram("gen_ai_server_request_duration", "Seconds.", _GEN_AI_ERROR, _SECONDS)
        self._usage = make.histogram("gen_ai_client_token_usage", "Tokens.", (*_GEN_AI, "gen_ai_token_type"), _TOKENS)
        self.registry.register(_State(read))
        self._models: frozenset[str] = frozenset({AUTO})

    def set_targets(self, names: Iterable[str]) -> None:
        """The only model names that become label values; a caller can invent others."""
        self._models = frozenset({AUTO, *names})

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def refused(self, code: str) -> None:
        self._refused.add((code,))

    def policy_loaded(self, good: bool) -> None:
        self._policy.add(("activated" if good else "refused",))

    def request_finished(self, outcome: Outcome) -> None:
        """One request is over."""
        self._requests.add((outcome.route, outcome.target, outcome.status, outcome.cache))
        self._seconds.observe((outcome.route,), outcome.total_ms / 1000.0)

    def generation_finished(self, work: FinishedGeneration) -> None:
        """One work is over, whoever listened."""
        for attempt in work.attempts:
            self._attempts.add((attempt.target, attempt.state, attempt.error))
            if attempt.state == "handed_off":
                self._handoffs.add((attempt.target,))
        if work.target is None:
            return
        if work.degraded:
            self._fallbacks.add((work.target.name,))
        if work.usd > 0.0:
            self._spent.add((work.target.name,), work.usd)
        self._record_model(work, work.target, work.attempts[-1])

    def _record_model(self, work: FinishedGeneration, target: Target, attempt: AttemptRecord) -> None:
        model = work.requested if work.requested in self._models else "other"
        labels = (_OPERATIONS[work.kind], model, target.model)
        for kind, count in (("input", work.usage.prompt_tokens), ("output", work.usage.completion_tokens)):
            self._tokens.add((target.name, kind), count)
            self._usage.observe((*labels, kind), count)
        duration_s = (attempt.duration_ms or 0.0) / 1000.0
        self._duration.observe((*labels, attempt.error), duration_s)
        if attempt.ttft_ms is not None:
            ttft_s = attempt.ttft_ms / 1000.0
            self._ttft.observe(labels, ttft_s)
            if attempt.tokens > 1:
                self._tpot.observe(labels, max(0.0, duration_s - ttft_s) / (attempt.tokens - 1))


_REQUEST = ("route", "target", "status", "cache")
_ATTEMPT = ("target", "state", "error")
_TARGET = ("target",)


class _Counter(Collector):
    """Sums by labels. One thread writes, the scrape reads: no locks, which is most of what a count costs elsewhere."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._what = (name, text, labels)
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, labels: tuple[str, ...], amount: float = 1.0) -> None:
        self._sums[labels] = self._sums.get(labels, 0.0) + amount

    def _family(self) -> CounterMetricFamily:
        name, text, labels = self._what
        return CounterMetricFamily(name, text, labels=labels)

    def describe(self) -> Iterable[Metric]:
        return (self._family(),)

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for labels, value in self._sums.items():
            family.add_metric(labels, value)
        return (family,)


class _Histogram(Collector):
    def __init__(self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        self._what = (name, text, labels)
        self._bounds = bounds
        self._tallies: dict[tuple[str, ...], list[float]] = {}  # labels → the buckets' counts, then the sum

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        tally = self._tallies.get(labels)
        if tally is None:
            tally = self._tallies[labels] = [0] * (len(self._bounds) + 2)
        tally[bisect_left(self._bounds, value)] += 1
        tally[-1] += value

    def _family(self) -> HistogramMetricFamily:
        name, text, labels = self._what
        return HistogramMetricFamily(name, text, labels=labels)

    def describe(self) -> Iterable[Metric]:
        return (self._family(),)

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        names = [*map(str, self._bounds), "+Inf"]
        for labels, tally in self._tallies.items():
            family.add_metric(labels, list(zip(names, accumulate(tally[:-1]), strict=True)), tally[-1])
        return (family,)


class _Maker:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> _Counter:
        counter = _Counter(name, text, labels)
        self._registry.register(counter)
        return counter

    def histogram(self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> _Histogram:
        histogram = _Histogram(name, text, labels, bounds)
        self._registry.register(histogram)
        return histogram


class _State(Collector):
    """The numbers that have an owner elsewhere, read at the scrape."""

    def __init__(self, read: Callable[[], Iterable[Gauge]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for reading in self._read():
            names, values = [name for name, _ in reading.labels], [value for _, value in reading.labels]
            family = families.get(reading.name)
            if family is None:
                kind = CounterMetricFamily if reading.counts else GaugeMetricFamily
                family = families[reading.name] = kind(reading.name, reading.help, labels=names)
            family.add_metric(values, reading.value)
        return families.values()
