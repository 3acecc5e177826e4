"""Components that only some devices have: an engine, encoders, jobs, audio, shadow requests, a broker, traces, a fleet.

Each function imports its component, so that a device without it needs neither its packages nor its memory.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from causeway_server.models.catalog.artifact import Artifact, ArtifactError, find_artifact, list_artifacts
from causeway_server.models.parts.installed import find_encoders, find_speech_detector
from causeway_server.router.errors import ConfigError
from causeway_server.router.policy.signals import OPENAI_TEMPERATURE
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.serving.stored.ports import SettleResponse
from causeway_server.router.types import Modality, Transcripts

from .. import daemon_version
from ..backends.engine.engines import Engine
from ..clock import Clock
from ..config.schema import Config, DeviceIdentityConfig, EngineConfig, OutboxConfig
from ..http.api import Caller, RequestReader, issued_caller, new_decision_id
from ..jobs.lazy_jobs import JobParts, LazyJobs
from ..observability.metrics import Metrics
from ..serving.service import Service
from ..signals.estimators import LearnedEstimators
from ..storage.state_folder import FLEET_FOLDER, StateFolderLock

if TYPE_CHECKING:
    from causeway_server.models.parts.process.messages import WorkerSpec
    from causeway_server.router.serving.egress.ledger import EgressLedger
    from causeway_server.router.serving.issuers.tokens import IssuerTokens

    from ..agent.journal import BootState
    from ..agent.link.connection import FleetConnection
    from ..backends.cloud.backend import CloudCredentials
    from ..mqtt.bridge import MqttBridge
    from ..observability.tracing import RequestTracer
    from ..parts.audio import AudioApi, AudioService
    from ..serving.part_encoders import PartEncoders
    from ..signals.shadow import ShadowObserver
    from ..storage.shadow import ShadowStore
    from .components import Backends, Serving


def boot_bundle(config: Config, state_folder: StateFolderLock, clock: Clock) -> tuple[BootState | None, Config]:
    """Return the bundle to start with, None on a device that was never in a fleet, and the configuration under it.
    Raises ConfigError if another daemon uses the state folder.
    """
    state_dir = state_folder.folder
    if state_dir is None or not (state_dir / FLEET_FOLDER).is_dir():
        return None, config
    state_folder.acquire()  # before this start is counted; the lifecycle releases it
    from ..agent.journal import boot
    from .fleet import with_bundle

    booted = boot(state_dir / FLEET_FOLDER, daemon_version(), clock.unix())
    return booted, with_bundle(config, booted.bundle)


def connect_fleet(
    config: Config, state_dir: Path | None, clock: Clock, metrics: Metrics, keys: StateKeys | None
) -> tuple[FleetConnection | None, str, CloudCredentials | None]:
    """Return the connection of a device that joined a fleet, its problem, and its token for each cloud."""
    if state_dir is None or not (state_dir / FLEET_FOLDER).is_dir():
        return None, "", None
    from .fleet import connect, credentials

    connection, problem = connect(state_dir / FLEET_FOLDER, config.fleet, clock, metrics.traffic, keys)
    return connection, problem, partial(credentials, connection)


def make_issuers(config: DeviceIdentityConfig, state_dir: Path | None, clock: Clock) -> IssuerTokens[Caller] | None:
    """Construct the verifier of issuers' tokens; None if none are configured. Raises ConfigError."""
    if not config.issuers:
        return None
    from causeway_server.router.serving.issuers.tokens import IssuerTokens

    folder = None if state_dir is None else state_dir / "issuers"
    return IssuerTokens(config.issuers, issued_caller, folder, skew_s=config.clock_skew_s, wall_clock=clock.unix)


