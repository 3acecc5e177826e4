"""The gateway's Prometheus metrics, one registry for all rooms, and the time that its event loop lost.

No label holds a value that a caller can choose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

import anyio
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TIER = ("tier",)
INTERVAL_S = 0.02


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "causeway_gateway_requests",
            "Requests that reached a tier, by outcome: ok or an error's code.",
            ("tier", "outcome"),
            registry=registry,
        )
        self._rejected = Counter(
            "causeway_gateway_requests_rejected",
            "Requests refused before a tier was chosen (authentication, parsing, limits), by the error's code.",
            ("code",),
            registry=registry,
        )
        self._ttft = Histogram(
            "causeway_gateway_ttft_seconds",
            "Time from arrival to first token.",
            _TIER,
            buckets=_SECONDS,
            registry=registry,
        )
        self._tpot = Histogram(
            "causeway_gateway_tpot_seconds",
            "Time per output token after the first, a request's mean.",
            _TIER,
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._seconds = Histogram(
            "causeway_gateway_request_seconds",
            "Time from arrival to the end of the answer.",
            _TIER,
            buckets=_SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "causeway_gateway_tokens", "Tokens by type: input or output.", ("tier", "type"), registry=registry
        )
        self._reloads = Counter(
            "causeway_gateway_model_reloads",
            "Models that this gateway loaded again after their process in Triton had died.",
            ("model",),
            registry=registry,
        )

    def count_rejected(self, code: str) -> None:
        self._rejected.labels(code).inc()

    def count_reload(self, model: str) -> None:
        self._reloads.labels(model).inc()

    def observe_first_token(self, tier: str, seconds: float) -> None:
        self._ttft.labels(tier).observe(seconds)

    def observe_later_tokens(self, tier: str, seconds: float, tokens: int) -> None:
        """Record `tokens` after the first, which took `seconds` together."""
        self._tpot.labels(tier).observe(seconds / tokens)

    def observe_end(self, tier: str, outcome: str, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        self._requests.labels(tier, outcome).inc()
        self._seconds.labels(tier).observe(seconds)
        self._tokens.labels(tier, "input").inc(prompt_tokens)
        self._tokens.labels(tier, "output").inc(completion_tokens)

    def text(self) -> bytes:
        """Return the exposition format, for /metrics."""
        return generate_latest(self.registry)


@dataclass(eq=False, repr=False)
class EventLoopLag:
    """The time that this process lost because the machine or itself was busy, which stays 0 unless `watch` runs.

    A first token that arrives during a lag may have been there long before the gateway read it, so it says nothing
    about the tier. If the concurrency limit were cut for it, a gateway on a busy machine would refuse what its tiers
    can do.
    """

    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    _lost_s: float = 0.0
    _due: float = math.inf

    def lost_s(self) -> float:
        """Return the seconds lost since the start, including a lag in progress."""
        return self._lost_s + max(0.0, self.clock() - self._due)

    async def watch(self) -> None:
        """Measure until cancelled."""
        try:
            while True:
                self._due = self.clock() + INTERVAL_S
                await self.sleep(INTERVAL_S)
                self._lost_s = self.lost_s()
        finally:
            self._due = math.inf
