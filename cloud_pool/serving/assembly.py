"""Wires the service: for the gateway, and for a worker with admission settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import redis.asyncio

from ..admission import AdmissionController, AdmissionSettings
from ..admission.division import PeerKind
from ..admission.metrics import AdmissionMetrics
from ..admission.peer_heartbeat import PeerHeartbeat, SharedTier
from ..cache.rules import is_private
from ..config.schema import Config
from ..degradation.continue_token import load_continue_tokens
from ..degradation.fallback import TierFallback, TierSignals
from ..degradation.metrics import DegradationMetrics
from ..degradation.tier_attempt import TierRuntime
from ..degradation.warm_up import TierWarmer
from ..dispatch.balancing.pools import Pools
from ..dispatch.dispatcher import build_dispatcher
from ..dispatch.metrics import DispatchMetrics
from ..observability.event_loop_lag import EventLoopLag
from ..observability.metrics import Metrics
from ..tiers.tier import Tier, encoders_of
from .service import FindStale, Service, nothing_stale

if TYPE_CHECKING:
    from ..parts.request_parts import RequestParts


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
    admissions: Mapping[str, AdmissionController]  # by the tier's name
    warmer: TierWarmer
    lag: EventLoopLag
    heartbeat: PeerHeartbeat
    parts: RequestParts | None  # None: no tier is an encoder


def build_serving(
    config: Config,
    tiers: tuple[Tier, ...],
    pools: Pools,
    admission_settings: Mapping[str, AdmissionSettings],
    metrics: Metrics,
    *,
    find_stale: FindStale = nothing_stale,
    client: redis.asyncio.Redis | None = None,
    kind: PeerKind = "gateway",
) -> ServingRuntime:
    """Build the service and its background tasks; nothing is started.

    Args:
        config: the gateway's configuration.
        tiers: the tiers to serve.
        pools: the tiers' endpoints.
        admission_settings: by the tier's name.
        metrics: the process's metrics.
        find_stale: looks up a stale answer when every tier has failed.
        client: Redis through which gateways and workers divide each tier's permits; None: they do not.
        kind: what this process is among them.

    Raises:
        ConfigError: the continue key file is unusable.
    """
    admission_metrics, dispatch_metrics = AdmissionMetrics(metrics.registry), DispatchMetrics(metrics.registry)
    lag = EventLoopLag()
    runtimes = {}
    for tier in tiers:
        settings = admission_settings[tier.name]
        admission = AdmissionController(
            settings.permits,
            settings.max_queued,
            settings,
            on_admitted=admission_metrics.admitted(tier.name),
            on_shed=admission_metrics.shed(tier.name),
            on_preempted=admission_metrics.preempted(tier.name),
            lost_s=lag.lost_s,
        )
        admission_metrics.watch(tier.name, admission)
        dispatch = build_dispatcher(
            tier.name, tier.config.dispatch_settings, pools.by_tier[tier.name], dispatch_metrics
        )
        runtimes[tier.name] = TierRuntime(tier, admission, dispatch)
    signals = {
        name: TierSignals(pools.by_tier[name], runtime.admission, runtime.tier.config.ttft_objective_s)
        for name, runtime in runtimes.items()
    }
    degradation = config.degradation
    fallback = TierFallback(degradation, signals)
    degradation_metrics = DegradationMetrics(metrics.registry)
    degradation_metrics.watch(fallback)
    continue_tokens = load_continue_tokens(degradation.continue_key_file, degradation.continue_ttl_s)
    parts = _build_parts(config, runtimes, fallback) if encoders_of(tiers) else None
    service = Service(
        runtimes,
        fallback,
        continue_tokens=continue_tokens,
        find_stale=find_stale,
        parts=parts,
        metrics=degradation_metrics,
    )
    models = {tier.name: tier.model for tier in tiers}
    warmer = TierWarmer(fallback, pools.by_tier, models, degradation.warm_up_after_idle_s)
    shared = [_shared_tier(runtime, pools) for runtime in runtimes.values()]
    admissions = {name: runtime.admission for name, runtime in runtimes.items()}
    return ServingRuntime(service, admissions, warmer, lag, PeerHeartbeat(client, shared, kind=kind), parts)


def _build_parts(config: Config, runtimes: Mapping[str, TierRuntime], fallback: TierFallback) -> RequestParts:
    from ..parts.encoders import EncoderTiers  # imported where a tier is an encoder
    from ..parts.request_parts import RequestParts

    encoders = EncoderTiers(runtimes, fallback, config.parts)
    return RequestParts(encoders, config.parts, partial(is_private, config=config.cache))


def _shared_tier(runtime: TierRuntime, pools: Pools) -> SharedTier:
    name, pool = runtime.tier.name, pools.by_tier[runtime.tier.name]
    return SharedTier(
        name,
        runtime.tier.config.concurrency,
        lambda: [one.text for one in pools.configured(name)],
        lambda: pool.capacity,
        runtime.admission,
    )
