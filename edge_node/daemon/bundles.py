"""Use a bundle of the fleet in the daemon: a policy and models while it answers, settings by a restart in place.

Settings are read where components are constructed, so another value means a drain and a new start of the program in the
same process; that is simpler than components that change under a request, and a box changes its settings rarely.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio
import msgspec
import psutil

from models.catalog.artifact import Artifact, ArtifactError, find_artifact
from models.catalog.projector import find_projector
from router.bundle.manifest import BundleModel
from router.bundle.refusals import ModelUnusable, PolicyUnusable, UpdateRefused
from router.bundle.settings import SettingValue
from router.errors import CausewayError, PolicyError
from router.policy.compiled import Policy

from ..agent.store import InstalledBundle
from ..backends.backend import Backend
from ..config.schema import Config
from ..observability.traffic import BoxCondition
from ..storage.policies import DEFAULT_POLICY
from ..version import daemon_version
from .components import Components
from .golden import check_golden, golden_pictures

_GOLDEN_TRIES = 3
_LOAD_S = 300.0
_BESIDE_SHARE, _BESIDE_BYTES = 1.2, 256 << 20  # memory of a model beside others: of its file's size, and more

log = logging.getLogger(__name__)


def with_bundle(config: Config, bundle: InstalledBundle | None) -> Config:
    """Return the configuration of a daemon that starts with this bundle; None: the factory's files."""
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
        section, _, name = key.rpartition(".")
        if section:
            part = msgspec.structs.replace(getattr(config, section), **{name: value})
            config = msgspec.structs.replace(config, **{section: part})
        else:
            config = msgspec.structs.replace(config, **{name: value})
    return config


class BundleHost:
    """The daemon as its agent sees it.

    Args:
        parts: The daemon's components.
        config: The configuration without a bundle.
        settings: The settings of the bundle that the daemon started with.
        model_dirs: The folders that models are found in, the bundle's first; changed here and read everywhere.
        restart: Lets the daemon drain and start anew.
    """

    def __init__(
        self,
        parts: Components,
        config: Config,
        settings: Mapping[str, SettingValue],
        model_dirs: list[Path],
        restart: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._config = config
        self._running = with_settings(config, settings)
        self._model_dirs = model_dirs
        self._restart = restart
        # Models and weights that answered their golden prompts before they served.
        self._checked_models: set[tuple[str, str]] = set()

    @property
    def daemon_version(self) -> str:
        return daemon_version()

    @property
    def policy_file(self) -> Path:
        return Path(self._parts.policies.report.file)

    @property
    def model_dirs(self) -> Sequence[Path]:
        return self._model_dirs

    @property
    def memory_bytes(self) -> int:
        return int(psutil.virtual_memory().total)

    def condition(self) -> BoxCondition:
        parts = self._parts
        readiness = parts.readiness()
        traffic = parts.metrics.traffic()
        if parts.engines is not None:
            restarts = sum(count for _, count in parts.engines.restarts())
            traffic = msgspec.structs.replace(traffic, restarts=restarts)
        device = parts.signals.device
        problem = "" if readiness.ready else f"no target can answer: {', '.join(readiness.waiting_for)}"
        return BoxCondition(traffic, problem, device.temperature_c, device.throttled)

    def needs_restart(self, bundle: InstalledBundle | None) -> bool:
        settings = {} if bundle is None else bundle.manifest.settings
        return with_settings(self._config, settings) != self._running

    async def use(self, bundle: InstalledBundle | None, *, must: bool = False) -> None:
        target = with_bundle(self._config, bundle)
        path = Path(target.policy) if target.policy else DEFAULT_POLICY
        before = list(self._model_dirs)
        self._model_dirs[:] = [Path(folder) for folder in target.engine.model_dirs]
        try:
            policy = await asyncio.to_thread(self._parts.policies.check, path)
            try:
                await self._load_models(policy, bundle)
            except UpdateRefused as refusal:
                if not must:
                    raise
                log.error("%s: %s", refusal.code, refusal.message)
            await asyncio.to_thread(_hash_projectors, policy, tuple(self._model_dirs))
            await self._parts.policies.follow(path)
        except BaseException as error:
            self._model_dirs[:] = before
            engines = self._parts.engines
            if engines is not None:
                with anyio.CancelScope(shield=True):
                    await engines.drop_beside()
            if isinstance(error, PolicyError):
                raise PolicyUnusable(error.message) from error
            raise

    async def _load_models(self, policy: Policy, bundle: InstalledBundle | None) -> None:
        """Load the models that are new beside those that answer, where memory allows, and ask them their prompts.

        Raises:
            ModelUnusable, GoldenAnswerDiffers: The policy must not become active.
        """
        engines = self._parts.engines
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
                await self._check_golden(engine, brought)
            self._checked_models.add((model, engines.weights(model)))

    def _fits_beside(self, model: str) -> bool:
        try:
            artifact = find_artifact(model, self._model_dirs)
            need = artifact.path.stat().st_size * _BESIDE_SHARE + _beside_weights(artifact) + _BESIDE_BYTES
        except (ArtifactError, OSError):
            return True  # loading it says what is wrong
        return bool(need < psutil.virtual_memory().available)

    async def check_model(self, model: BundleModel) -> None:
        engines = self._parts.engines
        if engines is None:
            raise ModelUnusable(f"{model.name}: this box runs no models (engine.enabled)")
        if (model.name, engines.weights(model.name)) not in self._checked_models:
            await self._check_golden(engines, model, _GOLDEN_TRIES)

    async def _check_golden(self, engine: Backend, model: BundleModel, tries: int = 1) -> None:
        """Raises GoldenAnswerDiffers, ModelUnusable."""
        async with golden_pictures(model, self._model_dirs, self._running.modalities) as see:
            await check_golden(engine, model, see, tries)

    def restart(self) -> None:
        self._restart()


def _hash_projectors(policy: Policy, model_dirs: Sequence[Path]) -> None:
    """Hash the projectors of the policy's models in this thread: the daemon, which needs them next, remembers."""
    for model in dict.fromkeys(target.model for target in policy.targets if target.at == "edge"):
        with contextlib.suppress(ArtifactError):  # the daemon says so
            find_projector(model, model_dirs)


def _beside_weights(artifact: Artifact) -> int:
    """The bytes of a model's adapters and of its projector. Raises OSError."""
    projector = artifact.manifest.projector
    files = () if projector is None else projector.files
    adapters = sum(one.size_bytes for one in artifact.manifest.adapters.values())
    return adapters + sum((artifact.folder / name).stat().st_size for name in files)
