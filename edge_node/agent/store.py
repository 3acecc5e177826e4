"""The bundles on this device: files by their content, shared between bundles, and a pointer to the running bundle.

    blobs/SHA256           a policy, a case file, a model, an adapter or a projector; SHA256.partial while it is fetched
    bundles/ID/            manifest.json, and models/NAME/ as the engine reads it, with links into blobs; a signal about
                           the model's answers has a folder NAME+KIND of its own
    active.json            the pointer: the running bundle, then those to return to; the factory files come last

Every file is complete and synced before it gets its name. Content is hashed again when a bundle is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from causeway_server.models.catalog.artifact import (
    MANIFEST,
    MMPROJ_FILE,
    ArtifactError,
    Manifest,
    adapter_file,
    load_artifact,
    sha256_of,
)
from causeway_server.router.bundle.manifest import (
    Blob,
    BundleManifest,
    BundleModel,
    BundleSignal,
    decode_installed,
    encode_canonical,
    read_manifest,
)
from causeway_server.router.bundle.refusals import BundleAltered
from causeway_server.router.errors import ConfigError
from causeway_server.router.migrate.rewrite import rewrite
from causeway_server.router.renames import image_file_before
from causeway_server.router.serving.folders import sync

log = logging.getLogger(__name__)

POINTER = "active.json"
_WEIGHTS = "model.gguf"
_POLICY = "policy.yaml"
_PARTIAL = ".partial"


class Disk:
    """The kernel's file operations; a test can end the process before each of the seven. Synced content survives a
    power cut; unsynced content may survive it, in any order.
    """

    # --- operations --------------------------------------------------------------------------------------------------

    def create(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)

    def append(self, path: Path, content: bytes) -> None:
        with path.open("ab") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        sync(path)

    def sync_folder(self, path: Path) -> None:
        sync(path)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def link(self, path: Path, target: str) -> None:
        """Make a symbolic link at `path`."""
        path.symlink_to(target)

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def remove(self, path: Path) -> None:
        """Remove a file or a whole folder, if it exists."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    # --- made of them ------------------------------------------------------------------------------------------------

    def replace_synced(self, path: Path, content: bytes) -> None:
        """Replace a file atomically: after a crash it has either the old content or the new."""
        partial = path.with_name(f"{path.name}.partial")
        self.create(partial, content)
        self.publish(partial, path)

    def publish(self, partial: Path, path: Path) -> None:
        """Give a complete file its final name."""
        self.sync(partial)
        self.rename(partial, path)
        self.sync_folder(path.parent)

    def append_synced(self, path: Path, content: bytes) -> None:
        is_new = not path.exists()
        self.append(path, content)
        self.sync(path)
        if is_new:
            self.sync_folder(path.parent)

    def make_folders(self, path: Path) -> None:
        """Create a folder and its missing parents, each synced."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        self.make_folder(path)
        self.sync_folder(path.parent)


class InstalledBundle(msgspec.Struct, frozen=True):
    """A bundle whose files were verified on this device's disk."""

    id: str
    manifest: BundleManifest
    policy: Path
    models: Path  # folder of artifacts, for `engine.model_dirs`


class _Pointer(msgspec.Struct, frozen=True):
    bundles: tuple[str, ...]


