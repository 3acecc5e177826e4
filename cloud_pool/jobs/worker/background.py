"""What runs jobs and messages: the gateway's service without its HTTP listener, with the accounts around it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
from anyio import to_thread
from anyio.abc import TaskGroup

from ...accounts.accounts import Accounts
from ...admission import AdmissionConfig, AdmissionSettings
from ...assembly import build_accounts, build_cache, build_pools, build_tracing
from ...cache.caching_service import CachingService
from ...config.schema import Config
from ...dispatch.balancing.pools import Pools
from ...dispatch.balancing.reload import reload_endpoints, reload_on_sighup
from ...http.listener import Listener
from ...http.operator import OperatorRoutes, operator_listener
from ...observability.metrics import Metrics
from ...observability.tracing import JobTrace
from ...serving.assembly import ReloadListeners, ServingRuntime, build_serving
from ...tiers.config import TierConfig
from ...tiers.tier import Tier, by_name, load_tiers
from .metered_runner import MeteredRunner
from .runner import ReadLate, ServiceBackend

UNBOUNDED = 1_000_000  # jobs: the shared limit bounds them


class BackgroundService(msgspec.Struct, frozen=True):
    """`runner` answers; `operator` is not started."""

    tiers: Mapping[str, Tier]  # by name and alias
    metrics: Metrics
    accounts: Accounts
    pools: Pools
    serving: ServingRuntime
    caching_service: CachingService
    runner: MeteredRunner
    read_late: ReadLate
    trace: JobTrace | None
    operator: Listener
    closing: tuple[Callable[[], Awaitable[None]], ...]  # in this order, after the tasks have ended

    async def start(self, tasks: TaskGroup) -> None:
        """Start the background tasks."""
        await self.pools.prepare()
        tasks.start_soon(self.pools.watch)
        tasks.start_soon(self.serving.warmer.watch)
        tasks.start_soon(self.serving.lag.watch)
        await self.serving.heartbeat.beat()  # The first one takes no permits yet.
        tasks.start_soon(self.serving.heartbeat.watch)
        self.caching_service.start(tasks)
        await self.accounts.prepare()
        self.accounts.start(tasks)

    def watch_sighup(self, config: Config, reread: Callable[[], Config] | None) -> None:
        """On SIGHUP take the endpoints from the configuration that `reread` reads."""
        if reread is not None:
            reload_on_sighup(self.pools, config, reread)


def build_background_service(
    config: Config,
    tasks: TaskGroup,
    *,
    route: str,
    service_name: str,
    is_gateway: bool,
    reread: Callable[[], Config] | None,
) -> BackgroundService:
    """Build everything; nothing is started. Raises ConfigError.

    Args:
        route: of the runs in usage and audit records
        service_name: in traces
        is_gateway: whether this process takes a share of the tenants' limits while their Redis is away
        reread: reads the configuration again, for operators who reload the endpoints
    """
    tiers = load_tiers(config.tiers, config.model_dirs)
    metrics = Metrics()
    accounts = build_accounts(config, metrics, is_gateway=is_gateway)
    reload_listeners = ReloadListeners(metrics.count_reload)
    pools = build_pools(config, tiers, metrics, tasks, reload_listeners)
    admission = {tier.name: worker_admission(tier.config) for tier in tiers}
    serving = build_serving(config, tiers, pools, admission, metrics, client=accounts.redis, kind="worker")
    reload_listeners.listeners.append(serving.warmer.loaded)
    background = msgspec.structs.replace(config, cache=config.cache.for_background())
    caching_service = CachingService(build_cache(background, by_name(tiers), metrics), serving.service.answer)
    tracing = build_tracing(config, service_name)
    trace = None if tracing is None else tracing.jobs
    backend = ServiceBackend(caching_service, serving.service.embed, by_name(tiers), pools.by_tier, serving.parts)
    runner = MeteredRunner(backend, accounts.ledger, trace, accounts.revocations, route=route)
    reload = None if reread is None else partial(reload_endpoints, pools, config, reread)
    routes = OperatorRoutes(accounts.operators, metrics, free_probes=not config.has_operator_tokens, reload=reload)
    operator = operator_listener(config, routes)
    closing: list[Callable[[], Awaitable[None]]] = [caching_service.close, accounts.close, pools.close]
    if tracing is not None:
        closing.append(partial(to_thread.run_sync, tracing.close))
    return BackgroundService(
        by_name(tiers),
        metrics,
        accounts,
        pools,
        serving,
        caching_service,
        runner,
        backend.read_late,
        trace,
        operator,
        tuple(closing),
    )


def worker_admission(tier: TierConfig) -> AdmissionSettings:
    """Return a worker's: claims already prefer urgent jobs, and a claimed job has time to wait, whatever its class."""
    return msgspec.structs.replace(
        tier.admission_settings,
        min_permits=min(1, tier.min_concurrency),
        max_queued=UNBOUNDED,
        ttft_objective_s=math.inf,
        config=AdmissionConfig(reserved_share=0.0, preemption_share=0.0),
    )
