"""Composition root of the worker: the gateway's service without its HTTP listener, and a WorkerRuntime.

1. Serve metrics to operators, also while waiting for Redis.
2. Wait for Redis, as long as it takes, unless the worker is stopped.
3. Watch the tiers and claim jobs, until the worker is stopped.
4. Close what the background tasks used, after they have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from anyio.abc import TaskGroup

from router.errors import ConfigError

from ...assembly import tune_garbage_collector
from ...config.schema import Config
from ...lifetime import Closing, run_with_tasks
from ..config import NO_CLUSTER, JobsConfig, with_shared_redis
from .background import UNBOUNDED, build_background_service
from .runtime import WorkerRuntime


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

    async def work(tasks: TaskGroup, closing: list[Closing]) -> None:
        await _work(config, stop, serves_operators, tasks, closing, reread)

    await run_with_tasks(work)  # (4)


async def _work(
    config: Config,
    stop: asyncio.Event,
    serves_operators: bool,
    tasks: TaskGroup,
    closing: list[Closing],
    reread: Callable[[], Config] | None,
) -> None:
    """Run in `tasks`; `closing` gets what must be closed after they have ended."""
    settings = jobs_settings(config, "a worker")
    background = build_background_service(
        config,
        tasks,
        route="job",
        service_name="causeway-worker",
        # A worker without the gateways' Redis can do nothing alone, unless jobs have one of their own.
        is_gateway=settings.redis != config.redis,
        reread=reread,
    )
    slots = {tier.name: settings.concurrency or UNBOUNDED for tier in background.tiers.values()}
    runtime = WorkerRuntime(
        settings,
        background.tiers,
        background.runner,
        slots,
        background.metrics.registry,
        shared_limits=background.serving.admissions,
        read_late=background.read_late,
        limits=config.tenants.limits,
        add_usage=background.accounts.accounting.usage.add,
        trace=background.trace,
    )
    closing += [runtime.close, *background.closing]
    operator = background.operator
    if serves_operators:
        await operator.start()  # (1)
        closing.insert(0, operator.close)
    if not await runtime.start(stop):  # (2)
        return
    background.watch_sighup(config, reread)
    await background.start(tasks)
    operator_url = f" operator={operator.url}" if serves_operators else ""
    tune_garbage_collector()
    print(f"ready worker={runtime.worker.name}{operator_url}", flush=True)
    await runtime.run(stop)  # (3)


def jobs_settings(config: Config, process: str) -> JobsConfig:
    """Return the configuration of jobs with their Redis. Raises ConfigError if there is none that `process` can use."""
    settings = with_shared_redis(config.jobs, config.redis)
    if settings.redis:
        return settings
    if config.redis:
        raise ConfigError(NO_CLUSTER, where="jobs.redis")
    raise ConfigError(f"{process} needs the URL of the gateways' Redis", where="redis")
