"""The gateway's section `load_balancing`, and a tier's keys `max_attempts`, `retry_budget` and `load_balancing`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Positive, Seconds

Share = Annotated[float, Meta(ge=0, le=1)]
LoadBalancing = Literal["least_loaded", "prefix_affinity"]
_MAX_PROBE_PAUSE_S = 2.0


class RetryBudgetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds the attempts beyond the first of each request."""

    share: Share = 0.2  # share of the requests of the last 10 s
    min_retries_per_s: Annotated[float, Meta(ge=0)] = 0.5  # where that is more, so that a quiet gateway can retry


class LoadBalancingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How endpoints are selected, ejected and readmitted."""

    # Failures in a row that eject an endpoint; one that refuses connections is ejected at once.
    consecutive_failures: Positive = 3
    silent_before_probe_s: Seconds = 1.0  # an endpoint with open calls that sends nothing for so long is probed
    probe_timeout_s: Seconds = 1.5  # Triton needs 1 s to report that a stub process died
    # An endpoint that answers nothing hangs after so long, beyond the expected reading of the prompts that wait there:
    # then also a tier's only endpoint is ejected, and all calls of the endpoint are ended.
    hung_after_s: Seconds = 10.0
    prefill_tokens_per_s: Seconds = 50.0  # slowest reading of prompts that is expected of a tier's only endpoint
    base_ejection_s: Seconds = 0.5  # the first time; doubles with each relapse
    max_ejection_s: Seconds = 30.0  # longest ejection
    # share of the pool that suspicion may eject, a probe without an answer too; a refused or failed probe is proof
    max_ejected_share: Share = 0.5
    slowness_decay_s: Seconds = 30.0  # without new samples an endpoint's measured slowness decays by two thirds
    zone_spill_requests: Positive = 16  # load at which endpoints in other zones help
    load_factor: Annotated[float, Meta(gt=1)] = 1.25  # with prefix_affinity: the highest load, times the mean load
    dns_refresh_s: Seconds = 5.0  # interval at which DNS names are resolved again


def ejection_s(times: int, settings: LoadBalancingConfig) -> float:
    """Return how long an endpoint stays ejected that was ejected `times` before, without a long active time between."""
    return min(settings.max_ejection_s, settings.base_ejection_s * 2.0 ** min(max(0, times), 30))


def probe_pause_s(failed_probes: int, settings: LoadBalancingConfig) -> float:
    """Return the pause after this many failed probes; at most 2 s, since the pool may need the endpoint."""
    return min(_MAX_PROBE_PAUSE_S, ejection_s(failed_probes, settings))
