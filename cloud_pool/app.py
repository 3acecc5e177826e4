"""The composition root: builds and wires a gateway. `background` does the same for workers and pipelines.

All processes share a `Runtime`: the tiers, and the service over them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import TaskGroup
from prometheus_client import CollectorRegistry

from causeway_server.router.errors import ConfigError, JobStoreUnavailable
from causeway_server.router.residency import region_tags
from causeway_server.router.serving.issuers.tokens import IssuerTokens
from causeway_server.router.serving.listener import Listener
from causeway_server.router.serving.live.live_session import Detect
from causeway_server.router.serving.live.sessions import Sessions
from causeway_server.router.serving.metrics import SampleCollector
from causeway_server.router.serving.process import tune_garbage_collector
from causeway_server.router.serving.stored.api import StoredResponseApi
from causeway_server.router.serving.stored.responses import StoredResponses
from causeway_server.router.trackers import FairShare
from causeway_server.router.types import folded_tags
from causeway_server.router.variants.settings import TrialConfig

from .accounts.accounts import Accounts
from .accounts.audit import AuditLog
from .accounts.identity.api_keys import ApiKeys
from .accounts.identity.authenticator import (
    OPERATOR_SCOPES,
    Authenticator,
    StaticTokens,
    load_tokens,
    local_operator_token,
    principal_of,
)
from .accounts.identity.fleet import FleetTrust
from .accounts.identity.revocation import RevocationList
from .accounts.identity.token_verifier import KeySet, TokenVerifier
from .accounts.ledger import Ledger, TenantMetrics
from .accounts.tenants.rate_limiter import TenantRateLimiter
from .accounts.tenants.usage import UsageRecorder
from .admission import AdmissionConfig, AdmissionController, AdmissionSettings
from .admission.controller import AdmissionMetrics
from .admission.division import PeerKind
from .admission.peer_heartbeat import PeerHeartbeat, SharedTier
from .batches.batch_api import BatchApi
from .cache.caching_service import CachingService
from .cache.shared_cache import CacheSecrets, SharedCache, is_private, read_secret
from .config import Config
from .core.principal import Principal
from .core.request_context import Arrivals, BodyMemory, Generate
from .degradation.fallback import DegradationMetrics, TierFallback, TierSignals, TierWarmer
from .degradation.tier_attempt import TierRuntime
from .degradation.tier_sessions import TierSessions
from .dispatch.dispatcher import Dispatcher, RetryBudget
from .dispatch.metrics import DispatchMetrics
from .dispatch.pool import Pools
from .http.direct import DirectChats
from .http.info_routes import InfoRoutes, Readiness
from .http.key_routes import KeyRoutes
from .http.operator import MAX_CONNECTIONS, OperatorRoutes
from .http.request_admission import RequestAdmission
from .http.request_runner import RequestRunner
from .http.server import GenerationRoutes, Server, allowed_connections, gateway_listener
from .http.sessions import GatewayClient, GatewaySessions
from .http.stored_responses import GatewayResponses
from .jobs.http.dead_letter_api import DeadLetterApi
from .jobs.http.job_api import NO_AUDIT, JobApi, JobCallers
from .jobs.http.response_jobs import GatewayResponseJobs
from .jobs.metrics import JobMetrics
from .jobs.submission import NamedFileReader, SubmissionParser
from .lifetime import Closing, keep_running, run_with_tasks
from .observability.metrics import EventLoopLag, Metrics
from .redis.connect import EvictionCheck, open_redis
from .serving.guard import GatewayGuard
from .serving.service import Service, nothing_stale
from .serving.shadow import ShadowCopies
from .serving.tokenizers import TierTokenizers
from .serving.trimming import TrimmingService
from .storage.config import JobsConfig, with_shared_redis
from .storage.encryption import ContentCipher
from .storage.stores import JobStores
from .tiers.config import TierConfig
from .tiers.tier import Tier, allowed_tiers, by_name, load_tiers
from .tiers.variants import TierVariants, check_variants
from .upstreams.clients import UpstreamClients
from .upstreams.features import TierServers, verify_features
from .upstreams.triton.model_control import default_key_file

if TYPE_CHECKING:
    from causeway_server.models.parts.graph.branch import SpeechDetection
    from causeway_server.models.parts.process.messages import WorkerSpec

    from .grpc_api.server import GrpcServer
    from .observability.tracing import JobTrace, Tracing
    from .parts.request_parts import RequestParts

log = logging.getLogger(__name__)
_UNBOUNDED = 1_000_000  # jobs: the shared limit bounds them
_GAUGES_S = 5.0


# --- what every process has -------------------------------------------------------------------------------------------


class Runtime(msgspec.Struct, frozen=True):
    """The tiers and the service over them. Call `start`, and `close` after the background tasks have ended."""

    tasks: TaskGroup  # parent of the background tasks
    tiers: Mapping[str, Tier]  # tiers by name and alias
    metrics: Metrics
    accounts: Accounts
    pools: Pools
    admissions: Mapping[str, AdmissionController]  # admission by the tier's name
    service: Service
    parts: RequestParts | None  # reader of audio, images and files; None if no tier takes parts
    caching_service: CachingService
    tracing: Tracing | None
    heartbeat: PeerHeartbeat
    kind: PeerKind
    watchers: tuple[Callable[[], Coroutine[object, object, None]], ...]  # loops that run from `start` to `close`
    sessions: TierSessions | None = None  # None: sessions are off
    http_tiers: tuple[TierServers, ...] = ()  # chat tiers over HTTP, whose features are verified at start

    @property
    def job_trace(self) -> JobTrace | None:
        return None if self.tracing is None else self.tracing.jobs

    async def start(self) -> None:
        """Start the background tasks. Raises ConfigError for keys of another layout, or a server without a feature."""
        await self.pools.prepare()
        await verify_features(self.http_tiers, self.pools.clients)
        for watch in self.watchers:
            self.tasks.start_soon(watch)
        if self.kind == "worker":
            await self.heartbeat.beat()  # The first one takes no permits yet.
        self.tasks.start_soon(self.heartbeat.watch)
        self.caching_service.start(self.tasks)
        await self.accounts.prepare()
        self.accounts.start(self.tasks)

    async def close(self) -> None:
        """Close what the background tasks used, after they have ended: a probe needs its channel."""
        await self.caching_service.close()
        await self.accounts.close()
        await self.pools.close()
        if self.tracing is not None:
            await to_thread.run_sync(self.tracing.close)


def build_runtime(
    config: Config, tasks: TaskGroup, service_name: str, *, kind: PeerKind = "gateway", is_gateway: bool = True
) -> Runtime:
    """Build the tiers and the service over them, without starting anything. Raises ConfigError.

    Args:
        service_name: Name of this process in traces.
        kind: Kind of this process among those that divide a tier's permits.
        is_gateway: Whether this process takes a share of the tenants' limits while their Redis is unavailable.
    """
    tiers = load_tiers(config.tiers, config.model_dirs)
    check_variants(config.tiers)
    metrics, lag = Metrics(), EventLoopLag()
    accounts = build_accounts(config, metrics, is_gateway=is_gateway)
    reload_listeners = [metrics.count_reload]  # get the name of each model that was loaded again
    dispatch_metrics = DispatchMetrics(metrics.registry)
    pools = build_pools(config, tiers, dispatch_metrics, tasks, reload_listeners)
    runtimes = _build_tier_runtimes(tiers, pools, metrics, dispatch_metrics, kind, lag)
    variants = TierVariants(config.tiers, metrics.registry, accounts.redis)
    cache = build_cache(config, by_name(tiers), metrics, kind, variants)
    signals = {
        name: TierSignals(pools.by_tier[name], runtime.admission.scheduler, runtime.tier.config.ttft_objective_s)
        for name, runtime in runtimes.items()
    }
    degradation = config.degradation
    fallback = TierFallback(degradation, signals)
    sessions = None
    if degradation.sessions.mode != "off":
        sessions = TierSessions(degradation.sessions, fallback.chains, accounts.redis)
    degradation_metrics = DegradationMetrics(metrics.registry)
    degradation_metrics.watch(fallback)
    takes_parts = any(tier.config.is_encoder or tier.config.native_parts for tier in tiers)
    parts = _build_parts(config, runtimes, fallback) if takes_parts else None
    guard = build_guard(config)
    service = Service(
        runtimes,
        fallback,
        find_stale=nothing_stale if cache is None else cache.find_stale,
        parts=parts,
        metrics=degradation_metrics,
        variants=variants,
        guard=guard,
        shadow=ShadowCopies(variants, tasks, partial(is_private, config=config.cache)).answer,
    )
    answer: Generate = service.answer
    if any(tier.config.context_overflow != "refuse" for tier in tiers):
        answer = TrimmingService(answer, TierTokenizers(pools.by_tier, guard)).answer
    models = {tier.name: tier.model for tier in tiers}
    warmer = TierWarmer(fallback, pools.by_tier, models, degradation.warm_up_after_idle_s)
    reload_listeners.append(warmer.loaded)
    shared = [_shared_tier(runtime, pools) for runtime in runtimes.values()]
    tracing = None
    if config.tracing.endpoint:
        from .observability.tracing import Tracing  # imported where there is a collector

        tracing = Tracing(config.tracing, service_name)
    return Runtime(
        tasks,
        by_name(tiers),
        metrics,
        accounts,
        pools,
        {name: runtime.admission for name, runtime in runtimes.items()},
        service,
        parts,
        CachingService(cache, answer if guard is None else guard.around(answer)),
        tracing,
        PeerHeartbeat(accounts.redis, shared, kind=kind),
        kind,
        (pools.watch, warmer.watch, lag.watch, variants.watch),
        sessions,
        tuple(
            TierServers(f"tiers[{index}].upstream", tier.model, tier.config.upstream)
            for index, tier in enumerate(tiers)
            if tier.config.upstream.is_http and "chat" in tier.config.can
        ),
    )


def build_guard(config: Config) -> GatewayGuard | None:
    """Build the guard; None without rules, so that requests cost nothing more. Raises ConfigError."""
    rules = config.guard.compiled()
    if not rules:
        return None
    model = None
    if config.guard.names_model:
        from causeway_server.models.signals.names import load_names_model  # imported where there is a model

        model = load_names_model(config.guard.names_model)
    return GatewayGuard(config.guard, rules, model)


def _build_tier_runtimes(
    tiers: tuple[Tier, ...],
    pools: Pools,
    metrics: Metrics,
    dispatch_metrics: DispatchMetrics,
    kind: PeerKind,
    lag: EventLoopLag,
) -> dict[str, TierRuntime]:
    admission_metrics, dispatchers, runtimes = AdmissionMetrics(metrics.registry), {}, {}
    for tier in tiers:
        settings = tier.config.admission_settings if kind == "gateway" else worker_admission(tier.config)
        admission = AdmissionController(
            settings.permits,
            settings.max_queued,
            settings,
            metrics=admission_metrics,
            tier=tier.name,
            lost_s=lag.lost_s,
        )
        budget = RetryBudget(tier.config.retry_budget.share, tier.config.retry_budget.min_retries_per_s)
        retried = partial(dispatch_metrics.retried, tier.name)
        by_prefix = tier.config.load_balancing == "prefix_affinity"
        dispatch = Dispatcher(pools.by_tier[tier.name], tier.config.max_attempts, budget, retried, by_prefix=by_prefix)
        dispatchers[tier.name] = dispatch
        runtimes[tier.name] = TierRuntime(tier, admission, dispatch)
    dispatch_metrics.watch(pools.by_tier, dispatchers)
    return runtimes


def worker_admission(tier: TierConfig) -> AdmissionSettings:
    """Return a worker's admission settings: claims already prefer urgent jobs, and claimed jobs have time to wait."""
    return msgspec.structs.replace(
        tier.admission_settings,
        min_permits=min(1, tier.min_concurrency),
        max_queued=_UNBOUNDED,
        ttft_objective_s=math.inf,
        config=AdmissionConfig(reserved_share=0.0, preemption_share=0.0),
    )


