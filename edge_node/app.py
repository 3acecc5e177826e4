"""The composition root: it constructs and wires the daemon's components, some of them on demand
(`daemon.optional_parts`).

    app = build(config)
    await app.start()      # listens; engines still load in the background
    await app.drain()      # refuses new requests; those in progress finish, within `server.drain_s`
    await app.close()      # no task, no child process and no socket file is left

or `await app.serve()`, which does all three and ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from causeway_server.models.parts.installed import find_program
from causeway_server.models.signals import SHADOW_FILE
from causeway_server.router.policy.compiled import Limits, Policy
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.serving.guard.runner import GuardRunner
from causeway_server.router.serving.listener import ConnectionTable
from causeway_server.router.serving.live.sessions import Sessions
from causeway_server.router.serving.stored.api import StoredResponseApi
from causeway_server.router.serving.stored.responses import StoredResponses
from causeway_server.router.types import Location, Modality

from .backends.backend import Backend
from .backends.cloud.backend import make_clouds
from .backends.cloud.history import CloudHistory
from .backends.engine.engines import Engine, EnginePool
from .clock import Clock, system_clock
from .config.schema import Config, LimitsConfig
from .console.routes import Console
from .daemon.components import Backends, Components, Serving, WaysIn, read_samples
from .daemon.lifecycle import App, StopRequest, SystemdNotifier
from .daemon.optional_parts import (
    Manifests,
    boot_bundle,
    connect_fleet,
    make_audio,
    make_egress_ledger,
    make_engine_factory,
    make_issuers,
    make_jobs,
    make_mqtt_bridge,
    make_part_encoders,
    make_shadow,
    make_tracer,
)
from .erasure import ErasureApi
from .files.api import FileApi
from .files.store import DeviceFileStore
from .http.api import Api, RequestReader
from .http.feedback import FeedbackApi
from .http.inspection import Inspection
from .http.responses import DeviceResponses
from .jobs import FILE as JOBS_FILE
from .jobs.lazy_jobs import LazyJobs
from .jobs.responses import ResponseJobs
from .observability.metrics import Metrics
from .parts import LazyAudio
from .serving.agent_sessions import AgentSessions
from .serving.budgets import ClientBudgets
from .serving.direct import DirectAnswers
from .serving.generation import AttemptRunner
from .serving.on_demand_signals import OnDemandSignals
from .serving.requests import Admission, Records, SharedGenerations
from .serving.service import AnswerSources, Service
from .serving.shadow import SemanticChecks, Shadows
from .serving.variants import DeviceVariants
from .sessions import DeviceClient, DeviceSessions, SessionAudio
from .signals.candidates import CandidateEstimates
from .signals.collector import SignalCollector
from .signals.device import DeviceProbes
from .signals.estimators import LearnedEstimators
from .signals.semantic import SemanticAnswers
from .storage.cache import FILE as CACHE_FILE
from .storage.cache import AnswerCache
from .storage.decisions import FILE as DECISIONS_FILE
from .storage.decisions import DecisionStore
from .storage.policies import DEFAULT_POLICY, PolicyStore
from .storage.responses import FILE as RESPONSES_FILE
from .storage.responses import DeviceResponseStore
from .storage.sessions import FILE as SESSIONS_FILE
from .storage.sessions import SessionStore
from .storage.spend import FILE as SPEND_FILE
from .storage.spend import SpendStore
from .storage.state_folder import StateFolderLock

if TYPE_CHECKING:
    from causeway_server.models.parts.process.messages import WorkerSpec

    from .agent.agent import Agent
    from .agent.interfaces import FleetLink
    from .backends.cloud.backend import CloudCredentials
    from .serving.part_encoders import PartEncoders

__all__ = ["App", "build"]


@dataclass(frozen=True, repr=False)  # the configuration may contain a key
class _Device:
    """The inputs of every builder: the configuration under the bundle, this device's folders, and measured signals."""

    config: Config
    state_dir: Path | None
    keys: StateKeys | None  # of the state folder
    model_dirs: list[Path]  # folders of models; the agent puts another bundle's folder first
    clock: Clock
    environ: Mapping[str, str]
    metrics: Metrics


