"""A tier's keys `max_attempts` and `retry_budget` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(ge=0, le=1)]


class RetryBudgetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds the attempts beyond the first of each request."""

    share: Share = 0.2  # share of the requests of the last 10 s
    min_retries_per_s: Annotated[float, Meta(ge=0)] = 0.5  # where that is more, so that a quiet gateway can retry


class DispatchSettings(msgspec.Struct, frozen=True):
    max_attempts: int = 3  # endpoints that one request may be sent to; 1: no retry
    retry_budget: RetryBudgetConfig = RetryBudgetConfig()
