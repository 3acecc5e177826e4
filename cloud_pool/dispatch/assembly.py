"""From a tier's configuration to its dispatch."""

from __future__ import annotations

from typing import Protocol

from .dispatch import Dispatch
from .metrics import DispatchMetrics
from .seam import Pool
from .settings import HedgeConfig, RetryBudgetConfig, Settings


class Keys(Protocol):
    """Of `config.TierConfig`."""

    @property
    def tries(self) -> int: ...

    @property
    def retry_budget(self) -> RetryBudgetConfig: ...

    @property
    def hedge(self) -> HedgeConfig: ...


def build_dispatch(tier: str, keys: Keys, pool: Pool, metrics: DispatchMetrics) -> Dispatch:
    """`metrics` are the gateway's, one for all tiers."""
    settings = Settings(tries=keys.tries, retry_budget=keys.retry_budget, hedge=keys.hedge)
    dispatch = Dispatch(pool, settings, counts=metrics.of(tier))
    metrics.watch(tier, lambda: dispatch.retries_left)
    return dispatch