def _build_parts(config: Config, runtimes: Mapping[str, TierRuntime], fallback: TierFallback) -> RequestParts:
    from .parts.request_parts import RequestParts  # imported where a tier is an encoder

    return RequestParts(runtimes, fallback, config.parts, partial(is_private, config=config.cache))


def _shared_tier(runtime: TierRuntime, pools: Pools) -> SharedTier:
    name, pool = runtime.tier.name, pools.by_tier[runtime.tier.name]
    return SharedTier(
        name,
        runtime.tier.config.concurrency,
        lambda: [address.text for address in pools.configured(name)],
        lambda: pool.capacity,
        runtime.admission,
    )


def build_pools(
    config: Config,
    tiers: tuple[Tier, ...],
    metrics: DispatchMetrics,
    tasks: TaskGroup,
    reload_listeners: Sequence[Callable[[str], None]],
) -> Pools:
    """Build each tier's endpoints. Each of `reload_listeners` is called with the name of a model that was reloaded."""

    def reloaded(model: str) -> None:
        for listener in reload_listeners:
            listener(model)

    key_file = Path(config.triton_key_file) if config.triton_key_file else default_key_file()
    return Pools(
        [tier.endpoints for tier in tiers],
        UpstreamClients(tasks, reloaded, key_file=key_file),
        config.load_balancing,
        zone=config.server.zone,
        ejected=metrics.ejected,
    )


