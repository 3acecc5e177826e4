"""A daemon in a fleet: its connection to the control plane, its agent, and the bundles that it uses.

A bundle changes the policy and models while the daemon answers, and settings by a restart in place. Settings are read
when components are constructed, so another value requires a drain and a restart of the program in the same process;
that is simpler than components that change under a request, and a device changes its settings rarely.

Imported only by a daemon that joined a fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import psutil

from causeway_server.models.catalog.artifact import Artifact, ArtifactError, find_artifact
from causeway_server.models.catalog.projector import find_projector
from causeway_server.models.llama_cpp.protocol import SoftTokens
from causeway_server.router.bundle.manifest import Blob, BundleModel, GoldenPrompt
from causeway_server.router.bundle.refusals import GoldenAnswerDiffers, ModelUnusable, PolicyUnusable, UpdateRefused
from causeway_server.router.bundle.settings import PartsConfig, SettingValue
from causeway_server.router.errors import CausewayError, ConfigError, PolicyError
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.types import Message, Request, Sampling, Target, TextPart

from .. import daemon_version
from ..agent.agent import Agent
from ..agent.interfaces import AgentSettings, FleetLink
from ..agent.journal import BootState
from ..agent.link.connection import AgentReport, FleetConnection
from ..agent.link.control_plane import carries_secrets
from ..agent.link.identity import open_key, read_identity
from ..agent.link.tokens import TokenKeeper
from ..agent.store import InstalledBundle, image_file
from ..agent.trial import TrialSettings
from ..backends.backend import Backend, BackendRequest
from ..clock import Clock
from ..config.schema import CloudConfig, Config, FleetConfig
from ..observability.metrics import DeviceCondition, Traffic
from ..storage.policies import DEFAULT_POLICY
from ..storage.state_folder import FLEET_FOLDER
from .components import Components

log = logging.getLogger(__name__)

_GOLDEN_S = 180.0  # time for one prompt, including the loading of the model
_GOLDEN_TOKENS = 256
_PROBE, _PROBE_TOKENS = "hello", 1  # an adapter is tested by its first request
See = Callable[[Blob], Awaitable[SoftTokens]]
"""Turns an image of a golden prompt into soft tokens of its model. Raises ModelUnusable."""
_GOLDEN_TRIES = 3
_LOAD_S = 300.0
_Section = TypeVar("_Section", bound=msgspec.Struct)
# memory of a model beside others: this multiple of its file's size, plus a constant
_BESIDE_SHARE, _BESIDE_BYTES = 1.2, 256 << 20


def connect(
    folder: Path, config: FleetConfig, clock: Clock, read_traffic: Callable[[], Traffic], keys: StateKeys | None = None
) -> tuple[FleetConnection | None, str]:
    """Return the connection of a device in a fleet, or None, and the problem or "". `folder`: STATE_DIR/fleet. A
    damaged identity does not prevent the daemon's start: it continues with its last bundle.
    """
    try:
        if (identity := read_identity(folder)) is None:
            return None, ""
        return FleetConnection(
            folder,
            identity,
            open_key(folder),
            clock=clock,
            read_traffic=read_traffic,
            telemetry_interval_s=config.telemetry_interval_s,
            records_per_hour=config.records_per_hour,
            keys=keys,
        ), ""
    except (ConfigError, FileNotFoundError) as error:
        problem = f"this device cannot connect to its fleet: {error}"
        log.error(problem)
        return None, problem


def make_agent(
    booted: BootState,
    link: FleetLink | None,
    connection: FleetConnection | None,
    parts: Components,
    *,
    config: FleetConfig,
    factory: Config,
    model_dirs: list[Path],
    restart: Callable[[], None],
) -> Agent:
    """Return the agent of a device in a fleet, whose connection (in tests, `link`) reports its state and wakes it.
    `factory`: the configuration without a bundle.
    """
    if link is None:
        assert connection is not None
        link = _link_of(connection, config)
    settings = {} if booted.bundle is None else booted.bundle.manifest.settings
    agent = Agent(
        folder=Path(factory.state_dir) / FLEET_FOLDER,
        booted=booted,
        link=link,
        host=BundleHost(parts, factory, settings, model_dirs, restart),
        clock=parts.clock,
    )
    if connection is not None:
        connection.follow(partial(_agent_report, agent), agent.wake)
    return agent


def _link_of(connection: FleetConnection, config: FleetConfig) -> FleetLink:
    trial = TrialSettings(
        least_s=config.trial_s, least_requests=config.trial_requests, longest_s=max(config.trial_s, config.trial_max_s)
    )
    return FleetLink(
        member=lambda: connection.identity,
        source=connection.source,
        settings=AgentSettings(check_interval_s=config.check_interval_s, trial=trial),
        may_change=connection.may_change,
        on_change=connection.changed,
    )


def _agent_report(agent: Agent) -> AgentReport:
    row = agent.row
    return AgentReport(
        state=agent.state,
        running=agent.running,
        wanted=agent.wanted,
        rollout=row.rollout,
        code=row.code,
        reason=row.reason[:1000],
        quarantined=tuple(row.quarantined)[-64:],
        unproven=row.unproven,
        since=row.at,
    )


def credentials(connection: FleetConnection | None, cloud: CloudConfig) -> TokenKeeper | None:
    """Return the fleet's token for a cloud; None if it is not meant for it, or if plain HTTP would expose the token."""
    if connection is None or not cloud.fleet_token:
        return None
    if not carries_secrets(cloud.url):
        log.warning(
            "The fleet's token is not sent to clouds.%s.url over plain HTTP. Use https://, or set clouds.%s.key.",
            cloud.name,
            cloud.name,
        )
        return None
    return connection.tokens


