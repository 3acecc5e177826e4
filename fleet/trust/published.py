"""The folder of static files for devices, and the metadata that waits for signatures.

    published/tuf/metadata/   N.root.json, N.targets.json (artifacts), N.rollout.json, N.snapshot.json, timestamp.json
    published/tuf/targets/    bundles/HASH.ID.json, rollouts/HASH.COHORT.json
    published/blobs/SHA256    policies, cases, models
    pending/                  root.json, targets.json: signed by fewer keys than needed

A published file never changes (except timestamp.json and root.json), so a CDN may keep it forever. Every file is
complete before a signed file names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, Root, Snapshot, T, TargetFile, Targets, Timestamp
from tuf.api.serialization.json import JSONSerializer

from causeway_server.router.bundle.manifest import BundleManifest, blob_of, decode_signed
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.folders import copy_atomically, write_atomically

PUBLISHED, PENDING = "published", "pending"
ROLLOUT = "rollout"


class RepositoryInvalid(ConfigError, code="repository_invalid"):
    """A file of the published folder is malformed."""


_RESTORE = "Restore it from git, a backup, or a web server with a copy: signed files never change."
_SIGN_AGAIN = "Remove it, and sign again with `causeway-fleet sign`."


class PublishedFolder:
    """The static files of a fleet. Only one program may write at a time."""

    def __init__(self, fleet: Path) -> None:
        """Open the folder. `fleet`: the folder with `fleet.yaml`."""
        self.path = fleet / PUBLISHED
        self.pending = fleet / PENDING
        self._metadata = self.path / "tuf" / "metadata"
        self._targets = self.path / "tuf" / "targets"

    def root(self) -> Metadata[Root] | None:
        """Return the newest root; None if there is none."""
        return self._read(Metadata[Root], self._newest("root"))

    def targets(self, role: str) -> Metadata[Targets] | None:
        """Return the newest metadata of `targets` or `rollout`; None if there is none."""
        return self._read(Metadata[Targets], self._newest(role))

    def snapshot(self) -> Metadata[Snapshot] | None:
        """Return the newest snapshot; None if there is none."""
        return self._read(Metadata[Snapshot], self._newest("snapshot"))

    def timestamp(self) -> Metadata[Timestamp] | None:
        """Return the timestamp; None if there is none."""
        return self._read(Metadata[Timestamp], self._metadata / "timestamp.json")

    def blob(self, sha256: str) -> Path:
        """Return the path of a blob, which need not exist."""
        return self.path / "blobs" / sha256

    def newest(self, role: str) -> tuple[int, bytes] | None:
        """Return version and bytes of the newest metadata of a role; None if there is none."""
        path = self._newest(role)
        return None if path is None else (_version(path), path.read_bytes())

    def read_pending(self, role: str, kind: type[Metadata[T]]) -> Metadata[T] | None:
        return self._read(kind, self.pending / f"{role}.json", _SIGN_AGAIN)

    def write_pending(self, role: str, metadata: Metadata[T]) -> None:
        write_atomically(self.pending / f"{role}.json", metadata.to_bytes(JSONSerializer()))

    def drop_pending(self, role: str) -> None:
        (self.pending / f"{role}.json").unlink(missing_ok=True)

    def write_metadata(self, role: str, metadata: Metadata[T]) -> None:
        """Publish metadata under its version; the timestamp, which devices fetch first, has no version in its name."""
        content = metadata.to_bytes(JSONSerializer())
        if role != "timestamp":
            write_atomically(self._metadata / f"{metadata.signed.version}.{role}.json", content)
        if role in ("timestamp", "root"):
            write_atomically(self._metadata / f"{role}.json", content)

    def timestamp_version(self) -> int:
        """Return the version of the timestamp, 0 if there is none."""
        metadata = self.timestamp()
        return 0 if metadata is None else metadata.signed.version

    def next_versions(self) -> tuple[int, int]:
        """Return the next versions of snapshot and timestamp: higher than every one that a device has seen, even if the
        timestamp is lost, because each is signed with a new snapshot, whose file name has its version.
        """
        newest = self._newest("snapshot")
        snapshot = 1 if newest is None else _version(newest) + 1
        try:
            timestamp = self.timestamp_version()
        except RepositoryInvalid:
            timestamp = 0
        return snapshot, timestamp + 1 if timestamp else snapshot

    def write_target(self, path: str, content: bytes) -> None:
        folder, _, name = path.rpartition("/")
        write_atomically(self._targets / folder / f"{blob_of(content).sha256}.{name}", content)

    def read_target(self, target: TargetFile) -> bytes:
        """Read a target's file and check its hash. Raises RepositoryInvalid: the file is missing or altered."""
        folder, _, name = target.path.rpartition("/")
        path = self._targets / folder / f"{target.hashes['sha256']}.{name}"
        try:
            content = path.read_bytes()
            target.verify_length_and_hashes(content)
        except (OSError, RepositoryError) as error:
            raise RepositoryInvalid(f"The file is missing or altered: {error}. {_RESTORE}", where=str(path)) from error
        return content

    def manifests(self, metadata: Metadata[Targets] | None) -> Iterator[tuple[TargetFile, BundleManifest]]:
        """Yield each bundle that metadata of `targets` names. Raises RepositoryInvalid."""
        for target in () if metadata is None else metadata.signed.targets.values():
            yield target, decode_signed(self.read_target(target))

    def write_blob(self, sha256: str, source: Path) -> None:
        """Copy a file to the path of its hash, unless it is already there completely. Raises OSError."""
        target = self.path / "blobs" / sha256
        if not target.is_file() or target.stat().st_size != source.stat().st_size:
            copy_atomically(source, target)

    def missing_blobs(self, manifest: BundleManifest) -> list[str]:
        """Return the hashes of the blobs that are not in the published folder."""
        return [blob.sha256 for blob in manifest.blobs if not (self.path / "blobs" / blob.sha256).is_file()]

    def _newest(self, role: str) -> Path | None:
        return max(self._metadata.glob(f"*.{role}.json"), key=_version, default=None)

    def _read(self, kind: type[Metadata[T]], path: Path | None, advice: str = _RESTORE) -> Metadata[T] | None:
        if path is None or not path.is_file():
            return None
        try:
            return kind.from_bytes(path.read_bytes())
        except RepositoryError as error:
            what = f"The file is damaged or truncated, or is not signed metadata ({error})"
            raise RepositoryInvalid(f"{what}. {advice}", where=str(path)) from error


def _version(path: Path) -> int:
    text = path.name.partition(".")[0]
    return int(text) if text.isdecimal() else 0
