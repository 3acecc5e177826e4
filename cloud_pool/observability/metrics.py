"""The gateway's Prometheus metrics, one registry for all rooms, and the lag of its loop. Callers choose no labels."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial

import anyio
from prometheus_client import CollectorRegistry, generate_latest

from causeway_server.router.serving.metrics import Counter, Histogram, ModelMetrics
from causeway_server.router.types import Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTERVAL_S = 0.02


class Metrics:
    """The gateway's own counters. `models`: Times and tokens of the tiers' answers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry), partial(Histogram, registry)
        self._requests = counter("causeway_gateway_requests", ("tier", "outcome"))
        self._rejected = counter("causeway_gateway_requests_rejected", ("code",))
        self._seconds = histogram("causeway_gateway_request_seconds", ("tier",), _SECONDS)
        self._tokens = counter("causeway_gateway_tokens", ("tier", "type"))
        self._reloads = counter("causeway_gateway_model_reloads", ("model",))
        self.models = ModelMetrics(registry)

    def count_rejected(self, code: str) -> None:
        self._rejected.add((code,))

    def count_reload(self, model: str) -> None:
        self._reloads.add((model,))

    def observe(self, tier: str, outcome: str, usage: Usage, duration_s: float) -> None:
        """Count one request that has ended. `outcome`: `ok`, or an error's code; `duration_s`: since its arrival."""
        self._requests.add((tier, outcome))
        self._seconds.observe((tier,), duration_s)
        self._tokens.add((tier, "input"), usage.prompt_tokens)
        self._tokens.add((tier, "output"), usage.completion_tokens)

    def text(self) -> bytes:
        """Return the exposition format, for /metrics."""
        return generate_latest(self.registry)


@dataclass(eq=False, repr=False)
class EventLoopLag:
    """Measures the time that this process lost because it or the machine was busy; 0 unless `watch` runs.

    A first token that arrives during a lag may have been there long before, so it does not describe the tier: a limit
    lowered for it would refuse requests that the tiers can serve.
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