async def check_golden(
    engine: Backend, model: BundleModel, model_dirs: Sequence[Path], config: PartsConfig, tries: int = 1
) -> None:
    """Send a model and each of its adapters their golden prompts, each `tries` times, as an engine with other requests
    may break a near tie differently. Raises GoldenAnswerDiffers; ModelUnusable if one does not answer, or an image
    cannot be read.
    """
    async with golden_images(model, model_dirs, config) as see:
        await _check_answers(engine, Target(model.name, "edge", model.name), model.golden, see, tries)
        for adapter in model.adapters:
            target = Target(f"{model.name}+{adapter.name}", "edge", model.name, adapter=adapter.name)
            if not adapter.golden:
                await golden_answer(engine, target, _PROBE, max_tokens=_PROBE_TOKENS)
            await _check_answers(engine, target, adapter.golden, see, tries)


async def _check_answers(
    engine: Backend, target: Target, prompts: Sequence[GoldenPrompt], see: See, tries: int
) -> None:
    for golden in prompts:
        soft = None if golden.image is None else await see(golden.image)
        answers: list[str] = []
        while golden.answer not in answers:
            if len(answers) == tries:
                raise GoldenAnswerDiffers(
                    f"{target.name} answers the golden prompt {golden.prompt[:80]!r} with {answers[-1][:80]!r} "
                    f"instead of {golden.answer[:80]!r}."
                )
            answers.append(await golden_answer(engine, target, golden.prompt, soft))


async def golden_answer(
    engine: Backend, target: Target, prompt: str, soft: SoftTokens | None = None, max_tokens: int = _GOLDEN_TOKENS
) -> str:
    """Return the answer of a target to a golden prompt, `soft` tokens of an image after it. Raises ModelUnusable."""
    content = prompt if soft is None else (TextPart(prompt), TextPart(soft.text))
    request = Request(
        kind="chat",
        model=target.name,
        messages=(Message("user", content),),
        sampling=Sampling(temperature=0.0),
        max_tokens=max_tokens,
    )
    deadline = asyncio.get_running_loop().time() + _GOLDEN_S
    images = () if soft is None else (soft,)
    call = BackendRequest(id="golden", request=request, target=target, deadline=deadline, soft=images)
    try:
        return "".join([chunk.text async for chunk in engine.generate(call) if chunk.index == 0])
    except CausewayError as error:
        raise ModelUnusable(f"{target.name}: {error.message}") from error


