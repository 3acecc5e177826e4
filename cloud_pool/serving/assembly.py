"""Wires the service: for the gateway, and for a worker with admission settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import redis.asyncio

from ..admission import AdmissionController, AdmissionSettings
from ..admission.peer_heartbeat import PeerHeartbeat, SharedTier
from ..balancing.pool import Pool
from ..config.schema import Config
from ..config.tiers import Tier
from ..degradation.continue_token import load_continue_tokens
from ..degradation.fallback import TierFallback, TierSignals
from ..degradation.metrics import DegradationMetrics
from ..degradation.warm_up import TierWarmer
from ..dispatch.dispatcher import build_dispatcher
from ..dispatch.metrics import DispatchMetrics
from ..observability.event_loop_lag import EventLoopLag
from ..observability.metrics import Metrics
from .service import FindStale, Service, nothing_stale
from .tier_attempt import TierRuntime


class ReloadListeners:
    """Callbacks that get the name of each model that was loaded again; filled after the pools that call it exist."""

    def __init__(self, *listeners: Callable[[str], None]) -> None:
        self.listeners = list(listeners)

    def __call__(self, model: str) -> None:
        for listener in self.listeners:
            listener(model)


class ServingRuntime(msgspec.Struct, frozen=True):
    """The service; `warmer`, `lag` and `heartbeat` are background tasks that run as long as it is used."""

    service: Service
    warmer: TierWarmer
    lag: EventLoopLag
    heartbeat: PeerHeartbeat | None  # None without a Redis


def build_serving(
    config: Config,
    tiers: tuple[Tier, ...],
    pools: Mapping[str, Pool],
    admission_settings: Mapping[str, AdmissionSettings],
    metrics: Metrics,
    *,
    find_stale: FindStale = nothing_stale,
    client: redis.asyncio.Redis | None = None,
) -> ServingRuntime:
    """Build the service and its background tasks; nothing is started.

    Args:
        config: the gateway's configuration.
        tiers: the tiers to serve.
        pools: endpoints by the tier's name.
        admission_settings: by the tier's name.
        metrics: the process's metrics.
        find_stale: looks up a stale answer when every tier has failed.
        client: Redis through which gateways divide each tier's concurrency limit; None: they do not.

    Raises:
        ConfigError: the continue key file is unusable.
    """
    dispatch_metrics = DispatchMetrics(metrics.registry)
    lag = EventLoopLag()
    runtimes = {}
    for tier in tiers:
        settings = admission_settings[tier.name]
        admission = AdmissionController(
            settings.permits,
            settings.max_queued,
            settings,
            on_admitted=metrics.admission.admitted(tier.name),
            on_shed=metrics.admission.shed(tier.name),
            on_preempted=metrics.admission.preempted(tier.name),
            lost_s=lag.lost_s,
        )
        metrics.admission.watch(tier.name, admission)
        dispatch = build_dispatcher(tier.name, tier.config, pools[tier.name], dispatch_metrics)
        runtimes[tier.name] = TierRuntime(tier, admission, dispatch)
    signals = {
        name: TierSignals(pools[name], runtime.admission, runtime.tier.config.ttft_objective_s)
        for name, runtime in runtimes.items()
    }
    degradation = config.degradation
    fallback = TierFallback(degradation, signals)
    degradation_metrics = DegradationMetrics(metrics.registry)
    degradation_metrics.watch(fallback)
    continue_tokens = load_continue_tokens(degradation.continue_key_file, degradation.continue_ttl_s)
    service = Service(
        runtimes, fallback, continue_tokens=continue_tokens, find_stale=find_stale, metrics=degradation_metrics
    )
    warmer = TierWarmer(fallback, pools, {tier.name: tier.model for tier in tiers}, degradation.warm_up_after_idle_s)
    shared = [
        SharedTier(
            tier.name,
            tier.config.endpoints or (tier.config.triton,),
            admission_settings[tier.name].permits,
            runtimes[tier.name].admission,
        )
        for tier in tiers
        if admission_settings[tier.name].min_permits
    ]
    heartbeat = PeerHeartbeat(client, shared) if client is not None else None
    return ServingRuntime(service, warmer, lag, heartbeat)
