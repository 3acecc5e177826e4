"""The gateway's section `load_balancing`, and a tier's keys `max_attempts`, `retry_budget` and `load_balancing`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Pause, Positive, Seconds

Share = Annotated[float, Meta(ge=0, le=1)]
LoadBalancing = Literal["least_loaded", "prefix_affinity"]
_MAX_PROBE_PAUSE_S = 2.0
KV_CACHE_TOKENS = 131072


class RetryBudgetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds the attempts beyond the first of each request."""

    share: Share = 0.2
    min_retries_per_s: Pause = 0.5


class LoadBalancingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules by which endpoints are selected, ejected and readmitted."""

    consecutive_failures: Positive = 3
    silent_before_probe_s: Seconds = 1.0
    probe_timeout_s: Seconds = 1.5
    hung_after_s: Seconds = 10.0
    prefill_tokens_per_s: Seconds = 50.0
    base_ejection_s: Seconds = 0.5
    max_ejection_s: Seconds = 30.0
    max_ejected_share: Share = 0.5
    slowness_decay_s: Seconds = 30.0
    zone_spill_requests: Positive = 16
    load_tokens: Positive = 200
    kv_cache_tokens: Positive = KV_CACHE_TOKENS
    metrics_interval_s: Seconds = 1.0
    dns_refresh_s: Seconds = 5.0


def ejection_s(times: int, settings: LoadBalancingConfig) -> float:
    """Return the ejection time of an endpoint that was ejected `times` before, without a long active time between."""
    return min(settings.max_ejection_s, settings.base_ejection_s * 2.0 ** min(max(0, times), 30))


def probe_pause_s(failed_probes: int, settings: LoadBalancingConfig) -> float:
    """Return the pause after this many failed probes; at most 2 s, since the pool may need the endpoint."""
    return min(_MAX_PROBE_PAUSE_S, ejection_s(failed_probes, settings))
