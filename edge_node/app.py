"""The composition root: everything is made and wired here, and nowhere else.

    app = build(config)
    await app.start()      # listens; engines still load in the background
    await app.drain()      # nobody new; those inside finish, for at most `server.drain_s`
    await app.close()      # nothing is left: no task, no child, no socket file

or `await app.serve()`, which does the three and ends with SIGTERM or SIGINT (a SIGINT while it drains does not wait).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from models.catalog.artifact import ArtifactError, find_artifact, list_artifacts
from router.policy.compiled import Policy
from router.types import Location

from .backends.backend import Backend
from .backends.cloud.backend import CloudBackend
from .backends.engine.pool import Engine, EnginePool
from .clock import Clock, system_clock
from .config.schema import Config, EngineConfig
from .daemon.components import Components, read_gauges
from .daemon.lifecycle import App
from .daemon.systemd import SystemdNotifier
from .http.api import Api
from .http.request_reader import RequestReader
from .observability.metrics import Metrics
from .serving.admission import Admission, AdmissionLimits
from .serving.attempts import AttemptRunner, Timeouts
from .serving.service import Service
from .serving.shared_generation import SharedGenerations
from .signals.collector import SignalCollector
from .signals.estimators import LearnedEstimators
from .signals.probes.device import DeviceProbes
from .storage.cache import AnswerCache
from .storage.decisions import DecisionStore
from .storage.policies import DEFAULT_POLICY, PolicyStore

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
    """Everything of one daemon, not started. `make_engine` gives the engine for an edge target's model."""
    clock = clock or system_clock()
    state_dir = Path(config.state_dir) if config.state_dir else None
    engines = EnginePool(make_engine or _engine_maker(config.engine)) if config.engine.enabled else None
    cloud = CloudBackend(config.cloud) if config.cloud.url else None
    learned = LearnedEstimators([Path(folder) for folder in config.engine.model_dirs])
    signals = SignalCollector(clock, edge=engines, cloud=cloud, read_device=DeviceProbes().read, state_dir=state_dir)
    admission = Admission(AdmissionLimits())
    metrics = Metrics(lambda: read_gauges(parts))

    def activate(policy: Policy) -> None:
        limits = policy.limits
        admission.set_limits(AdmissionLimits(limits.concurrent, limits.queue, limits.per_client_rps))
        metrics.set_targets(target.name for target in policy.targets)
        if engines is not None:
            engines.use(policy)
            learned.activate(policy)

    policies = PolicyStore(
        Path(config.policy) if config.policy else DEFAULT_POLICY,
        state_dir=state_dir,
        clock=clock,
        on_activate=activate,
        on_load=metrics.policy_loaded,
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
    flights = SharedGenerations()
    service = Service(
        policies=policies,
        admission=admission,
        cache=cache,
        flights=flights,
        attempts=AttemptRunner(_backends(engines, cloud), {"cloud": _cloud_patience(config)}, learned.calibrate),
        signals=signals,
        decisions=decisions,
        metrics=metrics,
        clock=clock,
        count=None if engines is None else engines.count,
        judge=None if engines is None else learned.quality,
        scope=_models(config.engine),
        deadline_s=config.server.default_deadline_s,
    )
    parts = Components(
        started=clock.monotonic(),
        clock=clock,
        policies=policies,
        admission=admission,
        cache=cache,
        decisions=decisions,
        flights=flights,
        signals=signals,
        metrics=metrics,
        service=service,
        engines=engines,
        cloud=cloud,
        tracing=_tracing(config),
    )
    api = Api(
        service=service,
        intake=RequestReader(config.server),
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
    """None without a collector."""
    if not config.tracing.endpoint:
        return None
    # Not before it is wanted: OpenTelemetry is a tenth of a second and some megabytes.
    from .observability.tracing import RequestTracer

    return RequestTracer(config.tracing)


def _cloud_patience(config: Config) -> Timeouts:
    return Timeouts(first_token_s=config.cloud.first_token_timeout_s, whole_s=config.cloud.timeout_s)


def _models(config: EngineConfig) -> bytes:
    """Which models there are, by content, and what holds their answers: under other weights or another grammar an
    answer may be another one.
    """
    try:
        known = list_artifacts([Path(folder) for folder in config.model_dirs])
    except ArtifactError:
        return b""  # the engine will say so
    held = "calls" if config.restrict_tool_arguments else ""
    return "\n".join(
        f"{artifact.name} {artifact.manifest.sha256} {held if artifact.manifest.answers == 'calls' else ''}"
        for artifact in known
    ).encode()


def _engine_maker(config: EngineConfig) -> Callable[[str], Engine]:
    """Engines from artifacts: the folders of the configuration first, then the models that ship."""

    def make(model: str) -> Engine:
        # Not before an engine is wanted: a box without one need not have the parts that it is made of.
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