@asynccontextmanager
async def golden_images(model: BundleModel, model_dirs: Sequence[Path], config: PartsConfig) -> AsyncIterator[See]:
    """Yield the function that reads the images of a model's golden prompts. It has its own processes, as requests may
    still use the previous bundle's projector; without images it needs none. Raises ModelUnusable.
    """
    if not model.images:
        yield _no_image
        return
    if not config.enabled:
        raise ModelUnusable(
            f"{model.name}: a golden prompt has an image, but this device reads no images (parts.enabled)."
        )
    # Imported only if a bundle needs it.
    from causeway_server.models.parts.installed import DECODER
    from causeway_server.models.parts.process.messages import PartLimits, Refusal, WorkerSpec
    from causeway_server.models.parts.process.parent import WorkerFailed, WorkerProcess

    from ..serving.part_encoders import Projectors

    limits = PartLimits(config.max_audio_s, config.max_pixels, config.max_text_bytes)
    decoder = WorkerProcess(WorkerSpec(DECODER, limits, memory_bytes=config.decoder_memory_bytes))
    try:
        folder = find_artifact(model.name, model_dirs).folder
        projector = await asyncio.to_thread(find_projector, model.name, tuple(model_dirs))
    except ArtifactError as error:
        raise ModelUnusable(f"{model.name}: {error}") from error
    projectors = Projectors(lambda _: projector, decoder, remembered=1, timeout_s=_GOLDEN_S)
    projectors.kinds(model.name)

    async def see(image: Blob) -> SoftTokens:
        deadline = asyncio.get_running_loop().time() + _GOLDEN_S
        try:
            content = await asyncio.to_thread((folder / image_file(image)).read_bytes)
            return await projectors.run(model.name, content, image.sha256, deadline)
        except (OSError, Refusal, WorkerFailed) as error:
            raise ModelUnusable(
                f"{model.name}: the image {image.sha256[:12]} of a golden prompt cannot be read: {error}"
            ) from error

    try:
        yield see
    finally:
        await projectors.close()
        await decoder.close()


async def _no_image(image: Blob) -> SoftTokens:
    raise ModelUnusable(f"No projector on this device reads the image {image.sha256[:12]} of a golden prompt.")


def with_bundle(config: Config, bundle: InstalledBundle | None) -> Config:
    """Return the configuration of a daemon that starts with this bundle; None stands for the factory files."""
    if bundle is None:
        return config
    config = with_settings(config, bundle.manifest.settings)
    dirs = (str(bundle.models), *config.engine.model_dirs)
    return msgspec.structs.replace(
        config, policy=str(bundle.policy), engine=msgspec.structs.replace(config.engine, model_dirs=dirs)
    )


def with_settings(config: Config, settings: Mapping[str, SettingValue]) -> Config:
    """Return the configuration with these values, by dotted key; the bundle's manifest has checked them."""
    for key, value in settings.items():
        config = _with_value(config, key, value)
    return config


def _with_value(section: _Section, key: str, value: SettingValue) -> _Section:
    name, _, below = key.partition(".")
    return msgspec.structs.replace(
        section, **{name: _with_value(getattr(section, name), below, value) if below else value}
    )


