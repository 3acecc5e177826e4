"""Prometheus metrics of daemon, gateway and control plane: counters, histograms, and numbers that are read at a scrape.

Counting costs one addition, because the values are plain numbers; prometheus_client only encodes them at a scrape. The
models' histograms have OpenTelemetry's GenAI names (semantic conventions 1.37, status Development), so that one
dashboard shows edge and gateway. The values of every label are bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

from ..documents.data import table_of
from ..types import OPERATIONS, Kind, Usage

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
else:  # it is imported for the first scrape
    Collector = object

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_MODEL = ("gen_ai_operation_name", "gen_ai_request_model", "gen_ai_response_model")


T = TypeVar("T")
_PACKAGES = {
    "causeway_edge": "edge_node",
    "causeway_gateway": "cloud_pool",
    "causeway_jobs": "cloud_pool",
    "causeway_fleet": "fleet",
}
"""The package of each prefix; all other metrics are those of `router`."""
MetricKind = Literal["gauge", "counter"]
Registry: TypeAlias = "CollectorRegistry | LateRegistry"


def help_of(name: str) -> str:
    """Return the help text of a metric, from `metrics.yaml` in its package."""
    return _help_texts(_PACKAGES.get("_".join(name.split("_", 2)[:2]), "router"))[name]


@cache
def _help_texts(package: str) -> dict[str, str]:
    return table_of(f"causeway_server.{package}", "metrics.yaml", dict[str, str])


def described(
    kind: Callable[..., T], registry: CollectorRegistry, name: str, labels: tuple[str, ...] = (), **options: Any
) -> T:
    """Return a metric of prometheus_client with its help text."""
    return kind(name, help_of(name), labels, registry=registry, **options)


class Sample(msgspec.Struct, frozen=True):
    """A number that is read at a scrape. `labels` is ``((name, value), …)``."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    kind: MetricKind = "gauge"


class LateRegistry:
    """A registry that imports prometheus_client, and with it an HTTP server and client, for the first scrape."""

    def __init__(self) -> None:
        self._collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        self._collectors.append(collector)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        for collector in self._collectors:
            registry.register(collector)
        return generate_latest(registry)


class SampleCollector(Collector):
    """A collector of numbers that other components own; `read` returns them at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for sample in self._read():
            names, values = [name for name, _ in sample.labels], [value for _, value in sample.labels]
            family = families.get(sample.name)
            if family is None:
                kind = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
                family = families[sample.name] = kind(sample.name, help_of(sample.name), labels=names)
            family.add_metric(values, sample.value)
        return families.values()


class Counter(Collector):
    """Sums by label values. Only the event loop's thread writes and scrapes, so that no lock is needed."""

    def __init__(self, registry: Registry, name: str, labels: tuple[str, ...]) -> None:
        self._name = name
        self._labels = labels
        self._sums: dict[tuple[str, ...], list[float]] = {}
        registry.register(self)

    def add(self, labels: tuple[str, ...], amount: float = 1.0) -> None:
        (self._sums.get(labels) or self.series(labels))[0] += amount

    def series(self, labels: tuple[str, ...]) -> list[float]:
        """Return the sum for these label values, as the only element of a list, which grows with each addition."""
        return self._sums.setdefault(labels, [0.0])

    def items(self) -> Iterable[tuple[tuple[str, ...], float]]:
        return [(labels, value) for labels, (value,) in self._sums.items()]

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily

        family = CounterMetricFamily(self._name, help_of(self._name), labels=self._labels)
        for labels, value in self.items():
            family.add_metric(labels, value)
        return (family,)


