"""The service and its parts wired: for the gateway, and for a worker with doors of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import redis.asyncio

from .admission import Admission, Settings
from .admission.heartbeat import Heartbeat, Shared
from .admission.lag import Lag
from .config import Config
from .dispatch.assembly import build_dispatch
from .dispatch.metrics import DispatchMetrics
from .ladder.continuing import load_continuing
from .ladder.ladder import Ladder, Sense
from .ladder.metrics import LadderMetrics
from .ladder.warmth import Warmth
from .metrics import Metrics
from .pool.pool import Pool
from .service import Lane, Service, Stale, nothing_stale
from .tiers import Tier


class Repairs:
    """Whoever wants to hear which model was loaded again."""

    def __init__(self, *listeners: Callable[[str], None]) -> None:
        self.listeners = list(listeners)

    def __call__(self, model: str) -> None:
        for listener in self.listeners:
            listener(model)


class Lanes(msgspec.Struct, frozen=True):
    """`warmth`, `lag` and `heartbeat` run for as long as the service is used."""

    service: Service
    warmth: Warmth
    lag: Lag
    heartbeat: Heartbeat | None  # with a Redis


def build_lanes(
    config: Config,
    tiers: tuple[Tier, ...],
    pools: Mapping[str, Pool],
    doors: Mapping[str, Settings],
    metrics: Metrics,
    *,
    stale: Stale = nothing_stale,
    client: redis.asyncio.Redis | None = None,
) -> Lanes:
    """`pools` and `doors` by the tier's name. Through `client` the places of a limit that moves are divided with other
    gateways. Raises ConfigError."""
    dispatches = DispatchMetrics(metrics.registry)
    lag = Lag()
    lanes = {}
    for tier in tiers:
        door = doors[tier.name]
        admission = Admission(
            door.places,
            door.queue,
            door,
            waited=metrics.admission.waited(tier.name),
            shed=metrics.admission.shed(tier.name),
            preempted=metrics.admission.preempted(tier.name),
            lost_s=lag.lost_s,
        )
        metrics.watch(tier.name, admission)
        lanes[tier.name] = Lane(tier, admission, build_dispatch(tier.name, tier.config, pools[tier.name], dispatches))
    senses = {
        name: Sense(pools[name], lane.admission, lane.tier.config.ttft_objective_s) for name, lane in lanes.items()
    }
    ladder = Ladder(config.ladder, senses)
    counts = LadderMetrics(metrics.registry)
    counts.watch(ladder)
    continuing = load_continuing(config.ladder.continue_key_file, config.ladder.continue_ttl_s)
    service = Service(lanes, ladder, continuing=continuing, stale=stale, metrics=counts)
    models = {tier.name: tier.model for tier in tiers}
    shared = [
        Shared(name, lane.tier.config.endpoints or (lane.tier.config.triton,), doors[name].places, lane.admission)
        for name, lane in lanes.items()
        if doors[name].min_places
    ]
    heartbeat = Heartbeat(client, shared) if client is not None else None
    return Lanes(service, Warmth(ladder, pools, models, config.ladder.warm_after_s), lag, heartbeat)