def make_engine_factory(
    config: EngineConfig, model_dirs: Sequence[Path], keys: StateKeys | None
) -> Callable[[str], Engine]:
    """Return the factory of engines from artifacts: `model_dirs` are searched first, then the models that ship."""

    def make(model: str) -> Engine:
        from causeway_server.models.llama_cpp.protocol import adapter_files

        from ..backends.engine.backend import EngineBackend, EngineModel

        artifact = find_artifact(model, model_dirs)
        manifest = artifact.manifest
        described = EngineModel(
            name=artifact.name,
            weights_sha256=manifest.sha256,
            refuse_token=manifest.refuse_token or "",
            temperature=manifest.temperature,
            answer_tokens=manifest.answer_tokens,
            answers=manifest.answers,
            adapters=adapter_files(artifact),
        )
        prompts, key = None, b""
        if keys is not None and config.stored_prompts_bytes:
            prompts, key = keys.folder / "prompts" / artifact.name, keys.derive("prompts")
        return EngineBackend(artifact.path, config, described, prompt_folder=prompts, prompt_key=key)

    return make


def make_part_encoders(
    config: Config,
    model_dirs: Sequence[Path],
    clock: Clock,
    specs: Mapping[Modality, WorkerSpec] | None,
    detector: WorkerSpec | None,
) -> PartEncoders | None:
    """Return the encoders of audio and images; None if this device has none, or its configuration forbids them."""
    if specs is None:
        specs = find_encoders(model_dirs)
        detector = find_speech_detector()
    if not specs or not config.parts.enabled:
        return None
    from causeway_server.models.catalog.projector import find_projector

    from ..serving.part_encoders import PartEncoders

    return PartEncoders(
        specs,
        config.parts,
        clock,
        Manifests(model_dirs).transcripts,
        lambda model: find_projector(model, model_dirs) if config.engine.enabled else None,
        detector,
    )


def make_audio(
    config: Config,
    environ: Mapping[str, str],
    model_dirs: Sequence[Path],
    backends: Backends,
    serving: Serving,
    reader: RequestReader,
) -> tuple[AudioService, AudioApi]:
    """Return the service of `/v1/audio/*` and the audio of live sessions."""
    from ..parts.audio import AudioApi, AudioService
    from ..parts.speaker import Speaker, Voices

    policies, records = serving.policies, serving.records
    audio = AudioService(
        None if backends.encoders is None else backends.encoders.graph,
        Speaker(environ, Voices(model_dirs), config.parts.voice),
        admission=serving.admission,
        records=records,
        signals=backends.signals,
        policy=lambda: policies.active,
        default_deadline_s=config.server.default_deadline_s,
    )
    return audio, AudioApi(audio, reader, records.clock, policy=lambda: policies.active, new_id=new_decision_id)


def make_jobs(
    folder: Path,
    keys: StateKeys | None,
    config: OutboxConfig,
    backends: Backends,
    serving: Serving,
    reader: RequestReader,
    settle: SettleResponse,
) -> JobParts:
    """Return the outbox of jobs in the state folder, with its runner. `settle`: stores the ends of responses' jobs."""
    from causeway_server.router.serving.webhooks import WebhookSender

    from ..jobs.api import JobIntake, OutboxApi
    from ..jobs.runner import OutboxRunner
    from ..jobs.store import JobOutbox
    from ..jobs.webhooks import CloudCanceller, ReceiverQueue, trusted_authorities

    clouds, service, clock = backends.clouds, serving.service, serving.records.clock
    store = JobOutbox(folder, config, clock, keys=keys)
    rng = random.Random(os.urandom(16))
    runner = OutboxRunner(store, service, clouds, config, clock, new_decision_id, rng)
    runner.settle = settle
    intake = JobIntake(config, store, runner, service, reader)
    api = OutboxApi(store, runner, intake, service, reader)
    rng = random.Random(os.urandom(16))
    webhooks = ReceiverQueue(store, config.webhooks, clock, rng)
    tls = trusted_authorities(config.webhooks.ca_file)
    sender = WebhookSender(webhooks, config.webhooks, change=runner.feed.change, tls=tls, rng=rng.random)
    return JobParts(store, runner, intake, api, webhooks, sender, CloudCanceller(store, clouds, runner.feed))


def make_shadow(
    state_dir: Path | None, clock: Clock, learned: LearnedEstimators, model_dirs: Sequence[Path], keys: StateKeys | None
) -> tuple[ShadowStore, ShadowObserver]:
    from ..signals.shadow import ShadowObserver
    from ..storage.shadow import ShadowStore

    weights = Manifests(model_dirs).weights
    return ShadowStore(state_dir, clock, keys), ShadowObserver(learned, model_dirs, weights, state_dir, clock.unix)


