"""Prometheus metrics of a pipeline. Messages cannot choose label values."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from causeway_server.router.serving.metrics import described

from ..brokers.port import TopicLag

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class StreamMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(described, Counter, registry), partial(described, Gauge, registry)
        self._messages = counter("causeway_gateway_stream_messages", ("outcome",))
        self._retries = counter("causeway_gateway_stream_retries", ("kind",))
        self.recovered = counter("causeway_gateway_stream_recovered")
        self._lag = gauge("causeway_gateway_stream_lag")
        self._in_flight = gauge("causeway_gateway_stream_in_flight")
        self._oldest = gauge("causeway_gateway_stream_oldest_seconds")
        self._active = gauge("causeway_gateway_stream_active")
        self._seconds = described(Histogram, registry, "causeway_gateway_stream_seconds", buckets=_SECONDS)

    def count(self, outcome: str, seconds: float | None = None) -> None:
        """Count an outcome. `seconds`: time since the message was published; None: not measured."""
        self._messages.labels(outcome).inc()
        if seconds is not None:
            self._seconds.observe(max(0.0, seconds))

    def count_retry(self, *, counted: bool) -> None:
        """Count a retry. `counted`: whether it counts as one of the message's attempts."""
        self._retries.labels("failed" if counted else "postponed").inc()

    def receives(self, lag: TopicLag) -> None:
        """Set the gauges of a process that receives, with its lag."""
        self._active.set(1)
        self._lag.set(lag.waiting + lag.unacknowledged)

    def waits_for_broker(self) -> None:
        """Record that the lag is unknown; the last value stays."""
        self._active.set(0)

    def stand_by(self) -> None:
        """Set the gauges of a process that stands by; the active process reports the lag."""
        for gauge in (self._active, self._lag, self._in_flight, self._oldest):
            gauge.set(0)

    def set_work(self, in_flight: int, oldest_s: float) -> None:
        self._in_flight.set(in_flight)
        self._oldest.set(max(0.0, oldest_s))