def build_cache(
    config: Config,
    tiers: Mapping[str, Tier],
    metrics: Metrics,
    kind: PeerKind = "gateway",
    variants: TierVariants | None = None,
) -> SharedCache | None:
    """Build the shared cache; None if it is disabled. Raises ConfigError. `variants` share no entries."""
    settings = config.cache if kind == "gateway" else config.cache.for_background()
    if not settings.enabled:
        return None
    return SharedCache(
        settings,
        settings.redis or config.redis,
        tiers,
        metrics.registry,
        secrets=CacheSecrets(read_secret(settings), ContentCipher(config.jobs.encryption_key_file)),
        variants=variants,
    )


def build_accounts(config: Config, metrics: Metrics, *, is_gateway: bool = True) -> Accounts:
    """Build identity, tenants and audit log. Raises ConfigError. `is_gateway`: see `build_runtime`."""
    tokens = load_tokens(Path(config.server.token_file)) if config.server.token_file else StaticTokens()
    client = open_redis(config.redis) if config.redis else None
    fleet = FleetTrust(config.identity.fleet) if config.identity.fleet.url else None
    key_file = Path(config.identity.key_file) if config.identity.key_file else None
    keys = KeySet(key_file, fleet) if key_file or fleet else None
    verifier = TokenVerifier(config.identity, keys) if keys is not None else None
    revocations = RevocationList(config.identity, client, fleet)
    issuers = None
    if config.identity.issuers:
        issuers = IssuerTokens(
            config.identity.issuers,
            principal_of,
            Path(config.state_dir) / "issuers" if config.state_dir else None,
            skew_s=config.identity.clock_skew_s,
            max_lifetime_s=config.identity.max_lifetime_s,
        )
    api_keys = ApiKeys(client, config.identity) if config.identity.api_keys.accept and client and is_gateway else None
    limiter = TenantRateLimiter(config.tenants, client, is_gateway=is_gateway)
    usage = UsageRecorder(config.tenants, client, wall_clock=limiter.day.unix_time)
    audit = AuditLog(config.audit_file)
    ledger = Ledger(config.tenants, limiter, usage, audit, TenantMetrics(metrics.registry))
    region = config.identity.region
    named = config.identity.certificates.tenants
    authenticator = Authenticator(
        tokens, verifier, revocations, region=region, certificate_tenants=named, issuers=issuers, api_keys=api_keys
    )
    operators = Authenticator(
        _operator_tokens(config),
        verifier if key_file is not None else None,  # the fleet's keys make no operators
        revocations,
        static_scopes=OPERATOR_SCOPES,
        region=region,
    )
    accounts = Accounts(
        authenticator,
        operators,
        ledger,
        limiter,
        audit,
        revocations,
        client,
        EvictionCheck(client),
        keys,
        fleet,
        issuers,
        api_keys,
    )
    metrics.registry.register(SampleCollector(accounts.samples))
    return accounts


