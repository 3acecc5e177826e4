"""The composition root of the gateway: the only place that builds its parts and wires them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio
from aiohttp import hdrs
from anyio import to_thread
from anyio.abc import TaskGroup

from router.serving.gauges import GaugeCollector
from router.serving.live.live_session import Detect
from router.serving.live.sessions import Sessions

from .accounts.accounts import Accounts
from .assembly import build_accounts, build_cache, build_pools, build_tracing, tune_garbage_collector
from .cache.caching_service import CachingService
from .config.schema import Config
from .core.body_memory import BodyMemory
from .dispatch.balancing.pools import Pools
from .dispatch.balancing.reload import reload_endpoints, reload_on_sighup
from .grpc_api.assembly import build_grpc
from .http.generation_routes import GenerationRoutes
from .http.info_routes import InfoRoutes
from .http.listener import Listener, allowed_connections
from .http.operator import OperatorRoutes, operator_listener
from .http.readiness import Readiness
from .http.request_admission import InlineFiles, RequestAdmission
from .http.request_runner import RequestRunner
from .http.server import Server
from .jobs.config import with_shared_redis
from .jobs.gateway import JobsGateway
from .lifetime import Closing, run_with_tasks
from .observability.metrics import Metrics
from .observability.tracing import Tracing
from .parts.assembly import build_speech_detection, build_transcription
from .serving.assembly import ReloadListeners, ServingRuntime, build_serving
from .serving.service import nothing_stale
from .sessions.requests import GatewayClient, GatewaySessions
from .tiers.tier import Tier, by_name, load_tiers

if TYPE_CHECKING:
    from models.modalities.graph.speech_detection import SpeechDetection
    from models.modalities.process.messages import WorkerSpec

    from .grpc_api.server import GrpcServer
    from .parts.request_parts import RequestParts

_log = logging.getLogger("causeway.cloud")


class App:
    """A running gateway: `start`, then `drain` and `stop`; `close` once its task group has ended."""

    def __init__(
        self,
        config: Config,
        server: Server,
        operator: Listener,
        accounts: Accounts,
        jobs: JobsGateway | None,
        pools: Pools,
        serving: ServingRuntime,
        runner: RequestRunner,
        caching_service: CachingService,
        tracing: Tracing | None,
        tasks: TaskGroup,
        *,
        grpc: GrpcServer | None = None,
        detector: SpeechDetection | None = None,
    ) -> None:
        self._config = config
        self._server = server
        self._accounts = accounts
        self._jobs = jobs
        self.pools = pools
        self._serving = serving
        self._runner = runner
        self._caching_service = caching_service
        self._tracing = tracing
        self._tasks = tasks
        self._detector = detector
        self._listener = Listener(config.server, server.handle, config.web_origins)
        self._operator = operator
        self.grpc = grpc
        """The gRPC address, if it is configured."""

    @property
    def url(self) -> str:
        return f"{self._listener.url}/v1"

    @property
    def paths(self) -> Mapping[str, str]:
        """The methods of each path of the public address, with `{id}` for what the path names."""
        return self._server.paths

    @property
    def sessions(self) -> Sessions[GatewayClient]:
        return self._server.sessions

    @property
    def operator_url(self) -> str:
        return self._operator.url

    async def start(self) -> None:
        """Start the background tasks and listen.

        Raises:
            ConfigError: an address is not available, or the keys in Redis have another layout
        """
        await self.pools.prepare()
        self._tasks.start_soon(self.pools.watch)
        self._tasks.start_soon(self._serving.warmer.watch)
        self._tasks.start_soon(self._serving.lag.watch)
        self._tasks.start_soon(self._serving.heartbeat.watch)
        self._caching_service.start(self._tasks)
        self.sessions.start(self._tasks)
        await self._accounts.prepare()
        await self._operator.start()
        await self._listener.start()
        if self.grpc is not None:
            await self.grpc.start()
        self._accounts.start(self._tasks)
        if self._jobs is not None:
            self._tasks.start_soon(self._jobs.watch)

    async def drain(self) -> None:
        """Accept no new requests; those in progress may end within `drain_s`."""
        self._server.begin_draining()
        async with anyio.create_task_group() as drains:
            drains.start_soon(self._listener.drain, self._config.server.drain_s)
            if self.grpc is not None:
                drains.start_soon(self.grpc.drain, self._config.server.drain_s)

    async def stop(self) -> None:
        """Close the listeners and cancel the background tasks: their task group may then be left."""
        self._runner.stop()
        await self.sessions.close()
        if self.grpc is not None:
            await self.grpc.close()
        await self._listener.close()
        await self._operator.close()
        self._tasks.cancel_scope.cancel()

    async def close(self) -> None:
        """Close what the background tasks used, after they ended: a probe needs its channel until its last step."""
        await self._caching_service.close()
        if self._detector is not None:
            await self._detector.close()
        await self._accounts.close()
        if self._jobs is not None:
            await self._jobs.close()
        await self.pools.close()
        if self._tracing is not None:
            await to_thread.run_sync(self._tracing.close)


def build(
    config: Config,
    tasks: TaskGroup,
    reread: Callable[[], Config] | None = None,
    *,
    speech_detector: WorkerSpec | None = None,
) -> App:
    """Check and wire everything without starting it. Raises ConfigError.

    Args:
        config: the gateway's configuration.
        tasks: the parent of background tasks.
        reread: reads the configuration again when an operator reloads the endpoints.
        speech_detector: detects speech in live sessions; None: what is installed here.
    """
    tiers = load_tiers(config.tiers, config.model_dirs)
    metrics = Metrics()
    accounts = build_accounts(config, metrics)
    reload_listeners = ReloadListeners(metrics.count_reload)
    pools = build_pools(config, tiers, metrics, tasks, reload_listeners)
    settings = {tier.name: tier.config.admission_settings for tier in tiers}
    cache = build_cache(config, by_name(tiers), metrics)
    find_stale = nothing_stale if cache is None else cache.find_stale
    serving = build_serving(config, tiers, pools, settings, metrics, find_stale=find_stale, client=accounts.redis)
    caching_service = CachingService(cache, serving.service.answer)
    reload_listeners.listeners.append(serving.warmer.loaded)
    readiness = Readiness(
        pools.by_tier,
        config.server.readiness_cache_s,
        blocked=lambda: accounts.not_ready,
        problems=lambda: accounts.problems,
    )
    tracing = build_tracing(config, "causeway-gateway")
    bodies = BodyMemory(
        config.server.max_body_memory_bytes, metrics.registry, allowed_connections(config.server.max_connections)
    )
    bodies.check_largest(config.server.max_body_bytes)
    jobs = build_jobs(config, by_name(tiers), accounts, metrics, tracing, bodies)
    inline_files = None if jobs is None else jobs.files.inline
    admission = build_admission(config, by_name(tiers), accounts, bodies, tracing, inline_files)
    runner = RequestRunner(serving.service, caching_service, accounts.ledger, metrics, callers=accounts.authenticator)
    grpc = build_grpc(config, admission, runner, bodies, readiness)
    detector = build_speech_detection(serving.parts, speech_detector)
    server = build_server(
        config,
        by_name(tiers),
        admission,
        runner,
        readiness,
        accounts,
        metrics,
        bodies,
        parts=serving.parts,
        detect=None if detector is None else detector.run,
        jobs=jobs,
        on_drain=None if grpc is None else partial(tasks.start_soon, grpc.tell_draining),
    )
    routes = OperatorRoutes(
        accounts.operators,
        metrics,
        free_probes=not config.has_operator_tokens,
        readiness=readiness,
        jobs_refused=(lambda: "") if jobs is None else (lambda: jobs.refused),
        reload=None if reread is None else partial(reload_endpoints, pools, config, reread),
        drain=server.begin_draining,
        is_draining=lambda: server.draining,
        more=(lambda _: None) if jobs is None else jobs.dead_letters.handler,
    )
    operator = operator_listener(config, routes)
    return App(
        config,
        server,
        operator,
        accounts,
        jobs,
        pools,
        serving,
        runner,
        caching_service,
        tracing,
        tasks,
        grpc=grpc,
        detector=detector,
    )


def build_admission(
    config: Config,
    tiers: Mapping[str, Tier],
    accounts: Accounts,
    bodies: BodyMemory,
    tracing: Tracing | None = None,
    inline_files: InlineFiles | None = None,
) -> RequestAdmission:
    """Build the way in of requests.

    Args:
        tiers: by name and alias.
        inline_files: puts uploaded files in place of their ids; None: this gateway has no files.
    """
    return RequestAdmission(
        config.server,
        tiers,
        accounts.authenticator,
        accounts.ledger,
        bodies,
        critical_tenants=config.degradation.critical_tenants,
        tracing=tracing,
        inline_files=inline_files,
    )


def build_server(
    config: Config,
    tiers: Mapping[str, Tier],
    admission: RequestAdmission,
    runner: RequestRunner,
    readiness: Readiness,
    accounts: Accounts,
    metrics: Metrics,
    bodies: BodyMemory,
    *,
    parts: RequestParts | None = None,
    detect: Detect | None = None,
    jobs: JobsGateway | None = None,
    on_drain: Callable[[], object] | None = None,
) -> Server:
    """Wire the handlers of the public address.

    Args:
        tiers: by name and alias.
        parts: reads sounds, pictures and files; None: no tier is an encoder.
        detect: detects speech; None: live sessions detect no turns.
        on_drain: called when the gateway begins to drain.
    """
    sessions = Sessions(
        config.realtime,
        GatewaySessions(config.realtime, accounts.authenticator, admission, runner, bodies, parts, detect),
        runner.clock,
    )
    metrics.registry.register(GaugeCollector(lambda: sessions.gauges("causeway_cloud_")))
    return Server(
        admission,
        GenerationRoutes(admission, runner),
        InfoRoutes(tiers, readiness, created=int(time.time())),
        bodies,
        sessions,
        transcription=build_transcription(admission, runner, parts),
        jobs=None if jobs is None else jobs.api,
        on_drain=on_drain,
    )


def build_jobs(
    config: Config,
    tiers: Mapping[str, Tier],
    accounts: Accounts,
    metrics: Metrics,
    tracing: Tracing | None,
    bodies: BodyMemory,
) -> JobsGateway | None:
    """Return None without a Redis. Raises ConfigError."""
    settings = with_shared_redis(config.jobs, config.redis)
    if not settings.redis:
        if config.redis:
            _log.warning("no jobs: `redis` is a cluster, and `jobs.redis` names no other Redis")
        return None
    return JobsGateway(
        settings,
        tiers,
        lambda http: accounts.authenticator.principal(http.headers.get(hdrs.AUTHORIZATION, "")),
        metrics.registry,
        limits=accounts.ledger.limits,
        admit=accounts.ledger.admit_submission,
        admit_read=accounts.ledger.admit_read,
        check_cost=accounts.accounting.check_cost,
        trace=None if tracing is None else tracing.jobs,
        audit=accounts.audit,
        bodies=bodies,
    )


async def run(config: Config, stop: asyncio.Event, reread: Callable[[], Config] | None = None) -> None:
    """Serve until `stop`, then drain and close. Prints one line when it is ready. Raises ConfigError.

    Args:
        config: the gateway's configuration.
        stop: set to stop.
        reread: reads the configuration again; on SIGHUP the gateway takes its endpoints from it.
    """

    async def work(tasks: TaskGroup, closing: list[Closing]) -> None:
        app = build(config, tasks, reread)
        closing.append(app.close)
        if reread is not None:
            reload_on_sighup(app.pools, config, reread)
        await _serve(app, stop)

    await run_with_tasks(work)


async def _serve(app: App, stop: asyncio.Event) -> None:
    await app.start()
    tune_garbage_collector()
    grpc = "" if app.grpc is None else f" grpc={app.grpc.address}"
    print(f"ready url={app.url} operator={app.operator_url}{grpc}", flush=True)
    await stop.wait()
    _log.info("draining")
    await app.drain()
    await app.stop()