def build(
    config: Config,
    *,
    make_engine: Callable[[str], Engine] | None = None,
    clock: Clock | None = None,
    environ: Mapping[str, str] = os.environ,
    fleet: FleetLink | None = None,
    encoders: Mapping[Modality, WorkerSpec] | None = None,
    speech_detector: WorkerSpec | None = None,
) -> App:
    """Construct one daemon, without starting it. Raises ConfigError if it would answer other machines without an API
    key.

    Args:
        make_engine: Factory for the engine of an edge target's model; by default from the model's artifact.
        environ: Environment variables: systemd's, and `PATH` for programs.
        fleet: The fleet whose plan the daemon follows; by default the one that the device joined. Without a fleet the
            daemon runs the last bundle that it verified, if any.
        encoders: Encoders that turn audio and images into text; by default the installed packages, with their models.
        speech_detector: Speech detector for live sessions; used only together with `encoders`.
    """
    config.check_clients()
    clock = clock or system_clock()
    state_dir = Path(config.state_dir) if config.state_dir else None
    factory = config
    state_folder = StateFolderLock(
        state_dir, (CACHE_FILE, DECISIONS_FILE, SPEND_FILE, SHADOW_FILE, JOBS_FILE, RESPONSES_FILE, SESSIONS_FILE)
    )
    booted, config = boot_bundle(config, state_folder, clock)
    model_dirs = [Path(folder) for folder in config.engine.model_dirs]
    keys = None if state_dir is None else StateKeys(state_dir, config.encryption.key_file, environ, clock.unix)
    device = _Device(config, state_dir, keys, model_dirs, clock, environ, Metrics())
    connection, fleet_problem, credentials = None, "", None
    if fleet is None:
        connection, fleet_problem, credentials = connect_fleet(config, state_dir, clock, device.metrics, keys)
    engines = None
    if config.engine.enabled:
        make_engine = make_engine or make_engine_factory(config.engine, model_dirs, keys)
        engines = EnginePool(make_engine, Manifests(model_dirs).weights)
    part_encoders = make_part_encoders(config, model_dirs, clock, encoders, speech_detector)
    backends = _build_backends(device, engines, part_encoders, credentials)
    serving = _build_serving(device, backends)
    ways_in = _build_ways_in(device, backends, serving)
    parts = Components(
        **vars(backends),
        **vars(serving),
        **vars(ways_in),
        started=clock.monotonic(),
        clock=clock,
        metrics=device.metrics,
        fleet=connection,
        fleet_problem=fleet_problem,
        state_folder=state_folder,
        keys=keys,
    )
    device.metrics.watch(partial(read_samples, parts))
    stop = StopRequest()
    agent = None
    if booted is not None and (fleet is not None or connection is not None):
        from .daemon.fleet import make_agent

        agent = make_agent(
            *(booted, fleet, connection, parts),
            config=config.fleet,
            factory=factory,
            model_dirs=model_dirs,
            restart=stop.restart,
        )
    return App(config, parts, _build_api(device, parts, agent), SystemdNotifier(environ), agent, stop)


def _build_backends(
    device: _Device,
    engines: EnginePool | None,
    part_encoders: PartEncoders | None,
    credentials: CloudCredentials | None,
) -> Backends:
    config = device.config
    egress = make_egress_ledger(config, device.state_dir)
    clouds = make_clouds(config.cloud_configs, credentials, egress)
    learned = LearnedEstimators(device.model_dirs, always_quality=config.decisions.signals == "all")
    spend = SpendStore(device.state_dir, device.clock)
    signals = SignalCollector(
        device.clock,
        spend=spend,
        edge=engines,
        clouds=clouds,
        read_device=DeviceProbes().read,
        encoders=() if part_encoders is None else part_encoders.kinds,
        projected=(lambda _: ()) if part_encoders is None else part_encoders.projectors.kinds,
        learned=learned,
    )
    return Backends(
        engines=engines,
        clouds=clouds,
        egress=egress,
        encoders=part_encoders,
        learned=learned,
        spend=spend,
        signals=signals,
    )