def _operator_tokens(config: Config) -> StaticTokens:
    """Return the operators' static tokens; without configured ones, a token is created. Raises ConfigError."""
    if config.operator.token_file:
        return load_tokens(Path(config.operator.token_file))
    if config.has_operator_tokens:
        return StaticTokens()
    return local_operator_token(Path(config.state_dir) if config.state_dir else None)


def reload_on_sighup(pools: Pools, variants: TierVariants, config: Config, reread: Callable[[], Config]) -> None:
    """Reload endpoints and variants with `reread` on SIGHUP, without a restart. A faulty file changes nothing.

    `config`: the one that the process started with.
    """

    def reload() -> None:
        try:
            reload_tiers(pools, variants, config, reread)
        except ConfigError as error:
            log.error("The tiers stay unchanged, because the new configuration is faulty: %s", error.message)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def reload_tiers(pools: Pools, variants: TierVariants, config: Config, reread: Callable[[], Config]) -> None:
    """Apply the reread configuration's endpoints and variants. Raises ConfigError and changes nothing."""
    new = reread()
    check_variants(new.tiers)
    if _without_reloaded(new) != _without_reloaded(config):
        log.warning("Only endpoints and variants were reloaded; the other changes in the configuration need a restart.")
    pools.update_endpoints({tier.name: tier.endpoint_addresses for tier in new.tiers})
    variants.use(new.tiers)
    log.info("Endpoints and variants were reloaded.")


