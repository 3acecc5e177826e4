"""The worker's composition root: the gateway's service without its HTTP, and a crew that works on it.

1. its metrics can be had, also while it waits
2. Redis answers, or is waited for: as long as it takes, unless the worker is to stop
3. the tiers are watched, jobs are claimed: until it is to stop
4. the background work has ended: what it used is closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import TaskGroup
from prometheus_client import start_http_server

from router.errors import ConfigError

from ...admission import AdmissionSettings
from ...app import build_accounts, build_cache, build_pools, build_tracing
from ...balancing.reload import reload_on_sighup
from ...cache.caching_service import CachingService
from ...config.schema import Config
from ...config.tiers import by_name, load_tiers
from ...observability.metrics import Metrics
from ...serving.assembly import ReloadListeners, build_serving
from ..config import with_shared_redis
from ..gateway import WorkerRuntime
from .metered_runner import MeteredRunner
from .runner import ServiceBackend

_log = logging.getLogger("causeway.cloud.worker")


async def run(
    config: Config,
    stop: asyncio.Event,
    metrics_at: tuple[str, int] | None,
    reread: Callable[[], Config] | None = None,
) -> None:
    """Until `stop`; then drained. Prints one line when it claims jobs. Raises ConfigError.

    On SIGHUP the endpoints of what `reread` gives are taken.
    """
    faults = []
    closing: list[Callable[[], Awaitable[None]]] = []
    async with anyio.create_task_group() as tasks:
        try:
            await _work(config, stop, metrics_at, tasks, closing, reread)
        except ConfigError as error:
            faults.append(error)  # Raised below: out of a task group it would come wrapped.
        tasks.cancel_scope.cancel()
    for close in closing:
        await close()  # (4)
    for fault in faults:
        raise fault


async def _work(
    config: Config,
    stop: asyncio.Event,
    metrics_at: tuple[str, int] | None,
    tasks: TaskGroup,
    closing: list[Callable[[], Awaitable[None]]],
    reread: Callable[[], Config] | None,
) -> None:
    """`closing` gets what is to be done when `tasks` has ended."""
    settings = with_shared_redis(config.jobs, config.redis)
    if not settings.redis:
        raise ConfigError("a worker needs the URL of the gateways' Redis", where="redis")
    tiers = load_tiers(config)
    metrics = Metrics()
    desk = build_accounts(config, metrics)
    repairs = ReloadListeners(metrics.count_reload)
    pools = build_pools(config, tiers, metrics, tasks, repairs)
    places = {tier.name: settings.concurrency or tier.config.concurrency for tier in tiers}
    # What a worker claims has its place in the worker: the door is as wide as that, and stays so.
    doors = {name: AdmissionSettings(permits=count, max_queued=count) for name, count in places.items()}
    lanes = build_serving(config, tiers, pools.by_tier, doors, metrics)
    repairs.listeners.append(lanes.warmer.loaded)
    patient = msgspec.structs.replace(config, cache=config.cache.for_background())
    caching_service = CachingService(build_cache(patient, by_name(tiers), metrics), lanes.service.answer)
    tracing = build_tracing(config, "causeway-worker")
    trace = None if tracing is None else tracing.jobs
    runner = MeteredRunner(ServiceBackend(caching_service, by_name(tiers), pools.by_tier), desk.ledger, trace)
    crew = WorkerRuntime(settings, by_name(tiers), runner, places, metrics.registry, trace=trace)
    closing += [crew.close, caching_service.close, desk.close, pools.close]
    if tracing is not None:
        closing.append(partial(to_thread.run_sync, tracing.close))
    where = _serve_metrics(metrics, metrics_at)  # (1)
    if not await crew.start(stop):  # (2)
        return
    if reread is not None:
        reload_on_sighup(pools, config, reread)
    await pools.prepare()
    tasks.start_soon(pools.watch)
    tasks.start_soon(lanes.warmer.watch)
    tasks.start_soon(lanes.lag.watch)
    caching_service.start(tasks)
    desk.start(tasks)
    print(f"ready worker={crew.name}{where}", flush=True)
    await crew.run(stop)  # (3)


def _serve_metrics(metrics: Metrics, at: tuple[str, int] | None) -> str:
    """Raises ConfigError when the address cannot be had."""
    if at is None:
        return ""
    host, port = at
    try:
        server, _ = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", where="--metrics-port") from error
    return f" metrics=http://{host}:{server.server_port}/metrics"
