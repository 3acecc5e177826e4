"""Bring a bundle onto this box and try it, without a change to what runs: the states FETCH, VERIFY, DRY RUN, STAGE."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from router.bundle.manifest import Blob, BundleManifest, BundleModel
from router.bundle.refusals import DiskFull

from ..clock import Clock
from .disk import Disk
from .host import Host
from .inspection import BundleReport, BundleRequest, Inspector, ModelFile
from .source import Download, DownloadBounds, Source
from .store import BundleStore, InstalledBundle

log = logging.getLogger(__name__)

_SPARE_BYTES = 64 * 1024 * 1024  # of free disk that an update must leave
_REPLAYED_S = 86400.0


class Preparation:
    """The steps before a change.

    Args:
        folder: STATE_DIR/fleet.
        store: The bundles on this box.
        source: The source of updates.
        host: The daemon.
        inspector: Runs the bundle's cases, by default in a child process.
        clock: Wall and monotonic time.
        disk: The file operations.
        bounds: Limits of the download.
    """

    def __init__(
        self,
        *,
        folder: Path,
        store: BundleStore,
        source: Source,
        host: Host,
        inspector: Inspector,
        clock: Clock,
        disk: Disk,
        bounds: DownloadBounds,
    ) -> None:
        self._folder = folder
        self._store = store
        self._source = source
        self._host = host
        self._inspector = inspector
        self._clock = clock
        self._disk = disk
        self._bounds = bounds

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
        download = Download(self._source, self._disk, self._bounds, self._clock.monotonic)
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
