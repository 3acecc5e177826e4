"""Composition root of the worker: the gateway's service without its HTTP listener, and a WorkerRuntime.

1. Serve metrics to operators, also while waiting for Redis.
2. Wait for Redis, as long as it takes, unless the worker is stopped.
3. Watch the tiers and claim jobs, until the worker is stopped.
4. Close what the background tasks used, after they have ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import TaskGroup

from router.errors import ConfigError

from ...admission import AdmissionConfig, AdmissionSettings
from ...assembly import build_accounts, build_cache, build_pools, build_tracing, tune_garbage_collector
from ...balancing.reload import reload_endpoints, reload_on_sighup
from ...cache.caching_service import CachingService
from ...config.schema import Config, TierConfig
from ...config.tiers import by_name, load_tiers
from ...http.operator import OperatorRoutes, operator_listener
from ...observability.metrics import Metrics
from ...serving.assembly import ReloadListeners, build_serving
from ..config import NO_CLUSTER, with_shared_redis
from .metered_runner import MeteredRunner
from .runner import ServiceBackend
from .runtime import WorkerRuntime

_UNBOUNDED = 1_000_000  # jobs: the shared limit bounds them


async def run(
    config: Config,
    stop: asyncio.Event,
    reread: Callable[[], Config] | None = None,
    *,
    serves_operators: bool = False,
) -> None:
    """Run jobs until `stop`, then drain. Prints one line when it begins to claim jobs. Raises ConfigError.

    Args:
        serves_operators: listen at the operators' address
        reread: reads the configuration again; on SIGHUP the worker takes its endpoints from it
    """
    errors = []
    closing: list[Callable[[], Awaitable[None]]] = []
    async with anyio.create_task_group() as tasks:
        try:
            await _work(config, stop, serves_operators, tasks, closing, reread)
        except ConfigError as error:
            errors.append(error)  # Raised below: a task group would wrap it.
        tasks.cancel_scope.cancel()
    for close in closing:
        await close()  # (4)
    for config_error in errors:
        raise config_error


async def _work(
    config: Config,
    stop: asyncio.Event,
    serves_operators: bool,
    tasks: TaskGroup,
    closing: list[Callable[[], Awaitable[None]]],
    reread: Callable[[], Config] | None,
) -> None:
    """Run in `tasks`; `closing` gets what must be closed after they have ended."""
    settings = with_shared_redis(config.jobs, config.redis)
    if not settings.redis:
        if config.redis:
            raise ConfigError(NO_CLUSTER, where="jobs.redis")
        raise ConfigError("a worker needs the URL of the gateways' Redis", where="redis")
    tiers = load_tiers(config)
    metrics = Metrics()
    # A worker without the gateways' Redis can do nothing alone, unless jobs have one of their own.
    accounts = build_accounts(config, metrics, is_gateway=settings.redis != config.redis)
    reload_listeners = ReloadListeners(metrics.count_reload)
    pools = build_pools(config, tiers, metrics, tasks, reload_listeners)
    admission = {tier.name: worker_admission(tier.config) for tier in tiers}
    serving = build_serving(config, tiers, pools, admission, metrics, client=accounts.redis, kind="worker")
    reload_listeners.listeners.append(serving.warmer.loaded)
    background = msgspec.structs.replace(config, cache=config.cache.for_background())
    caching_service = CachingService(build_cache(background, by_name(tiers), metrics), serving.service.answer)
    tracing = build_tracing(config, "causeway-worker")
    trace = None if tracing is None else tracing.jobs
    backend = ServiceBackend(caching_service, by_name(tiers), pools.by_tier)
    runner = MeteredRunner(backend, accounts.ledger, trace, accounts.revocations)
    slots = {tier.name: settings.concurrency or _UNBOUNDED for tier in tiers}
    runtime = WorkerRuntime(
        settings,
        by_name(tiers),
        runner,
        slots,
        metrics.registry,
        shared_limits=serving.admissions,
        limits=config.tenants.limits,
        add_usage=accounts.accounting.usage.add,
        trace=trace,
    )
    closing += [runtime.close, caching_service.close, accounts.close, pools.close]
    if tracing is not None:
        closing.append(partial(to_thread.run_sync, tracing.close))
    reload = None if reread is None else partial(reload_endpoints, pools, config, reread)
    operator = operator_listener(config, OperatorRoutes(accounts.operators, metrics, reload=reload))
    if serves_operators:
        await operator.start()  # (1)
        closing.insert(0, operator.close)
    if not await runtime.start(stop):  # (2)
        return
    if reread is not None:
        reload_on_sighup(pools, config, reread)
    await pools.prepare()
    tasks.start_soon(pools.watch)
    tasks.start_soon(serving.warmer.watch)
    tasks.start_soon(serving.lag.watch)
    await serving.heartbeat.beat()  # The first one takes no permits yet.
    tasks.start_soon(serving.heartbeat.watch)
    caching_service.start(tasks)
    await accounts.prepare()
    accounts.start(tasks)
    operator_url = f" operator={operator.url}" if serves_operators else ""
    tune_garbage_collector()
    print(f"ready worker={runtime.worker.name}{operator_url}", flush=True)
    await runtime.run(stop)  # (3)


def worker_admission(tier: TierConfig) -> AdmissionSettings:
    """Return a worker's: claims already prefer urgent jobs, and a claimed job has time to wait, whatever its class."""
    return msgspec.structs.replace(
        tier.admission_settings,
        min_permits=min(1, tier.min_concurrency),
        max_queued=_UNBOUNDED,
        ttft_objective_s=math.inf,
        config=AdmissionConfig(reserved_share=0.0, preemption_share=0.0),
    )
