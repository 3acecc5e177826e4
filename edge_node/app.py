"""The composition root: the only place that constructs and wires the daemon's components.

    app = build(config)
    await app.start()      # listens; engines still load in the background
    await app.drain()      # refuses new requests; those in progress finish, within `server.drain_s`
    await app.close()      # no task, no child process and no socket file is left

or `await app.serve()`, which does all three and ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from models.catalog.artifact import find_artifact
from router.errors import ConfigError
from router.policy.compiled import Policy
from router.types import Location, Modality

from .backends.backend import Backend
from .backends.cloud.backend import CloudBackend
from .backends.engine.engines import Engine, EnginePool
from .clock import Clock, system_clock
from .config.schema import Config, EngineConfig
from .console.routes import Console
from .console.state import read_state
from .daemon.components import Components, read_gauges
from .daemon.lifecycle import App
from .daemon.manifests import cache_scope, model_adapters, model_temperatures, transcripts_of, weights_of
from .daemon.systemd import SystemdNotifier
from .http.api import Api, new_decision_id
from .http.listener import ConnectionTable
from .http.request_reader import RequestReader
from .jobs.entry import JobEntry, JobParts
from .modalities.boxed import find_encoders, find_program
from .modalities.entry import AudioEntry
from .observability.metrics import Metrics
from .serving.admission import Admission, AdmissionLimits
from .serving.attempts import AttemptRunner, Timeouts
from .serving.generation import SharedGenerations
from .serving.service import Service
from .serving.shadow import Shadows
from .sessions.sessions import Sessions
from .signals.collector import SignalCollector
from .signals.estimators import LearnedEstimators
from .signals.probes.device import DeviceProbes
from .signals.semantic import SemanticAnswers
from .storage.cache import AnswerCache
from .storage.decisions import DecisionStore
from .storage.policies import DEFAULT_POLICY, PolicyStore
from .storage.spend import SpendStore
from .storage.state_folder import StateFolderLock
from .version import daemon_version

if TYPE_CHECKING:
    from models.modalities.process.messages import WorkerSpec

    from .agent.agent import Agent
    from .agent.boot import Booted
    from .agent.host import FleetLink
    from .agent.link.connection import FleetConnection
    from .backends.cloud.credentials import Credentials
    from .modalities.api import AudioApi
    from .modalities.audio import AudioService
    from .modalities.graph import EncoderGraph
    from .mqtt.bridge import MqttBridge
    from .observability.tracing import RequestTracer
    from .signals.shadow import ShadowObserver
    from .storage.shadow import ShadowStore

__all__ = ["App", "build"]

FLEET_FOLDER = "fleet"  # in the state folder


def build(
    config: Config,
    *,
    make_engine: Callable[[str], Engine] | None = None,
    clock: Clock | None = None,
    environ: Mapping[str, str] = os.environ,
    fleet: FleetLink | None = None,
    encoders: Mapping[Modality, WorkerSpec] | None = None,
) -> App:
    """Construct one daemon, without starting it.

    Args:
        make_engine: creates the engine of an edge target's model; by default from the model's artifact.
        clock: for tests.
        environ: for systemd's variables, and the programs of `PATH`.
        fleet: the fleet whose plan the daemon follows; by default the one that the box joined. Without one it runs
            the last bundle that it verified, if any.
        encoders: what turns sounds and pictures into text; by default the installed packages, with their models.
    """
    clock = clock or system_clock()
    state_dir = Path(config.state_dir) if config.state_dir else None
    factory = config
    state_folder = StateFolderLock(state_dir)
    booted, config = _boot(config, state_folder, clock)
    model_dirs = [Path(folder) for folder in config.engine.model_dirs]  # the agent puts another bundle's first
    engines = None
    if config.engine.enabled:
        engines = EnginePool(make_engine or _engine_maker(config.engine, model_dirs, state_dir), weights_of(model_dirs))
    metrics = Metrics(lambda: read_gauges(parts))
    connection, fleet_problem, credentials = _connect(config, state_dir, clock, metrics, has_fleet=fleet is not None)
    cloud = CloudBackend(config.cloud, credentials=credentials) if config.cloud.url else None
    graph = _encoders(config, model_dirs, clock, encoders)
    record_all = config.decisions.record == "all"
    learned = LearnedEstimators(model_dirs, always_quality=record_all)
    spend = SpendStore(state_dir, clock)
    signals = SignalCollector(
        clock,
        spend=spend,
        edge=engines,
        cloud=cloud,
        read_device=DeviceProbes().read,
        encoders=() if graph is None else graph.kinds,
        projected=(lambda _: ()) if graph is None else graph.projectors.kinds,
        learned=learned,
    )
    admission = Admission(AdmissionLimits())

    model_temperature = model_temperatures(model_dirs)

    def activate(policy: Policy) -> None:
        limits = policy.limits
        admission.set_limits(AdmissionLimits(limits.concurrent, limits.queue, limits.per_client_rps))
        metrics.set_targets(target.name for target in policy.offered)
        service.use(policy, cache_scope(config.engine, model_dirs))
        if engines is not None:
            engines.use(policy)
            learned.activate(policy)
        shadows.use(policy)

    policies = PolicyStore(
        Path(config.policy) if config.policy else DEFAULT_POLICY,
        state_dir=state_dir,
        clock=clock,
        on_activate=activate,
        on_load=metrics.policy_loaded,
        model_temperature=model_temperature,
        model_adapters=model_adapters(model_dirs),
    )
    cache = AnswerCache(
        memory_bytes=config.cache.memory_bytes,
        disk_bytes=config.cache.disk_bytes,
        directory=state_dir,
        clock=clock,
    )
    decisions = DecisionStore(
        memory_records=config.decisions.memory_records,
        max_age_s=config.decisions.max_age_s,
        directory=state_dir,
        clock=clock,
    )
    shared_generations = SharedGenerations()
    backends = _backends(engines, cloud)

    def make_shadow() -> tuple[ShadowStore, ShadowObserver]:
        # Imported only when needed: most policies have no shadow requests.
        from .signals.shadow import ShadowObserver
        from .storage.shadow import ShadowStore

        return ShadowStore(state_dir, clock), ShadowObserver(learned, model_dirs, weights_of(model_dirs))

    shadows = Shadows(
        backends=backends,
        admission=admission,
        make=make_shadow,
        spend=spend,
        metrics=metrics,
        clock=clock,
        chance=random.Random(os.urandom(16)),
    )
    service = Service(
        admission=admission,
        cache=cache,
        shared_generations=shared_generations,
        attempts=AttemptRunner(backends, {"cloud": _cloud_timeouts(config)}, learned.calibrate, graph),
        signals=signals,
        spend=spend,
        decisions=decisions,
        metrics=metrics,
        clock=clock,
        count_tokens=None if engines is None else engines.count,
        estimate_quality=None if engines is None else learned.quality,
        semantic=SemanticAnswers(model_dirs),
        default_deadline_s=config.server.default_deadline_s,
        record_all=record_all,
        encoders=graph,
        shadows=shadows,
    )

    def restart() -> None:
        app.restart()

    def make_agent(booted: Booted | None) -> Agent | None:
        if booted is None or (fleet is None and connection is None):
            return None
        # Imported only when needed, as for all of the fleet: most boxes are in none.
        from .agent.agent import Agent
        from .daemon.bundles import BundleHost
        from .daemon.fleet import follow, link_of

        link = link_of(connection, config.fleet) if fleet is None and connection is not None else fleet
        assert link is not None
        assert state_dir is not None
        settings = {} if booted.bundle is None else booted.bundle.manifest.settings
        agent = Agent(
            folder=state_dir / FLEET_FOLDER,
            booted=booted,
            host=BundleHost(lambda: parts, factory, settings, model_dirs, restart),
            clock=clock,
            member=link.member,
            source=link.source,
            settings=link.settings,
            may_change=link.may_change,
            on_change=link.on_change,
        )
        if connection is not None:
            follow(connection, agent)
        return agent

    def make_jobs(folder: Path) -> JobParts:
        # Imported only when needed: most boxes have no jobs.
        from .jobs.api import JobApi
        from .jobs.intake import JobIntake
        from .jobs.runner import JobRunner
        from .jobs.store import JobStore

        store = JobStore(folder, config.jobs, clock)
        chance = random.Random(os.urandom(16))
        runner = JobRunner(
            store, service, cloud, lambda: policies.active.revision, config.jobs, clock, new_decision_id, chance
        )
        intake = JobIntake(config.jobs, store, runner, service)
        return JobParts(store, runner, intake, JobApi(store, runner, intake, service, reader))

    def make_audio() -> tuple[AudioService, AudioApi]:
        # Imported only when needed: most boxes have no microphone.
        from .modalities.api import AudioApi
        from .modalities.audio import AudioService
        from .modalities.speaker import Speaker

        audio = AudioService(
            graph,
            Speaker(environ),
            admission=admission,
            decisions=decisions,
            metrics=metrics,
            signals=signals,
            policy=lambda: policies.active,
            clock=clock,
            default_deadline_s=config.server.default_deadline_s,
        )
        api = AudioApi(audio, reader, clock, policy=lambda: policies.active, new_id=new_decision_id)
        return audio, api

    reader = RequestReader(config.server)
    jobs = JobEntry(state_dir, make_jobs)
    tracing = _tracing(config)
    sound = AudioEntry(make_audio)
    sessions = Sessions(
        config.realtime,
        service=service,
        reader=reader,
        policies=policies,
        clock=clock,
        new_id=new_decision_id,
        hear=sound.hear if graph is not None and "audio" in graph.kinds else None,
        max_sounds=config.modalities.max_parts,
        speak=None if find_program(environ) is None else sound.speak,
        tracing=tracing,
    )
    parts = Components(
        started=clock.monotonic(),
        clock=clock,
        policies=policies,
        admission=admission,
        cache=cache,
        decisions=decisions,
        shared_generations=shared_generations,
        signals=signals,
        spend=spend,
        metrics=metrics,
        service=service,
        engines=engines,
        cloud=cloud,
        connections=(
            ConnectionTable("tcp", config.server.max_connections, clock.monotonic),
            ConnectionTable("unix", config.server.max_connections, clock.monotonic),
        ),
        tracing=tracing,
        encoders=graph,
        agent=make_agent(booted),
        fleet=connection,
        fleet_problem=fleet_problem,
        jobs=jobs,
        mqtt=_mqtt(config, jobs, service, metrics),
        sessions=sessions,
        shadows=shadows,
    )
    console = Console(reader=reader, decisions=decisions, policies=policies, state=lambda: read_state(parts))
    api = Api(
        service=service,
        reader=reader,
        policies=policies,
        decisions=decisions,
        metrics=metrics,
        clock=clock,
        readiness=parts.readiness,
        tracing=parts.tracing,
        more_paths={
            **console.paths(),
            **parts.jobs.paths(),
            **sound.paths(),
            **sessions.paths(),
        },
        as_job=parts.jobs.as_job,
    )
    app = App(config, parts, api, SystemdNotifier(environ), state_folder)
    return app


def _boot(config: Config, state_folder: StateFolderLock, clock: Clock) -> tuple[Booted | None, Config]:
    """The bundle to start with, and the configuration under it; None for a box that was never in a fleet.

    Raises:
        ConfigError: another daemon uses the state folder.
    """
    state_dir = state_folder.folder
    if state_dir is None or not (state_dir / FLEET_FOLDER).is_dir():
        return None, config
    state_folder.acquire()  # before this start is counted; the lifecycle releases it
    from .agent.boot import boot
    from .daemon.bundles import with_bundle

    booted = boot(state_dir / FLEET_FOLDER, daemon_version(), clock.unix())
    return booted, with_bundle(config, booted.bundle)


def _connect(
    config: Config, state_dir: Path | None, clock: Clock, metrics: Metrics, *, has_fleet: bool
) -> tuple[FleetConnection | None, str, Credentials | None]:
    """The connection of a box that joined a fleet, what is wrong with it, and its token for the cloud."""
    if has_fleet or state_dir is None or not (state_dir / FLEET_FOLDER).is_dir():
        return None, "", None
    from .daemon.fleet import connect, credentials

    connection, problem = connect(state_dir / FLEET_FOLDER, config.fleet, clock, metrics.traffic)
    return connection, problem, credentials(connection, config.cloud)


def _backends(engines: EnginePool | None, cloud: CloudBackend | None) -> dict[Location, Backend]:
    backends: dict[Location, Backend] = {}
    if engines is not None:
        backends["edge"] = engines
    if cloud is not None:
        backends["cloud"] = cloud
    return backends


def _encoders(
    config: Config, model_dirs: Sequence[Path], clock: Clock, given: Mapping[Modality, WorkerSpec] | None
) -> EncoderGraph | None:
    """None on a box that has no encoder; no package of theirs is imported."""
    found = given if given is not None else find_encoders(model_dirs)
    if not found or not config.modalities.enabled:
        return None
    from models.catalog.projector import find_projector

    from .modalities.graph import EncoderGraph

    return EncoderGraph(
        found,
        config.modalities,
        clock,
        transcripts_of(model_dirs),
        lambda model: find_projector(model, model_dirs) if config.engine.enabled else None,
    )


def _tracing(config: Config) -> RequestTracer | None:
    """None unless an OpenTelemetry collector is configured."""
    if not config.tracing.endpoint:
        return None
    # Imported only when needed: OpenTelemetry costs a tenth of a second and some megabytes.
    from .observability.tracing import RequestTracer

    return RequestTracer(config.tracing)


def _mqtt(config: Config, jobs: JobEntry, service: Service, metrics: Metrics) -> MqttBridge | None:
    """None unless a broker is configured."""
    if not config.mqtt.url:
        return None
    if not config.state_dir:
        raise ConfigError("messages are kept in a state folder: set state_dir", where="mqtt.url")
    try:
        # Imported only when needed: most boxes know no broker.
        from .mqtt.bridge import MqttBridge
    except ModuleNotFoundError as error:
        message = "needs the extra `mqtt`: run `make setup`, or `pip install 'causeway[mqtt]'`"
        raise ConfigError(message, where="mqtt.url") from error
    return MqttBridge(config.mqtt, jobs, service, metrics, random.Random(os.urandom(16)))


def _cloud_timeouts(config: Config) -> Timeouts:
    return Timeouts(first_token_s=config.cloud.first_token_timeout_s, whole_s=config.cloud.timeout_s)


def _engine_maker(config: EngineConfig, model_dirs: Sequence[Path], state_dir: Path | None) -> Callable[[str], Engine]:
    """Engines from artifacts: the configured folders are searched first, then the models that ship."""

    def make(model: str) -> Engine:
        # Imported only when needed: a box without an engine need not have its dependencies installed.
        from models.llama_cpp.protocol import adapter_files

        from .backends.engine.backend import EngineBackend

        artifact = find_artifact(model, model_dirs)
        manifest = artifact.manifest
        return EngineBackend(
            artifact.path,
            config,
            refuse_token=manifest.refuse_token or "",
            temperature=manifest.temperature,
            answer_tokens=manifest.answer_tokens,
            answers=manifest.answers,
            name=artifact.name,
            weights_sha256=manifest.sha256,
            adapters=adapter_files(artifact),
            prompt_folder=None if state_dir is None else state_dir / "prompts" / artifact.name,
        )

    return make