@dataclass(eq=False, repr=False)  # the configuration may contain a key
class BundleHost:
    """The daemon as its agent sees it. `model_dirs`, the bundle's folder first, is changed here and read everywhere."""

    parts: Components
    config: Config  # the configuration without a bundle
    settings: Mapping[str, SettingValue]  # the settings of the bundle that the daemon started with
    model_dirs: list[Path]
    restart: Callable[[], None]  # function that makes the daemon drain and restart

    def __post_init__(self) -> None:
        self._running = with_settings(self.config, self.settings)
        self.daemon_version = daemon_version()
        # Models and weights that have passed their golden prompts.
        self._checked_models: set[tuple[str, str]] = set()

    @property
    def policy_file(self) -> Path:
        return Path(self.parts.policies.report.file)

    @property
    def memory_bytes(self) -> int:
        return int(psutil.virtual_memory().total)

    def condition(self) -> DeviceCondition:
        parts = self.parts
        readiness = parts.readiness()
        traffic = parts.metrics.traffic()
        if parts.engines is not None:
            restarts = sum(count for _, count in parts.engines.restarts())
            traffic = msgspec.structs.replace(traffic, restarts=restarts)
        device = parts.signals.device
        problem = "" if readiness.ready else f"no target can answer: {', '.join(readiness.waiting_for)}"
        return DeviceCondition(traffic, problem, device.temperature_c, device.throttled)

    def needs_restart(self, bundle: InstalledBundle | None) -> bool:
        settings = {} if bundle is None else bundle.manifest.settings
        return with_settings(self.config, settings) != self._running

    async def use(self, bundle: InstalledBundle | None, *, must: bool = False) -> None:
        target = with_bundle(self.config, bundle)
        path = Path(target.policy) if target.policy else DEFAULT_POLICY
        before = list(self.model_dirs)
        self.model_dirs[:] = [Path(folder) for folder in target.engine.model_dirs]
        try:
            policy = await asyncio.to_thread(self.parts.policies.check, path)
            try:
                await self._load_models(policy, bundle)
            except UpdateRefused as refusal:
                if not must:
                    raise
                log.error("%s: %s", refusal.code, refusal.message)
            await asyncio.to_thread(_hash_projectors, policy, tuple(self.model_dirs))
            await self.parts.policies.follow(path)
        except BaseException as error:
            self.model_dirs[:] = before
            engines = self.parts.engines
            if engines is not None:
                with anyio.CancelScope(shield=True):
                    await engines.drop_beside()
            if isinstance(error, PolicyError):
                raise PolicyUnusable(error.message) from error
            raise

    async def _load_models(self, policy: Policy, bundle: InstalledBundle | None) -> None:
        """Load the new models beside the running ones if memory allows, and check their golden prompts."""
        engines = self.parts.engines
        if engines is None:
            return
        models = {} if bundle is None else {model.name: model for model in bundle.manifest.models}
        for model in dict.fromkeys(target.model for target in policy.targets if target.at == "edge"):
            if not engines.is_changed(model) or not self._fits_beside(model):
                continue
            deadline = asyncio.get_running_loop().time() + _LOAD_S
            try:
                engine = await engines.load_beside(model, deadline)
            except (ArtifactError, CausewayError) as error:
                raise ModelUnusable(f"{model}: {error}") from error
            if (brought := models.get(model)) is not None:
                await check_golden(engine, brought, self.model_dirs, self._running.parts)
            self._checked_models.add((model, engines.weights(model)))

    def _fits_beside(self, model: str) -> bool:
        try:
            artifact = find_artifact(model, self.model_dirs)
            need = artifact.path.stat().st_size * _BESIDE_SHARE + _beside_weights(artifact) + _BESIDE_BYTES
        except (ArtifactError, OSError):
            return True  # loading it reports the error
        return bool(need < psutil.virtual_memory().available)

    async def check_model(self, model: BundleModel) -> None:
        engines = self.parts.engines
        if engines is None:
            raise ModelUnusable(f"{model.name}: this device runs no models (engine.enabled).")
        if (model.name, engines.weights(model.name)) not in self._checked_models:
            await check_golden(engines, model, self.model_dirs, self._running.parts, _GOLDEN_TRIES)


def _hash_projectors(policy: Policy, model_dirs: Sequence[Path]) -> None:
    """Hash the projectors of the policy's models in this thread, so that the daemon finds the hashes in its cache."""
    for model in dict.fromkeys(target.model for target in policy.targets if target.at == "edge"):
        with contextlib.suppress(ArtifactError):  # the daemon reports the error
            find_projector(model, model_dirs)


def _beside_weights(artifact: Artifact) -> int:
    """Return the bytes of a model's adapters and of its projector. Raises OSError."""
    projector = artifact.manifest.projector
    adapters = sum(one.size_bytes for one in artifact.manifest.adapters.values())
    return adapters + (0 if projector is None else (artifact.folder / projector.file).stat().st_size)
