"""The composition root: the only place that constructs and wires the daemon's components.

    app = build(config)
    await app.start()      # listens; engines still load in the background
    await app.drain()      # refuses new requests; those in progress finish, within `server.drain_s`
    await app.close()      # no task, no child process and no socket file is left

or `await app.serve()`, which does all three and ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from models.catalog.artifact import ArtifactError, find_artifact, list_artifacts
from router.policy.compiled import ModelTemperature, Policy
from router.policy.signals import OPENAI_TEMPERATURE
from router.types import Location

from .backends.backend import Backend
from .backends.cloud.backend import CloudBackend
from .backends.engine.engines import Engine, EnginePool
from .clock import Clock, system_clock
from .config.schema import Config, EngineConfig
from .daemon.components import Components, read_gauges
from .daemon.lifecycle import App
from .daemon.systemd import SystemdNotifier
from .http.api import Api
from .http.listener import ConnectionTable
from .http.request_reader import RequestReader
from .observability.metrics import Metrics
from .serving.admission import Admission, AdmissionLimits
from .serving.attempts import AttemptRunner, Timeouts
from .serving.generation import SharedGenerations
from .serving.service import Service
from .signals.collector import SignalCollector
from .signals.estimators import LearnedEstimators
from .signals.probes.device import DeviceProbes
from .storage.cache import AnswerCache
from .storage.decisions import DecisionStore
from .storage.policies import DEFAULT_POLICY, PolicyStore
from .storage.spend import SpendStore

if TYPE_CHECKING:
    from .observability.tracing import RequestTracer

__all__ = ["App", "build"]


def build(
    config: Config,
    *,
    make_engine: Callable[[str], Engine] | None = None,
    clock: Clock | None = None,
    environ: Mapping[str, str] = os.environ,
) -> App:
    """Construct one daemon, without starting it.

    Args:
        make_engine: creates the engine of an edge target's model; by default from the model's artifact.
        clock: for tests.
        environ: for systemd's variables.
    """
    clock = clock or system_clock()
    state_dir = Path(config.state_dir) if config.state_dir else None
    engines = EnginePool(make_engine or _engine_maker(config.engine)) if config.engine.enabled else None
    cloud = CloudBackend(config.cloud) if config.cloud.url else None
    record_all = config.decisions.record == "all"
    learned = LearnedEstimators([Path(folder) for folder in config.engine.model_dirs], always_quality=record_all)
    spend = SpendStore(state_dir, clock)
    signals = SignalCollector(clock, spend=spend, edge=engines, cloud=cloud, read_device=DeviceProbes().read)
    admission = Admission(AdmissionLimits())
    metrics = Metrics(lambda: read_gauges(parts))

    def activate(policy: Policy) -> None:
        limits = policy.limits
        admission.set_limits(AdmissionLimits(limits.concurrent, limits.queue, limits.per_client_rps))
        metrics.set_targets(target.name for target in policy.targets)
        service.use(policy)
        if engines is not None:
            engines.use(policy)
            learned.activate(policy)

    policies = PolicyStore(
        Path(config.policy) if config.policy else DEFAULT_POLICY,
        state_dir=state_dir,
        clock=clock,
        on_activate=activate,
        on_load=metrics.policy_loaded,
        model_temperature=_model_temperatures(config.engine),
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
    service = Service(
        admission=admission,
        cache=cache,
        shared_generations=shared_generations,
        attempts=AttemptRunner(_backends(engines, cloud), {"cloud": _cloud_timeouts(config)}, learned.calibrate),
        signals=signals,
        spend=spend,
        decisions=decisions,
        metrics=metrics,
        clock=clock,
        count_tokens=None if engines is None else engines.count,
        estimate_quality=None if engines is None else learned.quality,
        scope=_cache_scope(config.engine),
        default_deadline_s=config.server.default_deadline_s,
        record_all=record_all,
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
        tracing=_tracing(config),
    )
    api = Api(
        service=service,
        reader=RequestReader(config.server),
        policies=policies,
        decisions=decisions,
        metrics=metrics,
        clock=clock,
        readiness=parts.readiness,
        tracing=parts.tracing,
    )
    return App(config, parts, api, SystemdNotifier(environ))


def _backends(engines: EnginePool | None, cloud: CloudBackend | None) -> dict[Location, Backend]:
    backends: dict[Location, Backend] = {}
    if engines is not None:
        backends["edge"] = engines
    if cloud is not None:
        backends["cloud"] = cloud
    return backends


def _tracing(config: Config) -> RequestTracer | None:
    """None unless an OpenTelemetry collector is configured."""
    if not config.tracing.endpoint:
        return None
    # Imported only when needed: OpenTelemetry costs a tenth of a second and some megabytes.
    from .observability.tracing import RequestTracer

    return RequestTracer(config.tracing)


def _cloud_timeouts(config: Config) -> Timeouts:
    return Timeouts(first_token_s=config.cloud.first_token_timeout_s, whole_s=config.cloud.timeout_s)


def _cache_scope(config: EngineConfig) -> bytes:
    """Model hashes and grammar settings: other weights or another grammar may give other answers."""
    try:
        artifacts = list_artifacts([Path(folder) for folder in config.model_dirs])
    except ArtifactError:
        return b""  # the engine reports it
    grammar = "calls" if config.restrict_tool_arguments else ""
    return "\n".join(
        f"{artifact.name} {artifact.manifest.sha256} {grammar if artifact.manifest.answers == 'calls' else ''}"
        for artifact in artifacts
    ).encode()


def _model_temperatures(config: EngineConfig) -> ModelTemperature:
    """The manifests' temperatures, by model; 1 (what the engine uses) for a manifest that names none."""

    def temperature(model: str) -> float | None:
        try:
            manifest = find_artifact(model, [Path(folder) for folder in config.model_dirs]).manifest
        except ArtifactError:
            return None  # the engine reports it
        return OPENAI_TEMPERATURE if manifest.temperature is None else manifest.temperature

    return temperature


def _engine_maker(config: EngineConfig) -> Callable[[str], Engine]:
    """Engines from artifacts: the configured folders are searched first, then the models that ship."""

    def make(model: str) -> Engine:
        # Imported only when needed: a box without an engine need not have its dependencies installed.
        from .backends.engine.backend import EngineBackend

        artifact = find_artifact(model, [Path(folder) for folder in config.model_dirs])
        manifest = artifact.manifest
        return EngineBackend(
            artifact.path,
            config,
            refuse_token=manifest.refuse_token or "",
            temperature=manifest.temperature,
            answer_tokens=manifest.answer_tokens,
            answers=manifest.answers,
            name=artifact.name,
        )

    return make