def make_mqtt_bridge(config: Config, jobs: LazyJobs, service: Service, metrics: Metrics) -> MqttBridge | None:
    """Return the bridge to the configured broker. Raises ConfigError."""
    if not config.mqtt.url:
        return None
    if not config.state_dir:
        raise ConfigError("MQTT requires a state folder. Set state_dir.", where="mqtt.url")
    try:
        from ..mqtt.bridge import MqttBridge
    except ModuleNotFoundError as error:
        message = "needs the extra `mqtt`: run `make setup`, or `pip install 'causeway-router[mqtt]'`"
        raise ConfigError(message, where="mqtt.url") from error
    return MqttBridge(config.mqtt, jobs, service, metrics, random.Random(os.urandom(16)))


def make_tracer(config: Config) -> RequestTracer | None:
    """Return the tracer of requests. Imported on demand: OpenTelemetry takes a tenth of a second and some megabytes."""
    if not config.tracing.endpoint:
        return None
    from ..observability.tracing import RequestTracer

    return RequestTracer(config.tracing)


def make_egress_ledger(config: Config, state_dir: Path | None) -> EgressLedger | None:
    """Return the ledger of what leaves for clouds, signed by the device's key if it joined a fleet."""
    if not config.egress_ledger.enabled or state_dir is None or not config.clouds:
        return None
    from causeway_server.router.serving.egress.ledger import FOLDER, EgressLedger

    folder, key_file, name = state_dir / FOLDER, state_dir / FOLDER / "ledger.key", ""
    if (state_dir / FLEET_FOLDER).is_dir():
        from ..agent.link.identity import KEY, read_identity

        if (identity := read_identity(state_dir / FLEET_FOLDER)) is not None:
            key_file, name = state_dir / FLEET_FOLDER / KEY, identity.device
    return EgressLedger(folder, "device", config.egress_ledger, key_file, name)


class Manifests:
    """The manifests of this device's models, read at each use: a fleet's bundle may bring other models. The engine
    reports missing ones. `model_dirs`: folders that are searched before the models that ship.
    """

    def __init__(self, model_dirs: Sequence[Path]) -> None:
        self._model_dirs = model_dirs

    def cache_scope(self, config: EngineConfig) -> bytes:
        """Return model hashes and settings for the cache key: other weights, grammar or KV type answer otherwise."""
        try:
            artifacts = list_artifacts(self._model_dirs)
        except ArtifactError:
            return b""
        grammar = "calls" if config.restrict_tool_arguments else ""
        models = [f"{one.name} {one.version} {grammar if one.manifest.has_calls else ''}" for one in artifacts]
        return "\n".join(models).encode() + config.kv_type.encode()

    def temperature(self, model: str) -> float | None:
        """Return the temperature of MODEL or MODEL+ADAPTER, by default 1 (the engine's default), and 0 for calls of an
        adapter; None if the model is missing.
        """
        model, _, adapter = model.partition("+")
        if (artifact := self._find(model)) is None:
            return None
        if adapter in artifact.manifest.adapters and artifact.manifest.adapters[adapter].answers == "calls":
            return 0.0
        return OPENAI_TEMPERATURE if artifact.manifest.temperature is None else artifact.manifest.temperature

    def transcripts(self, model: str) -> Transcripts:
        """Return the form in which a model reads transcripts."""
        return "written" if (artifact := self._find(model)) is None else artifact.manifest.transcripts

    def adapters(self, model: str) -> Sequence[str] | None:
        """Return the names of a model's adapters; None if the model is missing."""
        return None if (artifact := self._find(model)) is None else tuple(artifact.manifest.adapters)

    def weights(self, model: str) -> str:
        """Return the hash of a model's weights and its other files; "" if the model is missing."""
        return "" if (artifact := self._find(model)) is None else artifact.version

    def _find(self, model: str) -> Artifact | None:
        try:
            return find_artifact(model, self._model_dirs)
        except ArtifactError:
            return None
