"""Prometheus metrics of live sessions."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class SessionMetrics:
    """Counts sessions.

    Args:
        open_sessions: returns how many have a connection, and how many were cut and can be resumed.
    """

    def __init__(self, registry: CollectorRegistry, open_sessions: Callable[[], tuple[int, int]]) -> None:
        open_now = Gauge(
            "causeway_cloud_sessions",
            "Live sessions of this gateway, by state (connected, cut: it can be resumed).",
            ("state",),
            registry=registry,
        )
        open_now.labels("connected").set_function(lambda: open_sessions()[0])
        open_now.labels("cut").set_function(lambda: open_sessions()[1])
        self._opened = Counter("causeway_cloud_sessions_opened", "Live sessions that were opened.", registry=registry)
        self._resumed = Counter(
            "causeway_cloud_sessions_resumed", "Times that a live session was resumed.", registry=registry
        )
        self._refused = Counter(
            "causeway_cloud_sessions_refused", "Live sessions refused for want of room.", registry=registry
        )
        self._ended = Counter(
            "causeway_cloud_sessions_ended",
            "Live sessions that ended, by reason (closed, not_resumed, idle, gave_way, drained).",
            ("reason",),
            registry=registry,
        )

    def opened(self) -> None:
        self._opened.inc()

    def resumed(self) -> None:
        self._resumed.inc()

    def refused(self) -> None:
        self._refused.inc()

    def ended(self, reason: str) -> None:
        self._ended.labels(reason).inc()