def _without_reloaded(config: Config) -> Config:
    tiers = tuple(
        msgspec.structs.replace(
            tier,
            variants=(),
            trial=TrialConfig(),
            triton="",
            endpoints=(),
            upstream=msgspec.structs.replace(tier.upstream, urls=()),
        )
        for tier in config.tiers
    )
    return msgspec.structs.replace(config, tiers=tiers)


# --- the gateway ------------------------------------------------------------------------------------------------------


class App(msgspec.Struct, frozen=True):
    """A running gateway: call `start`, then `drain` and `stop`; call `close` once its task group has ended."""

    config: Config
    runtime: Runtime
    server: Server
    listener: Listener
    operator: Listener
    runner: RequestRunner
    jobs: JobsGateway | None
    grpc: GrpcServer | None  # gRPC server, if an address for it is configured
    detector: SpeechDetection | None
    arrivals: Arrivals | None = None

    @property
    def url(self) -> str:
        return f"{self.listener.url}/v1"

    @property
    def paths(self) -> Mapping[str, str]:
        """Methods by path of the public address; `{id}` stands for an identifier in the path."""
        return self.server.paths

    @property
    def sessions(self) -> Sessions[GatewayClient]:
        return self.server.sessions

    @property
    def operator_url(self) -> str:
        return self.operator.url

    async def start(self) -> None:
        """Start the background tasks and listen. Raises ConfigError for the address or keys of another layout."""
        if self.arrivals is not None:
            self.arrivals.ledger.start()
        await self.runtime.start()
        self.sessions.start(self.runtime.tasks)
        await self.operator.start()
        await self.listener.start()
        if self.grpc is not None:
            await self.grpc.start()
        if self.jobs is not None:
            self.runtime.tasks.start_soon(self.jobs.watch)

    async def drain(self) -> None:
        """Accept no new requests. Requests in progress have `drain_s` to finish."""
        self.server.begin_draining()
        async with anyio.create_task_group() as drains:
            drains.start_soon(self.listener.drain, self.config.server.drain_s)
            if self.grpc is not None:
                drains.start_soon(self.grpc.drain, self.config.server.drain_s)

    async def stop(self) -> None:
        """Close the listeners and cancel the background tasks, so that their task group ends."""
        self.runner.stop()
        await self.sessions.close()
        if self.grpc is not None:
            await self.grpc.close()
        await self.listener.close()
        await self.operator.close()
        self.runtime.tasks.cancel_scope.cancel()

    async def close(self) -> None:
        """Close what the background tasks used, after they have ended."""
        if self.detector is not None:
            await self.detector.close()
        if self.jobs is not None:
            await self.jobs.close()
        await self.runtime.close()
        if self.arrivals is not None:
            await to_thread.run_sync(self.arrivals.ledger.close)


