"""The composition root of the gateway: the only place that builds its parts and wires them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import redis.asyncio
from aiohttp import hdrs
from anyio import to_thread
from anyio.abc import TaskGroup

from router.errors import ConfigError

from .accounts.accounts import Accounts
from .accounts.audit import AuditLog
from .accounts.identity.authenticator import Authenticator
from .accounts.identity.key_set import KeySet
from .accounts.identity.revocation import RevocationList
from .accounts.identity.static_tokens import StaticTokens, load_tokens
from .accounts.identity.token_verifier import TokenVerifier
from .accounts.ledger import Ledger
from .accounts.tenants.accounting import TenantAccounting
from .accounts.tenants.metrics import TenantMetrics
from .accounts.tenants.rate_limiter import TenantRateLimiter
from .accounts.tenants.usage import UsageRecorder
from .admission.peer_heartbeat import PeerHeartbeat
from .balancing.metrics import EndpointMetrics
from .balancing.pools import Pools, TritonClients
from .balancing.reload import reload_on_sighup
from .cache.caching_service import CachingService
from .cache.shared_cache import SharedCache, read_secret
from .config.schema import Config
from .config.tiers import Tier, by_name, load_tiers
from .degradation.warm_up import TierWarmer
from .http.listener import Listener
from .http.readiness import Readiness
from .http.server import Server
from .jobs.config import with_shared_redis
from .jobs.gateway import JobsGateway
from .observability.event_loop_lag import EventLoopLag
from .observability.metrics import Metrics
from .observability.tracing import Tracing
from .serving.assembly import ReloadListeners, build_serving
from .serving.service import nothing_stale

_CONNECTIONS = 64  # to Redis
_log = logging.getLogger("causeway.cloud")


class App:
    """A gateway that runs: `start`, then `drain` and `stop`; `close` once its task group has ended."""

    def __init__(
        self,
        config: Config,
        server: Server,
        accounts: Accounts,
        jobs: JobsGateway | None,
        pools: Pools,
        warmer: TierWarmer,
        lag: EventLoopLag,
        heartbeat: PeerHeartbeat | None,
        caching_service: CachingService,
        tracing: Tracing | None,
        tasks: TaskGroup,
    ) -> None:
        self._config = config
        self._server = server
        self._accounts = accounts
        self._jobs = jobs
        self.pools = pools
        self._warmth = warmer
        self._lag = lag
        self._heartbeat = heartbeat
        self._front = caching_service
        self._tracing = tracing
        self._tasks = tasks
        self._listener = Listener(config.server, server.handle)

    @property
    def url(self) -> str:
        host = self._config.server.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._listener.port}/v1"

    async def start(self) -> None:
        """Raises ConfigError when the address cannot be had."""
        await self.pools.prepare()
        self._tasks.start_soon(self.pools.watch)
        self._tasks.start_soon(self._warmth.watch)
        self._tasks.start_soon(self._lag.watch)
        if self._heartbeat is not None:
            self._tasks.start_soon(self._heartbeat.watch)
        self._front.start(self._tasks)
        await self._accounts.prepare()
        await self._listener.start()
        self._accounts.start(self._tasks)
        if self._jobs is not None:
            self._tasks.start_soon(self._jobs.watch)

    async def drain(self) -> None:
        """No new work; what runs may end within `drain_s`."""
        self._server.begin_draining()
        await self._listener.drain(self._config.server.drain_s)

    async def stop(self) -> None:
        """No more requests, and the background work is told to end: its task group may then be left."""
        await self._listener.close()
        self._tasks.cancel_scope.cancel()

    async def close(self) -> None:
        """What the background work used. Not before that has ended: a probe needs its channel until its last step."""
        await self._front.close()
        await self._accounts.close()
        if self._jobs is not None:
            await self._jobs.close()
        await self.pools.close()
        if self._tracing is not None:
            await to_thread.run_sync(self._tracing.close)


def build(config: Config, tasks: TaskGroup) -> App:
    """Everything checked and wired, nothing started. `tasks` is the parent of background work. Raises ConfigError."""
    tiers = load_tiers(config)
    metrics = Metrics()
    accounts = build_accounts(config, metrics)
    repairs = ReloadListeners(metrics.count_reload)
    pools = build_pools(config, tiers, metrics, tasks, repairs)
    doors = {tier.name: tier.config.admission_settings for tier in tiers}
    cache = build_cache(config, by_name(tiers), metrics)
    find_stale = nothing_stale if cache is None else cache.find_stale
    lanes = build_serving(config, tiers, pools.by_tier, doors, metrics, find_stale=find_stale, client=accounts.redis)
    caching_service = CachingService(cache, lanes.service.answer)
    repairs.listeners.append(lanes.warmer.loaded)
    readiness = Readiness(pools.by_tier, config.server.readiness_cache_s)
    tracing = build_tracing(config, "causeway-gateway")
    jobs = build_jobs(config, by_name(tiers), accounts, metrics, tracing)
    server = Server(
        config.server,
        by_name(tiers),
        lanes.service,
        readiness,
        accounts.authenticator,
        accounts.ledger,
        metrics,
        caching_service=caching_service,
        critical_tenants=config.degradation.critical_tenants,
        jobs=(lambda _: None) if jobs is None else jobs.api.handler,
        tracing=tracing,
    )
    return App(
        config, server, accounts, jobs, pools, lanes.warmer, lanes.lag, lanes.heartbeat, caching_service, tracing, tasks
    )


def build_tracing(config: Config, service: str) -> Tracing | None:
    """None without a collector. `service`: what its spans say made them."""
    if not config.tracing.endpoint:
        return None
    # Not before it is wanted: OpenTelemetry is a tenth of a second and some megabytes.
    from .observability.otel_tracing import OtelTracing

    return OtelTracing(config.tracing, service)


def build_pools(
    config: Config, tiers: tuple[Tier, ...], metrics: Metrics, tasks: TaskGroup, repaired: Callable[[str], None]
) -> Pools:
    endpoints = EndpointMetrics(metrics.registry)
    pools = Pools(config, tiers, TritonClients(tasks, repaired), ejected=endpoints.ejected)
    endpoints.watch(pools.by_tier)
    return pools


def build_cache(config: Config, tiers: Mapping[str, Tier], metrics: Metrics) -> SharedCache | None:
    """None where it is off. Raises ConfigError."""
    if not config.cache.enabled:
        return None
    secret = read_secret(config.cache)
    return SharedCache(config.cache, config.redis, tiers, metrics.registry, secret=secret)


def build_jobs(
    config: Config, tiers: Mapping[str, Tier], accounts: Accounts, metrics: Metrics, tracing: Tracing | None
) -> JobsGateway | None:
    """None without a Redis. Raises ConfigError."""
    settings = with_shared_redis(config.jobs, config.redis)
    if not settings.redis:
        return None
    return JobsGateway(
        settings,
        tiers,
        lambda http: accounts.authenticator.principal(http.headers.get(hdrs.AUTHORIZATION, "")),
        metrics.registry,
        limits=accounts.ledger.limits,
        trace=None if tracing is None else tracing.jobs,
    )


def build_accounts(config: Config, metrics: Metrics) -> Accounts:
    """Build identity, tenants and audit log. Raises ConfigError."""
    tokens = load_tokens(Path(config.server.token_file)) if config.server.token_file else StaticTokens()
    client = open_redis(config.redis) if config.redis else None
    keys = KeySet(Path(config.identity.key_file)) if config.identity.key_file else None
    verifier = TokenVerifier(config.identity, keys) if keys is not None else None
    revocations = RevocationList(config.identity, client)
    limiter, usage = TenantRateLimiter(config.tenants, client), UsageRecorder(config.tenants, client)
    accounting = TenantAccounting(config.tenants, limiter, usage)
    audit = AuditLog(config.audit_file)
    tenants = TenantMetrics(metrics.registry)
    tenants.watch(
        local_checks=lambda: limiter.local_checks,
        stale_accepts=lambda: revocations.stale_accepts,
        usage_lost=lambda: usage.lost,
        audit_lost=lambda: audit.lost,
        key_file_stale=lambda: float(keys is not None and bool(keys.last_error)),
    )
    authenticator = Authenticator(tokens, verifier, revocations)
    return Accounts(authenticator, Ledger(accounting, audit, tenants), accounting, audit, revocations, client)


def open_redis(url: str) -> redis.asyncio.Redis:
    """Connects when it is first used. Each use has its own bound in time, so nothing is tried twice here, and of many
    at once some wait for a connection. Raises ConfigError."""
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, retry=None, socket_connect_timeout=2.0, max_connections=_CONNECTIONS, timeout=None
        )
        return redis.asyncio.Redis.from_pool(pool)
    except ValueError as error:
        raise ConfigError(f"not the URL of a Redis: {error}", where="redis") from error


async def run(config: Config, stop: asyncio.Event, reread: Callable[[], Config] | None = None) -> None:
    """Until `stop`; then drained and closed. Prints one line when requests are taken. Raises ConfigError.

    On SIGHUP the endpoints of what `reread` gives are taken.
    """
    faults = []
    app: App | None = None
    async with anyio.create_task_group() as tasks:
        try:
            app = build(config, tasks)
            if reread is not None:
                reload_on_sighup(app.pools, config, reread)
            await _serve(app, stop)
        except ConfigError as error:
            faults.append(error)  # Raised below: out of a task group it would come wrapped.
        tasks.cancel_scope.cancel()
    if app is not None:
        await app.close()
    for fault in faults:
        raise fault


async def _serve(app: App, stop: asyncio.Event) -> None:
    await app.start()
    print(f"ready url={app.url}", flush=True)
    await stop.wait()
    _log.info("draining")
    await app.drain()
    await app.stop()
