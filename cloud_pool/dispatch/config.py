"""A tier's keys `max_attempts`, `retry_budget` and `hedge` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(ge=0, le=1)]


class RetryBudgetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds the attempts beyond the first of each request, retries and hedges together."""

    share: Share = 0.2  # share of the requests of the last 10 s
    min_retries_per_s: Annotated[float, Meta(ge=0)] = 0.5  # where that is more, so that a quiet gateway can retry


class HedgeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A second endpoint gets the request when the first is late; the first delta wins."""

    enabled: bool = True  # send late requests to a second endpoint; never bulk ones
    max_share: Share = 0.02  # share of the requests that may be hedged
    after_quantile: Share = 0.95  # quantile of an endpoint's recent times to first token, after which one is late


class DispatchSettings(msgspec.Struct, frozen=True):
    max_attempts: int = 3  # endpoints that one request may be sent to; 1: no retry
    retry_budget: RetryBudgetConfig = RetryBudgetConfig()
    hedge: HedgeConfig = HedgeConfig()
