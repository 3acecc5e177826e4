"""What the gateway counts, for Prometheus. Names are stable; no label holds anything that a caller can invent."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ..admission import AdmissionController
from ..admission.metrics import AdmissionMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TIER = ("tier",)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        to = self.registry
        self._requests = Counter(
            "causeway_cloud_requests", "Requests by outcome: ok or an error's code.", ("tier", "outcome"), registry=to
        )
        self._refused = Counter(
            "causeway_cloud_requests_rejected", "Asks that never became a request.", ("code",), registry=to
        )
        self._ttft = Histogram(
            "causeway_cloud_ttft_seconds", "Arrival to first token.", _TIER, buckets=_SECONDS, registry=to
        )
        self._tpot = Histogram(
            "causeway_cloud_tpot_seconds",
            "From one token to the next, the mean of a request.",
            _TIER,
            buckets=_TOKEN_SECONDS,
            registry=to,
        )
        self._seconds = Histogram(
            "causeway_cloud_request_seconds", "Arrival to end.", _TIER, buckets=_SECONDS, registry=to
        )
        self._tokens = Counter("causeway_cloud_tokens", "Tokens.", ("tier", "type"), registry=to)
        self._repairs = Counter(
            "causeway_cloud_model_reloads", "Models loaded again after their process died.", ("model",), registry=to
        )
        self.admission = AdmissionMetrics(to)

    def watch(self, tier: str, admission: AdmissionController) -> None:
        """Read at each scrape."""
        self.admission.watch(tier, admission)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def repaired(self, model: str) -> None:
        self._repairs.labels(model).inc()

    def first_token(self, tier: str, seconds: float) -> None:
        self._ttft.labels(tier).observe(seconds)

    def later_tokens(self, tier: str, seconds: float, tokens: int) -> None:
        """`tokens` after the first, in `seconds` together."""
        self._tpot.labels(tier).observe(seconds / tokens)

    def ended(self, tier: str, outcome: str, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        self._requests.labels(tier, outcome).inc()
        self._seconds.labels(tier).observe(seconds)
        self._tokens.labels(tier, "prompt").inc(prompt_tokens)
        self._tokens.labels(tier, "completion").inc(completion_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)
