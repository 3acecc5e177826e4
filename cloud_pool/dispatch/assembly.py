"""From a tier's configuration to its dispatch."""

from __future__ import annotations

from typing import Protocol

from .config import DispatchSettings, HedgeConfig, RetryBudgetConfig
from .dispatcher import Dispatcher
from .metrics import DispatchMetrics
from .protocols import EndpointSource


class TierDispatchConfig(Protocol):
    """Of `config.TierConfig`."""

    @property
    def max_attempts(self) -> int: ...

    @property
    def retry_budget(self) -> RetryBudgetConfig: ...

    @property
    def hedge(self) -> HedgeConfig: ...


def build_dispatch(tier: str, keys: TierDispatchConfig, pool: EndpointSource, metrics: DispatchMetrics) -> Dispatcher:
    """`metrics` are the gateway's, one for all tiers."""
    settings = DispatchSettings(max_attempts=keys.max_attempts, retry_budget=keys.retry_budget, hedge=keys.hedge)
    dispatch = Dispatcher(pool, settings, counts=metrics.of(tier))
    metrics.watch(tier, lambda: dispatch.retries_left)
    return dispatch
