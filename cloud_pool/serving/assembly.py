"""The service and its parts wired: for the gateway, and for a worker with doors of its own."""

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
from ..dispatch.assembly import build_dispatch
from ..dispatch.metrics import DispatchMetrics
from ..observability.event_loop_lag import EventLoopLag
from ..observability.metrics import Metrics
from .service import Service, Stale, TierRuntime, nothing_stale


class RepairListeners:
    """Whoever wants to hear which model was loaded again."""

    def __init__(self, *listeners: Callable[[str], None]) -> None:
        self.listeners = list(listeners)

    def __call__(self, model: str) -> None:
        for listener in self.listeners:
            listener(model)


class ServingRuntime(msgspec.Struct, frozen=True):
    """`warmth`, `lag` and `heartbeat` run for as long as the service is used."""

    service: Service
    warmer: TierWarmer
    lag: EventLoopLag
    heartbeat: PeerHeartbeat | None  # with a Redis


def build_serving(
    config: Config,
    tiers: tuple[Tier, ...],
    pools: Mapping[str, Pool],
    doors: Mapping[str, AdmissionSettings],
    metrics: Metrics,
    *,
    stale: Stale = nothing_stale,
    client: redis.asyncio.Redis | None = None,
) -> ServingRuntime:
    """`pools` and `doors` by the tier's name. Through `client` the places of a limit that moves are divided with other
    gateways. Raises ConfigError."""
    dispatches = DispatchMetrics(metrics.registry)
    lag = EventLoopLag()
    lanes = {}
    for tier in tiers:
        door = doors[tier.name]
        admission = AdmissionController(
            door.places,
            door.queue,
            door,
            waited=metrics.admission.waited(tier.name),
            shed=metrics.admission.shed(tier.name),
            preempted=metrics.admission.preempted(tier.name),
            lost_s=lag.lost_s,
        )
        metrics.watch(tier.name, admission)
        lanes[tier.name] = TierRuntime(
            tier, admission, build_dispatch(tier.name, tier.config, pools[tier.name], dispatches)
        )
    senses = {
        name: TierSignals(pools[name], lane.admission, lane.tier.config.ttft_objective_s)
        for name, lane in lanes.items()
    }
    ladder = TierFallback(config.degradation, senses)
    counts = DegradationMetrics(metrics.registry)
    counts.watch(ladder)
    continue_tokens = load_continue_tokens(config.degradation.continue_key_file, config.degradation.continue_ttl_s)
    service = Service(lanes, ladder, continue_tokens=continue_tokens, stale=stale, metrics=counts)
    models = {tier.name: tier.model for tier in tiers}
    shared = [
        SharedTier(name, lane.tier.config.endpoints or (lane.tier.config.triton,), doors[name].places, lane.admission)
        for name, lane in lanes.items()
        if doors[name].min_places
    ]
    heartbeat = PeerHeartbeat(client, shared) if client is not None else None
    return ServingRuntime(
        service, TierWarmer(ladder, pools, models, config.degradation.warm_up_after_idle_s), lag, heartbeat
    )
