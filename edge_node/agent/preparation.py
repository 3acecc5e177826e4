"""The steps before a change: look at what the fleet publishes, bring a bundle onto the box, try it (FETCH to STAGE)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from pathlib import Path

from router.bundle.manifest import Blob, BundleManifest, BundleModel, RolloutPlan
from router.bundle.refusals import DiskFull

from ..clock import Clock
from .disk import Disk
from .host import FleetLink, Host
from .inspection import BundleReport, BundleRequest, Inspector, LookRequest, ModelFile
from .journal import Booted
from .source import Download
from .store import InstalledBundle

log = logging.getLogger(__name__)

_SPARE_BYTES = 64 * 1024 * 1024  # of free disk that an update must leave
_REPLAYED_S = 86400.0


class Preparation:
    """What the fleet publishes, read through the inspector, which verifies it; and the steps before a change.

    Args:
        folder: STATE_DIR/fleet.
        booted: The bundle that the daemon started with, and the bundles on this box.
        link: The box's fleet.
        host: The daemon, whose version decides which bundles it can read.
        inspector: Verifies what the fleet publishes, and runs a bundle's cases.
        clock: Wall and monotonic time.
        disk: The file operations.

    Attributes:
        wanted: The bundle that the plan assigned at the last look.
        manifest: The manifest of `wanted`, if it is another bundle than the running one.
    """

    def __init__(
        self,
        *,
        folder: Path,
        booted: Booted,
        link: FleetLink,
        host: Host,
        inspector: Inspector,
        clock: Clock,
        disk: Disk,
    ) -> None:
        self._folder = folder
        self._store = booted.store
        self._link = link
        self._host = host
        self._inspector = inspector
        self._clock = clock
        self._disk = disk
        self._looked_at = -math.inf
        self._serials: dict[str, int] = {}
        self.wanted: str | None = None
        self.manifest: BundleManifest | None = None
        self.note(booted.bundle)

    def is_due(self) -> bool:
        """Whether the last look was `check_s` ago, or something may be new."""
        return self._clock.monotonic() - self._looked_at >= self._link.settings.check_s

    def make_due(self) -> None:
        """Something may be new."""
        self._looked_at = -math.inf

    def forget(self) -> None:
        """Drop the manifest: the update has ended."""
        self.manifest = None

    def serial(self, bundle: str | None) -> int | None:
        """Return the serial of a bundle, None for one whose manifest this daemon has not read."""
        return None if bundle is None else self._serials.get(bundle)

    def note(self, bundle: InstalledBundle | None) -> None:
        """Remember the serial of a bundle that was loaded."""
        if bundle is not None:
            self._serials[bundle.id] = bundle.manifest.serial

    async def look(self, running: str | None, known: Iterable[str], not_before: float) -> RolloutPlan | None:
        """Read the plan, and the manifest of the wanted bundle if it is another one.

        Args:
            running: The bundle that the box runs; None: the factory's files.
            known: Other bundles whose manifest is not needed.
            not_before: The least time that it can be, Unix seconds.

        Raises:
            UpdateRefused: What the fleet publishes cannot be used.
        """
        member = self._link.member()
        self._looked_at = self._clock.monotonic()
        looked = await self._inspector.look(
            LookRequest(
                folder=str(self._folder / "tuf"),
                root=member.root.encode(),
                device=member.device,
                cohort=member.cohort,
                running=running,
                known=(*known, *([running] if running else [])),
                daemon_version=self._host.daemon_version,
                not_before=not_before,
            ),
            self._link.source,
        )
        self.wanted = looked.wanted
        if looked.manifest is not None and looked.wanted is not None:
            self.manifest = looked.manifest
            self._serials[looked.wanted] = looked.manifest.serial
        return looked.plan

    async def fetch(self, manifest: BundleManifest, keep: Iterable[str]) -> None:
        """Remove what neither the kept bundles nor this one need, and fetch what is missing.

        Raises:
            UpdateRefused: What was received is kept.
        """
        await asyncio.to_thread(self._store.collect, keep, manifest.blobs)
        missing = await asyncio.to_thread(self._store.missing, manifest.blobs)
        needed = sum(blob.size_bytes for blob in missing) + _SPARE_BYTES
        if missing and self._store.free_bytes() < needed:
            raise DiskFull(f"the update needs {needed} bytes of free disk, there are {self._store.free_bytes()}")
        download = Download(self._link.source, self._disk, self._link.settings.download, self._clock.monotonic)
        for blob in missing:
            await download.fetch(blob, self._store.partial(blob))

    async def verify(self, manifest: BundleManifest) -> None:
        """Hash what was fetched and give it its names.

        Raises:
            BundleAltered: A file has another content; it is removed.
        """
        for blob in manifest.blobs:
            if not self._store.blob(blob).exists():
                await asyncio.to_thread(self._store.accept, blob)

    async def dry_run(self, manifest: BundleManifest) -> BundleReport:
        """Run the cases, check the models' memory and signals, and replay this box's decisions of the last day.

        Raises:
            UpdateRefused: This box cannot run the bundle.
        """
        report = await self._inspector.examine(
            BundleRequest(
                policy=str(self._store.blob(manifest.policy)),
                cases=tuple(str(self._store.blob(case)) for case in manifest.cases),
                models=tuple(self._model_file(model) for model in manifest.models),
                running_policy=str(self._host.policy_file),
                model_dirs=tuple(map(str, self._host.model_dirs)),
                memory_bytes=self._host.memory_bytes,
                state_dir=str(self._folder.parent),
                since=self._clock.unix() - _REPLAYED_S,
            )
        )
        log.info(
            "fleet: %d cases pass; of the last %d decisions %d are unchanged, %d unknown, %d would leave the device",
            report.cases,
            report.replayed,
            report.unchanged,
            report.unknown,
            report.leaving,
        )
        return report

    def _model_file(self, model: BundleModel) -> ModelFile:
        def paths(blobs: Iterable[Blob]) -> tuple[str, ...]:
            return tuple(str(self._store.blob(blob)) for blob in blobs)

        adapters = paths(adapter.blob for adapter in model.adapters)
        projector = () if model.projector is None else paths(model.projector.blobs)
        signals = paths(signal.blob for signal in model.signals)
        return ModelFile(model, str(self._store.blob(model.blob)), adapters, projector, signals)

    async def stage(self, bundle: str, manifest: BundleManifest, report: BundleReport) -> InstalledBundle:
        """Build the bundle's folder, then read and hash all of it.

        Raises:
            UpdateRefused: It is damaged.
        """
        models = {model.name: model for model in report.models}

        def stage() -> InstalledBundle:
            self._store.stage(bundle, manifest, models)
            return self._store.load(bundle)

        return await asyncio.to_thread(stage)