class BundleStore:
    """The store in `folder`, STATE_DIR/fleet. A bundle that needs a newer daemon than this cannot be loaded."""

    def __init__(self, folder: Path, disk: Disk, daemon_version: str) -> None:
        self._folder = folder
        self._disk = disk
        self._daemon_version = daemon_version
        self._blobs = folder / "store" / "blobs"
        self._bundles = folder / "bundles"

    # --- the pointer -------------------------------------------------------------------------------------------------

    def pointer(self) -> tuple[str, ...] | None:
        """Return the running bundle and those to return to; empty: factory files; None: lost."""
        try:
            return msgspec.json.decode((self._folder / POINTER).read_bytes(), type=_Pointer).bundles
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def point(self, bundles: Iterable[str]) -> None:
        """Set the pointer. Raises OSError, which leaves it unchanged."""
        self._disk.replace_synced(self._folder / POINTER, msgspec.json.encode(_Pointer(tuple(bundles))))

    # --- blobs -------------------------------------------------------------------------------------------------------

    def blob(self, blob: Blob) -> Path:
        return self._blobs / blob.sha256

    def partial(self, blob: Blob) -> Path:
        return self._blobs / f"{blob.sha256}{_PARTIAL}"

    def missing(self, blobs: Iterable[Blob]) -> list[Blob]:
        """Return the missing blobs; hash the others, and remove damaged ones."""
        self._disk.make_folders(self._blobs)
        missing = []
        for blob in blobs:
            if not _has_content(self.blob(blob), blob):
                self._disk.remove(self.blob(blob))
                missing.append(blob)
        return missing

    def accept(self, blob: Blob) -> None:
        """Hash a downloaded file and give it its name; if its content differs, remove it and raise BundleAltered."""
        partial = self.partial(blob)
        if not _has_content(partial, blob):
            self._disk.remove(partial)
            raise BundleAltered(f"Blob {blob.sha256}: the fetched content has the wrong SHA-256 or length.")
        self._disk.publish(partial, self.blob(blob))

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free

    # --- bundles -----------------------------------------------------------------------------------------------------

    def stage(self, bundle: str, manifest: BundleManifest, models: Mapping[str, Manifest]) -> None:
        """Create the bundle's folder, completely or not at all."""
        folder = self._bundles / bundle
        partial = self._bundles / f"{bundle}{_PARTIAL}"
        self._disk.make_folders(self._bundles)
        self._disk.remove(partial)
        self._disk.remove(folder)
        self._disk.make_folder(partial)
        artifacts = partial / "models"
        self._disk.make_folder(artifacts)
        for model in manifest.models:
            place = artifacts / model.name
            self._disk.make_folder(place)
            for path, blob in _files(place, model):
                self._disk.link(path, f"../../../../store/blobs/{blob.sha256}")
            self._write(place / MANIFEST, msgspec.json.encode(models[model.name]))
            self._disk.sync_folder(place)
            for signal in model.signals:
                self._stage_signal(artifacts, model, signal)
        self._disk.sync_folder(artifacts)
        self._write(partial / MANIFEST, encode_canonical(manifest))
        self._disk.sync_folder(partial)
        self._disk.rename(partial, folder)
        self._disk.sync_folder(self._bundles)

    def _stage_signal(self, artifacts: Path, model: BundleModel, signal: BundleSignal) -> None:
        described = signal_manifest(model, signal)
        place = artifacts / described.name
        self._disk.make_folder(place)
        self._disk.link(place / described.file, f"../../../../store/blobs/{signal.blob.sha256}")
        self._write(place / MANIFEST, msgspec.json.encode(described))
        self._disk.sync_folder(place)

    def _write(self, path: Path, content: bytes) -> None:
        self._disk.create(path, content)
        self._disk.sync(path)

    def load(self, bundle: str) -> InstalledBundle:
        """Read a bundle and hash its content again. Raise UpdateRefused if it is damaged, or needs a newer daemon."""
        folder = self._bundles / bundle
        try:
            content = (folder / MANIFEST).read_bytes()
            manifest = read_manifest(content, bundle, self._daemon_version, is_installed=True)
            models = [load_artifact(folder / "models" / model.name) for model in manifest.models]
            for model in manifest.models:
                self._rename_images(folder / "models" / model.name, model)
        except (OSError, ValueError) as error:
            raise BundleAltered(f"Bundle {bundle}: {error}") from error
        for blob in manifest.blobs:
            if not _has_content(self.blob(blob), blob):
                raise BundleAltered(f"Bundle {bundle}: the file {self.blob(blob)} is damaged or missing.")
        for model, artifact in zip(manifest.models, models, strict=True):
            projector = artifact.manifest.projector
            named = [artifact.manifest.sha256, *(one.sha256 for one in artifact.manifest.adapters.values())]
            named += () if projector is None else (projector.sha256,)
            linked = all(_has_link(path, self.blob(blob)) for path, blob in _files(artifact.folder, model))
            if named != [blob.sha256 for blob in model.loaded] or not linked:
                raise BundleAltered(f"Bundle {bundle}: the folder of the model {model.name} is damaged.")
            for signal in model.signals:
                if not self._has_signal(folder / "models", model, signal):
                    raise BundleAltered(f"Bundle {bundle}: the signal {signal.kind} of {model.name} is damaged.")
        return InstalledBundle(bundle, manifest, self._policy(folder, manifest.policy), folder / "models")

    def _rename_images(self, place: Path, model: BundleModel) -> None:
        """Rename the images of golden prompts that a previous version installed to their present names."""
        for name in map(image_file, model.images):
            if (old := place / image_file_before(name)).is_symlink():
                self._disk.rename(old, place / name)
                self._disk.sync_folder(place)

    def _policy(self, folder: Path, blob: Blob) -> Path:
        """Return the policy's file, or a copy with present names if it has signals of a previous version."""
        path, copy = self.blob(blob), folder / _POLICY
        with contextlib.suppress(OSError, ValueError, ConfigError):  # reported where the policy is compiled
            rewritten = rewrite(path.read_text(encoding="utf-8"), str(path), "policy")
            if rewritten.changes:
                self._disk.replace_synced(copy, rewritten.text.encode())
                return copy
        return path

    def _has_signal(self, artifacts: Path, model: BundleModel, signal: BundleSignal) -> bool:
        described = signal_manifest(model, signal)
        try:
            artifact = load_artifact(artifacts / described.name)
        except ArtifactError:
            return False
        return artifact.manifest == described and _has_link(artifact.path, self.blob(signal.blob))

    def collect(self, keep: Iterable[str], wanted: Iterable[Blob] = ()) -> None:
        """Remove bundles outside `keep`, and files that no kept bundle needs. Never raise."""
        kept = set(keep)
        needed = {blob.sha256 for blob in wanted}
        for bundle in kept:
            # A damaged blob is downloaded again if it is wanted.
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, OSError):
                content = (self._bundles / bundle / MANIFEST).read_bytes()
                needed |= {blob.sha256 for blob in decode_installed(content).blobs}
        freed = 0
        try:
            for folder in self._listed(self._bundles):
                if folder.name not in kept:
                    self._disk.remove(folder)
            for path in self._listed(self._blobs):
                if path.name.removesuffix(_PARTIAL) not in needed:
                    freed += path.stat().st_size
                    self._disk.remove(path)
        except OSError as error:
            log.warning("Old bundles cannot be removed: %s", error)
        if freed:
            log.info("Files of old bundles were removed, which freed %d bytes.", freed)

    def _listed(self, folder: Path) -> list[Path]:
        return sorted(folder.iterdir()) if folder.is_dir() else []