def build(
    config: Config,
    tasks: TaskGroup,
    reread: Callable[[], Config] | None = None,
    *,
    speech_detector: WorkerSpec | None = None,
) -> App:
    """Check and wire everything without starting it. Raises ConfigError.

    Args:
        reread: Function that reads the configuration again when an operator reloads the endpoints.
        speech_detector: Detector of speech in live sessions; None: the installed one.
    """
    runtime = build_runtime(config, tasks, "causeway-gateway")
    accounts, metrics, parts = runtime.accounts, runtime.metrics, runtime.parts
    readiness = Readiness(
        runtime.pools.by_tier,
        config.server.readiness_cache_s,
        blocked=lambda: accounts.not_ready,
        problems=lambda: (
            *accounts.problems,
            *runtime.service.variants.problems,
            *([] if arrivals is None else filter(None, [arrivals.ledger.problem])),
        ),
    )
    arrivals = build_arrivals(config)
    bodies = BodyMemory(
        config.server.max_body_memory_bytes,
        metrics.registry,
        allowed_connections(config.server.max_connections),
        arrivals,
    )
    bodies.check_largest(config.server.max_body_bytes)
    jobs = build_jobs(config, runtime, bodies)
    admission = RequestAdmission(
        config.server,
        runtime.tiers,
        accounts.authenticator,
        accounts.ledger,
        bodies,
        critical_tenants=config.degradation.critical_tenants,
        tracing=runtime.tracing,
        inline_files=None if jobs is None else jobs.files.inline,
        region=config.identity.region,
        sessions=runtime.sessions,
    )
    runner = RequestRunner(
        runtime.service,
        runtime.caching_service,
        accounts.ledger,
        metrics,
        callers=accounts.authenticator,
        variants=runtime.service.variants,
        sessions=runtime.sessions,
    )
    grpc = build_grpc(config, admission, runner, bodies, readiness)
    detector = build_speech_detection(parts, speech_detector)
    server = build_server(
        config,
        runtime.tiers,
        admission,
        runner,
        readiness,
        accounts,
        metrics,
        bodies,
        parts=parts,
        detect=None if detector is None else detector.run,
        jobs=jobs,
        on_drain=None if grpc is None else partial(tasks.start_soon, grpc.tell_draining),
        guard=runtime.service.guard,
    )
    routes = OperatorRoutes(
        accounts.operators,
        metrics,
        free_probes=not config.has_operator_tokens,
        readiness=readiness,
        jobs_refused=(lambda: "") if jobs is None else (lambda: jobs.refused),
        reload=None
        if reread is None
        else partial(reload_tiers, runtime.pools, runtime.service.variants, config, reread),
        server=server,
        more=(lambda _: None) if jobs is None else jobs.dead_letters.handler,
    )
    direct = DirectChats(server.generations).begin if is_direct(runtime, server) else None
    listener = gateway_listener(config.server, server.handle, config.web_origins, direct=direct)
    return App(
        config, runtime, server, listener, operator_listener(config, routes), runner, jobs, grpc, detector, arrivals
    )


def is_direct(runtime: Runtime, server: Server) -> bool:
    """Return whether chats may be answered in callbacks: a tier is over HTTP, and no rule of the gateway is for all."""
    admission = server.admission
    rules = (admission.tracing, admission.authenticator.issuers, admission.sessions, admission.bodies.arrivals)
    has_http = any(tier.config.upstream.kind == "openai" for tier in runtime.tiers.values())
    return has_http and runtime.caching_service.is_plain(runtime.service) and rules == (None,) * 4


