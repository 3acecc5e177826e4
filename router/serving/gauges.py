"""Numbers that are read at a scrape: their owners count in plain integers, and prometheus_client encodes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Gauge(msgspec.Struct, frozen=True):
    """One number that is read at a scrape. `labels` is ``((name, value), …)``."""

    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    is_counter: bool = False


class GaugeCollector(Collector):
    """Collects numbers that other components own.

    Args:
        read: returns them; called at each scrape.
    """

    def __init__(self, read: Callable[[], Iterable[Gauge]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for gauge in self._read():
            names, values = [name for name, _ in gauge.labels], [value for _, value in gauge.labels]
            family = families.get(gauge.name)
            if family is None:
                kind = CounterMetricFamily if gauge.is_counter else GaugeMetricFamily
                family = families[gauge.name] = kind(gauge.name, gauge.help, labels=names)
            family.add_metric(values, gauge.value)
        return families.values()