def _build_serving(device: _Device, backends: Backends) -> Serving:
    """Construct the service and its stores, under the policy that the start loads."""
    config, clock, model_dirs, metrics = device.config, device.clock, device.model_dirs, device.metrics
    engines, learned, part_encoders = backends.engines, backends.learned, backends.encoders
    manifests = Manifests(model_dirs)
    budgets = ClientBudgets(config.limits, backends.spend, clock, device.keys) if config.limits.bound else None
    admission = Admission(Limits(), budgets)
    cache = AnswerCache(
        memory_bytes=config.cache.memory_bytes,
        disk_bytes=config.cache.disk_bytes,
        directory=device.state_dir,
        clock=clock,
        keys=device.keys,
    )
    decisions = DecisionStore(
        memory_records=config.decisions.memory_records,
        max_age_s=config.decisions.max_age_s,
        directory=device.state_dir,
        clock=clock,
        keys=device.keys,
    )
    by_location: dict[Location, Backend] = {}
    if engines is not None:
        by_location["edge"] = engines
    if backends.clouds:
        by_location["cloud"] = backends.clouds
    semantic = SemanticAnswers(model_dirs)
    shadows = Shadows(
        backends=by_location,
        admission=admission,
        make=lambda: make_shadow(device.state_dir, clock, learned, model_dirs, device.keys),
        spend=backends.spend,
        energy=backends.signals.energy,
        metrics=metrics,
        clock=clock,
        rng=random.Random(os.urandom(16)),
        checks=SemanticChecks(semantic, metrics, random.Random(os.urandom(16))),
        read_device=lambda: backends.signals.device,
    )
    candidates = CandidateEstimates(model_dirs)
    guard = GuardRunner()
    if config.guard.names_model:
        from causeway_server.models.signals.names import load_names_model  # imported where there is a model

        guard = GuardRunner(load_names_model(config.guard.names_model))
    on_demand = OnDemandSignals(
        clock,
        count_tokens=None if engines is None else engines.count,
        estimate_quality=None if engines is None else learned.quality,
        encoders=part_encoders,
        record_all=config.decisions.signals == "all",
        candidates=candidates,
        guard=guard,
    )
    records = Records(decisions, backends.spend, metrics, clock, DeviceVariants(metrics, device.state_dir))
    sources = AnswerSources(cache, semantic, SharedGenerations())
    service = Service(
        admission=admission,
        sources=sources,
        attempts=AttemptRunner(by_location, config.cloud, learned.calibrate, part_encoders, engines, guard),
        signals=backends.signals,
        on_demand=on_demand,
        records=records,
        shadows=shadows,
        default_deadline_s=config.server.default_deadline_s,
        sessions=AgentSessions(SessionStore(device.state_dir, clock.monotonic, keys=device.keys), clock),
    )

    def activate(policy: Policy) -> None:
        admission.set_limits(policy.limits)
        metrics.set_targets(target.name for target in policy.offered)
        service.use(policy, manifests.cache_scope(config.engine))
        if engines is not None:
            engines.use(policy)
            learned.activate(policy)
        candidates.activate(policy)
        backends.signals.use(policy)  # the projectors change with their models
        if part_encoders is not None:
            part_encoders.projectors.use({target.model for target in policy.targets if target.at == "edge"})
        shadows.use(policy)

    policies = PolicyStore(
        Path(config.policy) if config.policy else DEFAULT_POLICY,
        state_dir=device.state_dir,
        clock=clock,
        on_activate=activate,
        on_load=metrics.policy_loaded,
        model_temperature=manifests.temperature,
        model_adapters=manifests.adapters,
        clouds=backends.clouds.names,
    )
    return Serving(
        admission=admission,
        cache=cache,
        decisions=decisions,
        records=records,
        service=service,
        shadows=shadows,
        shared_generations=sources.shared_generations,
        policies=policies,
    )