class Histogram(Collector):
    """Counts of values by bucket, by label values. Only the event loop's thread writes and scrapes."""

    def __init__(self, registry: Registry, name: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        self._name = name
        self._labels = labels
        self._bounds = bounds
        self._series: dict[tuple[str, ...], list[float]] = {}  # label values → bucket counts, then the sum
        registry.register(self)

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        series = self._series.get(labels) or self.series(labels)
        series[bisect_left(self._bounds, value)] += 1
        series[-1] += value

    def series(self, labels: tuple[str, ...]) -> list[float]:
        """Return the counts of each bucket for these label values, then the sum; they grow with each observation."""
        return self._series.setdefault(labels, [0] * (len(self._bounds) + 2))

    def values(self) -> Iterable[list[float]]:
        """Return for each label values the count of each bucket, and the sum at the end."""
        return self._series.values()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.metrics_core import HistogramMetricFamily

        family = HistogramMetricFamily(self._name, help_of(self._name), labels=self._labels)
        names = [*map(str, self._bounds), "+Inf"]
        for labels, series in self._series.items():
            family.add_metric(labels, list(zip(names, accumulate(series[:-1]), strict=True)), series[-1])
        return (family,)


class ModelMetrics:
    """The time and the tokens of models' answers, under OpenTelemetry's GenAI names."""

    def __init__(self, registry: Registry) -> None:
        histogram = partial(Histogram, registry)
        self._ttft = histogram("gen_ai_server_time_to_first_token", _MODEL, _SECONDS)
        self._tpot = histogram("gen_ai_server_time_per_output_token", _MODEL, _SECONDS)
        self._duration = histogram("gen_ai_server_request_duration", (*_MODEL, "error_type"), _SECONDS)
        self._usage = histogram("gen_ai_client_token_usage", (*_MODEL, "gen_ai_token_type"), _TOKENS)
        self._sizes: dict[tuple[str, ...], tuple[list[float], ...]] = {}  # labels → usage of input and output
        self._answers: dict[tuple[str, str, str], tuple[list[float], ...]] = {}  # → usage of both, three times

    def observe_answer(
        self, kind: Kind, models: tuple[str, str], usage: Usage, duration_s: float, ttft_s: float, tokens: int
    ) -> None:
        """Count a request with an answer, as `observe` does, with the series looked up once."""
        labels = (OPERATIONS[kind], *models)
        found = self._answers.get(labels)
        if found is None:
            sizes = [self._usage.series((*labels, of)) for of in ("input", "output")]
            times = self._duration.series((*labels, "")), self._ttft.series(labels), self._tpot.series(labels)
            found = self._answers[labels] = (*sizes, *times)
        received, sent, duration, ttft, tpot = found
        received[bisect_left(_TOKENS, usage.prompt_tokens)] += 1
        received[-1] += usage.prompt_tokens
        sent[bisect_left(_TOKENS, usage.completion_tokens)] += 1
        sent[-1] += usage.completion_tokens
        bucket = bisect_left(_SECONDS, duration_s)
        duration[bucket] += 1
        duration[-1] += duration_s
        ttft[bisect_left(_SECONDS, ttft_s)] += 1
        ttft[-1] += ttft_s
        if tokens > 1:
            per_token_s = max(0.0, duration_s - ttft_s) / (tokens - 1)
            tpot[bisect_left(_SECONDS, per_token_s)] += 1
            tpot[-1] += per_token_s

    def observe(
        self,
        kind: Kind,
        models: tuple[str, str],
        usage: Usage,
        duration_s: float,
        *,
        error: str = "",
        ttft_s: float | None = None,
        tokens: int = 0,
    ) -> None:
        """Count one request. `models`: the one that it names and the one that answered; the caller bounds both.
        `error`: the code, "" if there is an answer. `ttft_s`: time to the first of `tokens`, if any, for the time of
        each one after it.
        """
        labels = (OPERATIONS[kind], *models)
        sizes = self._sizes.get(labels)
        if sizes is None:
            sizes = self._sizes[labels] = tuple([self._usage.series((*labels, of)) for of in ("input", "output")])
        for series, count in zip(sizes, (usage.prompt_tokens, usage.completion_tokens), strict=True):
            series[bisect_left(_TOKENS, count)] += 1
            series[-1] += count
        self._duration.observe((*labels, error), duration_s)
        if ttft_s is not None:
            self._ttft.observe(labels, ttft_s)
            if tokens > 1:
                self._tpot.observe(labels, max(0.0, duration_s - ttft_s) / (tokens - 1))
