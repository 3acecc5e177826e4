"""How endpoints are chosen, given up and let back in."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

LoadBalancing = Literal["least_loaded", "prefix_affinity"]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]


class LoadBalancingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    consecutive_failures: Positive = 3  # in a row, then an endpoint is ejected; one that refuses connections is at once
    silent_before_probe_s: Seconds = (
        1.0  # an endpoint that was silent for so long, with work, is asked whether it lives
    )
    probe_timeout_s: Seconds = 1.5  # how long its answer may take; Triton needs 1 s to say that a stub died
    hung_after_s: Seconds = 10.0  # an ejected endpoint that stays silent for so long has the answers it began ended
    base_ejection_s: Seconds = 0.5  # the first time; doubles with each relapse
    max_ejection_s: Seconds = 30.0
    max_ejected_share: Annotated[float, Meta(ge=0, le=1)] = (
        0.5  # share of the pool, on suspicion; a failed probe is proof
    )
    slow_start_s: Pause = 10.0  # who comes back gets a tenth of its share at first, and all of it after this
    slowness_decay_s: Seconds = (
        30.0  # in which one that was slow once or twice, and gets no requests, is forgiven by two thirds
    )
    zone_spill_requests: Positive = 16  # requests at one endpoint from which other zones help
    load_factor: Annotated[float, Meta(gt=1)] = (
        1.25  # of `load_balancing: prefix_affinity`: the most over the mean load
    )
    dns_refresh_s: Seconds = 5.0  # how often names are asked again


ASK_S = 2.0


def relapse_s(times: int, settings: LoadBalancingConfig) -> float:
    """How long one stays out before it is asked that was out `times` before of late."""
    return min(settings.max_ejection_s, settings.base_ejection_s * 2.0 ** min(max(0, times), 30))


def pause_s(times: int, settings: LoadBalancingConfig) -> float:
    """After so many questions in vain, until the next one. Never long: one that is well again may be needed."""
    return min(ASK_S, relapse_s(times, settings))