def _build_ways_in(device: _Device, backends: Backends, serving: Serving) -> WaysIn:
    """Construct the parts from which requests come: files, jobs, audio, live sessions, a broker's messages."""
    config, clock, part_encoders = device.config, device.clock, backends.encoders
    files = DeviceFileStore(device.state_dir, config.files, config.server.max_body_bytes, clock, device.keys)
    jobs = LazyJobs(
        device.state_dir,
        lambda folder: make_jobs(folder, device.keys, config.jobs, backends, serving, reader, responses.settle),
    )
    response_store = DeviceResponseStore(device.state_dir, config.responses, clock, device.keys)
    response_jobs = ResponseJobs(jobs)
    responses = StoredResponses(store=response_store, jobs=response_jobs, by_default=False, wall_clock=clock.unix)
    cloud = backends.clouds.first
    history = None if cloud is None else CloudHistory(cloud.address, config.responses.max_bytes)
    issuers = make_issuers(config.identity, device.state_dir, clock)
    limits = None if config.limits == LimitsConfig() else config.limits
    reader = RequestReader(config.server, files, responses, history, issuers, limits)
    audio = LazyAudio(lambda: make_audio(config, device.environ, device.model_dirs, backends, serving, reader))
    tracing = make_tracer(config)
    sessions: Sessions[DeviceClient] = Sessions(
        config.realtime,
        DeviceSessions(
            config.realtime,
            serving.service,
            reader,
            serving.policies,
            clock,
            SessionAudio(
                audio,
                transcribes=part_encoders is not None and "audio" in part_encoders.kinds,
                detect=None if part_encoders is None or part_encoders.detector is None else part_encoders.detector.run,
                max_clips=config.parts.max_parts,
                speaks=find_program(device.environ) is not None,
                voice=config.parts.voice,
            ),
            tracing,
        ),
        clock.monotonic,
    )
    return WaysIn(
        connections=(
            ConnectionTable("tcp", config.server.max_connections, clock.monotonic),
            ConnectionTable("unix", config.server.max_connections, clock.monotonic),
        ),
        reader=reader,
        files=files,
        response_store=response_store,
        responses=DeviceResponses(StoredResponseApi(responses), serving.service, reader, response_jobs.start),
        jobs=jobs,
        audio=audio,
        sessions=sessions,
        mqtt=make_mqtt_bridge(config, jobs, serving.service, device.metrics),
        tracing=tracing,
    )


def _build_api(device: _Device, parts: Components, agent: Agent | None) -> Api:
    config, reader, policies = device.config, parts.reader, parts.policies
    inspection = Inspection(
        service=parts.service,
        reader=reader,
        policies=policies,
        decisions=parts.decisions,
        metrics=device.metrics,
        clock=device.clock,
        readiness=parts.readiness,
        describe=_describe,
    )
    erasure = ErasureApi(parts, device.state_dir)
    if parts.fleet is not None:
        parts.fleet.erase = erasure.for_fleet
        parts.fleet.read_condition = lambda: (parts.signals.device.temperature_c, parts.shadows.drift)
        parts.decisions.sample = parts.fleet.records.add
        parts.shadows.labelled = parts.fleet.records.label
    return Api(
        service=parts.service,
        reader=reader,
        policies=policies,
        records=parts.records,
        tracing=parts.tracing,
        more_paths={
            **inspection.paths(),
            **FeedbackApi(parts.service, reader, parts.decisions, parts.signals).paths(),
            **Console(parts, agent).paths(),
            **parts.jobs.paths(),
            **FileApi(parts.files, reader, config.server.read_timeout_s).paths(),
            **parts.responses.paths(),
            **erasure.paths(),
            **parts.audio.paths(),
            "/v1/realtime": ("GET", parts.sessions.connect),
        },
        heartbeat_s=config.server.heartbeat_s,
        as_job=parts.jobs.as_job,
        responses=parts.responses,
        direct=DirectAnswers(parts.service, parts.clouds, config.server.heartbeat_s),
    )


def _describe() -> object:
    """Return the OpenAPI document. Its imports are deferred until it is needed."""
    from .openapi import edge_document

    return edge_document()
