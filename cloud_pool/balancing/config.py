"""How endpoints are chosen, given up and let back in."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Balance = Literal["least", "prefix"]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    faults: Positive = 3  # in a row, then an endpoint is ejected; one that refuses connections is at once
    stuck_s: Seconds = 1.0  # an endpoint that was silent for so long, with work, is asked whether it lives
    probe_s: Seconds = 1.5  # how long its answer may take; Triton needs 1 s to say that a stub died
    hung_s: Seconds = 10.0  # an ejected endpoint that stays silent for so long has the answers it began ended
    eject_s: Seconds = 0.5  # the first time; doubles with each relapse
    max_eject_s: Seconds = 30.0
    max_ejected: Annotated[float, Meta(ge=0, le=1)] = 0.5  # share of the pool, on suspicion; a failed probe is proof
    slow_start_s: Pause = 10.0  # who comes back gets a tenth of its share at first, and all of it after this
    forget_s: Seconds = (
        30.0  # in which one that was slow once or twice, and gets no requests, is forgiven by two thirds
    )
    spill_at: Positive = 16  # requests at one endpoint from which other zones help
    load_factor: Annotated[float, Meta(gt=1)] = 1.25  # of `balance: prefix`: the most over the mean load
    dns_s: Seconds = 5.0  # how often names are asked again


ASK_S = 2.0


def relapse_s(times: int, settings: PoolConfig) -> float:
    """How long one stays out before it is asked that was out `times` before of late."""
    return min(settings.max_eject_s, settings.eject_s * 2.0 ** min(max(0, times), 30))


def pause_s(times: int, settings: PoolConfig) -> float:
    """After so many questions in vain, until the next one. Never long: one that is well again may be needed."""
    return min(ASK_S, relapse_s(times, settings))