def build_arrivals(config: Config) -> Arrivals | None:
    """Build the egress ledger of what arrives; None if it is off. Raises ConfigError without a folder for it."""
    if not config.egress_ledger.enabled:
        return None
    if not config.state_dir:
        raise ConfigError(
            "The egress ledger needs a folder for its files. Set `state_dir`.", where="egress_ledger.enabled"
        )
    from causeway_server.router.serving.egress.ledger import FOLDER, EgressLedger

    folder = Path(config.state_dir) / FOLDER
    ledger = EgressLedger(folder, "gateway", config.egress_ledger, folder / "ledger.key")
    return Arrivals(ledger, config.identity.region)


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
    guard: GatewayGuard | None = None,
) -> Server:
    """Wire the handlers of the public address.

    Args:
        parts: Reader of audio, images and files; None: no tier is an encoder.
        detect: Speech detection; None if live sessions do not detect turns.
        guard: Rules about the texts that a tier's tokenizer gets.
    """
    sessions = Sessions(
        config.realtime,
        GatewaySessions(config.realtime, accounts.authenticator, admission, runner, bodies, parts, detect),
        runner.clock,
    )
    metrics.registry.register(SampleCollector(lambda: sessions.samples("causeway_gateway_")))
    transcription = None
    if parts is not None and "audio" in parts.kinds:
        from .http.transcription_routes import TranscriptionRoutes  # imported where a tier understands audio clips

        transcription = TranscriptionRoutes(admission, runner, parts).transcription
    erasure = None
    if config.identity.receipt_key_file and jobs is not None:
        from .accounts.identity.issuing import read_private
        from .erasure import opened
        from .http.erasure_route import ErasureRoute

        key = read_private(Path(config.identity.receipt_key_file))
        erasure = ErasureRoute(
            admission, key, partial(opened, config.jobs, config.redis, config.cache, config.identity)
        ).erase
    return Server(
        admission,
        GenerationRoutes(
            admission,
            runner,
            heartbeat_s=config.server.heartbeat_s,
            responses=None if jobs is None else jobs.responses(admission),
        ),
        InfoRoutes(
            tiers,
            readiness,
            created=int(time.time()),
            document=_encoded_document,
            tokenizers=TierTokenizers(readiness.pools, guard),
            store=msgspec.UNSET if jobs is None else jobs.stores_by_default,
        ),
        bodies,
        sessions,
        transcription=transcription,
        jobs=None if jobs is None else jobs.api,
        on_drain=on_drain,
        keys=None if accounts.api_keys is None else KeyRoutes(accounts.api_keys, accounts, admission),
        erasure=erasure,
    )


def _encoded_document(paths: Mapping[str, str]) -> bytes:
    from .openapi import gateway_document  # on demand: hardly a gateway is ever asked for it

    return msgspec.json.encode(gateway_document(paths))


def build_speech_detection(parts: RequestParts | None, spec: WorkerSpec | None) -> SpeechDetection | None:
    """Build the speech detection of live sessions by the detector `spec` (None: the installed one), if any."""
    if parts is None or "audio" not in parts.kinds:
        return None
    from causeway_server.models.parts.graph.branch import SpeechDetection
    from causeway_server.models.parts.installed import find_speech_detector

    spec = spec or find_speech_detector()
    return None if spec is None else SpeechDetection(spec)


