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

from models.spec import ArtifactError, find_artifact, list_artifacts
from router.policy import Policy
from router.types import Place

from .admission import Admission, AdmissionLimits
from .api import Api
from .attempts import Attempts, Patience
from .backend import Backend
from .cache import AnswerCache
from .clock import Clock, system_clock
from .cloud import CloudBackend
from .config import Config, EngineConfig
from .decisions import DecisionStore
from .engines import Engine, Engines
from .estimates import Learned
from .flight import Flights
from .intake import Intake
from .life import App
from .metrics import Metrics
from .notify import Notifier
from .policies import DEFAULT_POLICY, PolicyStore
from .probes import Probes
from .readings import Parts, readings
from .service import Service
from .signals import Signals
from .traced import Tracing

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
    engines = Engines(make_engine or _engine_maker(config.engine)) if config.engine.enabled else None
    cloud = CloudBackend(config.cloud) if config.cloud.url else None
    learned = Learned([Path(folder) for folder in config.engine.model_dirs])
    signals = Signals(clock, edge=engines, cloud=cloud, read_device=Probes().read, state_dir=state_dir)
    admission = Admission(AdmissionLimits())
    metrics = Metrics(lambda: readings(parts))

    def activate(policy: Policy) -> None:
        limits = policy.limits
        admission.set_limits(AdmissionLimits(limits.concurrent, limits.queue, limits.per_client_rps))
        metrics.set_targets(target.name for target in policy.targets)
        if engines is not None:
            engines.use(policy)
            learned.use(policy)

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
        memory_count=config.decisions.memory_count,
        max_age_s=config.decisions.max_age_s,
        directory=state_dir,
        clock=clock,
    )
    flights = Flights()
    service = Service(
        policies=policies,
        admission=admission,
        cache=cache,
        flights=flights,
        attempts=Attempts(_backends(engines, cloud), {"cloud": _cloud_patience(config)}, learned.weighed),
        signals=signals,
        decisions=decisions,
        metrics=metrics,
        clock=clock,
        count=None if engines is None else engines.count,
        judge=None if engines is None else learned.quality,
        scope=_models(config.engine),
        deadline_s=config.server.default_deadline_s,
    )
    parts = Parts(
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
        intake=Intake(config.server),
        policies=policies,
        decisions=decisions,
        metrics=metrics,
        clock=clock,
        readiness=parts.readiness,
        tracing=parts.tracing,
    )
    return App(config, parts, api, Notifier(environ))


def _backends(engines: Engines | None, cloud: CloudBackend | None) -> dict[Place, Backend]:
    backends: dict[Place, Backend] = {}
    if engines is not None:
        backends["edge"] = engines
    if cloud is not None:
        backends["cloud"] = cloud
    return backends


def _tracing(config: Config) -> Tracing | None:
    """None without a collector."""
    if not config.tracing.endpoint:
        return None
    # Not before it is wanted: OpenTelemetry is a tenth of a second and some megabytes.
    from .tracing import Tracing as OpenTelemetry

    return OpenTelemetry(config.tracing)


def _cloud_patience(config: Config) -> Patience:
    return Patience(first_token_s=config.cloud.first_token_timeout_s, whole_s=config.cloud.timeout_s)


def _models(config: EngineConfig) -> bytes:
    """Which models there are, by content, and what holds their answers: under other weights or another grammar an
    answer may be another one.
    """
    try:
        known = list_artifacts([Path(folder) for folder in config.model_dirs])
    except ArtifactError:
        return b""  # the engine will say so
    held = "calls" if config.call_grammar else ""
    return "\n".join(
        f"{artifact.name} {artifact.manifest.sha256} {held if artifact.manifest.answers == 'calls' else ''}"
        for artifact in known
    ).encode()


def _engine_maker(config: EngineConfig) -> Callable[[str], Engine]:
    """Engines from artifacts: the folders of the configuration first, then the models that ship."""

    def make(model: str) -> Engine:
        # Not before an engine is wanted: a box without one need not have the parts that it is made of.
        from .engine import EngineBackend

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