def _files(folder: Path, model: BundleModel) -> Iterator[tuple[Path, Blob]]:
    """Yield the links in a model's folder, and the blob that each link names."""
    yield folder / _WEIGHTS, model.blob
    for adapter in model.adapters:
        yield folder / adapter_file(adapter.name), adapter.blob
    if model.projector is not None:
        yield folder / MMPROJ_FILE, model.projector.blob
    for image in model.images:
        yield folder / image_file(image), image


def signal_manifest(model: BundleModel, signal: BundleSignal) -> Manifest:
    """Describe a bundle's signal as an artifact beside its model. Its name contains `+`, which model names cannot."""
    is_graph = signal.kind == "edge.quality"
    return Manifest(
        name=f"{model.name}+{signal.kind}",
        file="model.onnx" if is_graph else "model.json",
        sha256=signal.blob.sha256,
        size_bytes=signal.blob.size_bytes,
        format="onnx" if is_graph else "json",
        architecture="",
        quantisation="",
        context_length=0,
        licence="",
        signal=signal.kind,
        judges_sha256=signal.model_sha256,
    )


def image_file(image: Blob) -> str:
    """Return the file name of a golden prompt's image beside the weights."""
    return f"image-{image.sha256}"


def _has_content(path: Path, blob: Blob) -> bool:
    try:
        return path.stat().st_size == blob.size_bytes and sha256_of(path) == blob.sha256
    except OSError:
        return False


def _has_link(path: Path, target: Path) -> bool:
    try:
        return path.samefile(target)
    except OSError:
        return False
