"""The gateway's section `load_balancing`, and a tier's keys `max_attempts`, `retry_budget` and `load_balancing`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Pause, Positive, Seconds, doc

Share = Annotated[float, Meta(ge=0, le=1)]
LoadBalancing = Literal["least_loaded", "prefix_affinity"]
_MAX_PROBE_PAUSE_S = 2.0
KV_CACHE_TOKENS = 131072


class RetryBudgetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds the attempts beyond the first of each request."""

    share: Annotated[Share, doc("Retries allowed as a share of the requests of the last 10 s.")] = 0.2
    min_retries_per_s: Annotated[
        Pause, doc("Retries per second that are always allowed, so that a gateway with little traffic can retry.")
    ] = 0.5


class LoadBalancingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules by which endpoints are selected, ejected and readmitted."""

    consecutive_failures: Annotated[
        Positive,
        doc("Number of consecutive failures that eject an endpoint; one that refuses connections is ejected at once."),
    ] = 3
    silent_before_probe_s: Annotated[
        Seconds, doc("Time without data, while calls are open, after which an endpoint is probed.")
    ] = 1.0
    probe_timeout_s: Annotated[
        Seconds, doc("Maximum time of a probe. Triton reports a dead stub process after 1 s.")
    ] = 1.5
    hung_after_s: Annotated[
        Seconds,
        doc(
            "Time without data after which an endpoint counts as hung, in addition to the expected prefill time of "
            "its waiting prompts. All its calls end, and even a tier's only endpoint is ejected."
        ),
    ] = 10.0
    prefill_tokens_per_s: Annotated[Seconds, doc("Slowest expected prefill speed of a tier's only endpoint.")] = 50.0
    base_ejection_s: Annotated[Seconds, doc("Duration of the first ejection; it doubles with each relapse.")] = 0.5
    max_ejection_s: Annotated[Seconds, doc("Maximum duration of an ejection.")] = 30.0
    max_ejected_share: Annotated[
        Share,
        doc(
            "Maximum share of the endpoints ejected on suspicion, such as an unanswered probe. A refused or failed "
            "probe always ejects."
        ),
    ] = 0.5
    slowness_decay_s: Annotated[
        Seconds, doc("Time constant with which an endpoint's measured slowness decays without new samples.")
    ] = 30.0
    zone_spill_requests: Annotated[
        Positive, doc("Number of outstanding requests per endpoint above which endpoints in other zones are used too.")
    ] = 16
    load_tokens: Annotated[
        Positive,
        doc(
            "With `prefix_affinity`: tokens of a prompt that an endpoint must have cached to make up for one more open "
            "request there."
        ),
    ] = 200
    kv_cache_tokens: Annotated[
        Positive,
        doc("With `prefix_affinity`: tokens in the KV cache of an endpoint that does not report how many it has."),
    ] = KV_CACHE_TOKENS
    metrics_interval_s: Annotated[
        Seconds, doc("Interval at which servers are asked for their load, where a tier has `upstream.metrics`.")
    ] = 1.0
    dns_refresh_s: Annotated[Seconds, doc("Interval at which DNS names are resolved again.")] = 5.0


def ejection_s(times: int, settings: LoadBalancingConfig) -> float:
    """Return the ejection time of an endpoint that was ejected `times` before, without a long active time between."""
    return min(settings.max_ejection_s, settings.base_ejection_s * 2.0 ** min(max(0, times), 30))


def probe_pause_s(failed_probes: int, settings: LoadBalancingConfig) -> float:
    """Return the pause after this many failed probes; at most 2 s, since the pool may need the endpoint."""
    return min(_MAX_PROBE_PAUSE_S, ejection_s(failed_probes, settings))