class JobsGateway:
    """The jobs API over HTTP: `api.handler` routes the requests, `dead_letters.handler` those of operators.

    `files` reads the uploaded files that requests name.

    Args:
        bodies: Bound of the request bodies in memory; the server releases them.
        audit: Audit log, which gets a record of each accepted job and batch.
        clock: Replacement for Redis's clock in tests, Unix time in seconds.
    """

    def __init__(
        self,
        config: JobsConfig,
        tiers: Mapping[str, Tier],
        callers: JobCallers,
        registry: CollectorRegistry,
        *,
        trace: JobTrace | None = None,
        audit: AuditLog = NO_AUDIT,
        bodies: BodyMemory | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Connect the job API to its stores. Raises ConfigError if the configuration is invalid."""
        self.refused = ""  # why no job is accepted now, as the last check found
        self._metrics = JobMetrics(registry)
        self._stores = JobStores.open(config, clock)
        self.files = NamedFileReader(self._stores.files, callers.region)
        parser = SubmissionParser(config, tiers, callers.check_cost, region=callers.region, sessions=callers.sessions)

        def bind(principal: Principal, tags: tuple[str, ...]) -> tuple[str, ...]:
            return folded_tags((*tags, *region_tags(parser.check_store(tags, callers.limits(principal)))))

        self.dead_letters = DeadLetterApi(self._stores.jobs)
        bodies = bodies or BodyMemory()
        batches = BatchApi(
            config,
            self._stores,
            trace,
            bodies=bodies,
            allowed=lambda principal: allowed_tiers(tiers, callers.limits(principal).models, principal.grants.models),
            bind=bind,
            audit=audit,
        )
        self.api = JobApi(
            config, self._stores, parser, callers, trace, bodies=bodies, more_routes=batches.routes, audit=audit
        )
        self.stores_by_default = by_default = config.responses.by_default
        self._response_jobs = GatewayResponseJobs(self._stores, self.api)
        stored = StoredResponses(
            store=self._stores.responses, jobs=self._response_jobs, by_default=by_default, region=callers.region
        )
        self._stored = StoredResponseApi(stored, config.max_event_streams)

    def responses(self, admission: RequestAdmission) -> GatewayResponses:
        """Return the handling of responses, which are stored with the jobs."""
        return GatewayResponses(self._stored, admission, self._response_jobs.start, self.api.parser.check_store)

    async def watch(self) -> None:
        """Check the store and update the gauges every 5 s until cancelled. Log once why jobs are refused."""
        await keep_running("the check of the job store", self._watch)

    async def _watch(self) -> None:
        while True:
            try:
                await self._stores.durability.ensure(again=True)
                depths = await self._stores.jobs.depths()
                self._metrics.set_depths(depths, depths.now_ms)
                self._metrics.set_file_bytes(await self._stores.files.stored_bytes())
                if self.refused:
                    log.info("Jobs are accepted again.")
                self.refused = ""
            except JobStoreUnavailable as error:
                reason = self._stores.database.explain(error)
                if reason != self.refused:
                    log.warning("Jobs are refused: %s", reason)
                self.refused = reason
            self._metrics.refused.set(bool(self.refused))
            await anyio.sleep(_GAUGES_S)

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._stores.close()


def build_jobs(config: Config, runtime: Runtime, bodies: BodyMemory) -> JobsGateway | None:
    """Build the job API; None without a Redis. Raises ConfigError."""
    settings = with_shared_redis(config.jobs, config.redis)
    if not settings.redis:
        if config.redis:
            log.warning(
                "Jobs are off, because `redis` names a Redis cluster, which jobs do not support. Set `jobs.redis` to "
                "a Redis that is not a cluster."
            )
        return None
    identify, ledger = runtime.accounts.authenticator.identify, runtime.accounts.ledger
    return JobsGateway(
        settings,
        runtime.tiers,
        JobCallers(
            identify,
            ledger.limits,
            ledger.check_cost,
            ledger.admit_submission,
            ledger.admit_reads,
            config.identity.region,
            runtime.sessions,
        ),
        runtime.metrics.registry,
        trace=runtime.job_trace,
        audit=runtime.accounts.audit,
        bodies=bodies,
    )


def build_grpc(
    config: Config, admission: RequestAdmission, runner: RequestRunner, bodies: BodyMemory, readiness: Readiness
) -> GrpcServer | None:
    """Build the gRPC server; None if no gRPC address is configured. Raises ConfigError if a package is missing."""
    if config.grpc.port is None:
        return None
    try:
        from .grpc_api.calls import GenerateCalls
        from .grpc_api.server import GrpcServer
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed: run `pip install 'causeway-router[grpc]'`.", where="grpc.port"
        ) from error
    timeout_s = config.server.read_timeout_s
    calls = GenerateCalls(admission, runner, bodies, FairShare(config.grpc.max_calls), timeout_s)
    return GrpcServer(config.grpc, config.server, calls, readiness.ready)


def operator_listener(config: Config, routes: OperatorRoutes) -> Listener:
    """Return the listener of the operators' address; the caller starts and closes it."""
    few = msgspec.structs.replace(config.operator_server, max_connections=MAX_CONNECTIONS)
    return gateway_listener(few, routes.handle, config.operator_web_origins, "operator.port", plain=())


async def run(config: Config, stop: asyncio.Event, reread: Callable[[], Config] | None = None) -> None:
    """Serve until `stop`, then drain and close. Prints one line when it is ready. Raises ConfigError."""

    async def work(tasks: TaskGroup, closing: list[Closing]) -> None:
        app = build(config, tasks, reread)
        closing.append(app.close)
        if reread is not None:
            reload_on_sighup(app.runtime.pools, app.runtime.service.variants, config, reread)
        await app.start()
        tune_garbage_collector()
        grpc = "" if app.grpc is None else f" grpc={app.grpc.address}"
        print(f"ready url={app.url} operator={app.operator_url}{grpc}", flush=True)
        await stop.wait()
        log.info("The gateway is draining.")
        await app.drain()
        await app.stop()

    await run_with_tasks(work)
