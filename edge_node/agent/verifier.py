"""Verification of a fleet's published files, by python-tuf's client with additional limits and a version floor that
survives crashes.

The transport is a parameter: `fetch` maps a path such as ``tuf/metadata/timestamp.json`` to chunks of bytes. python-tuf
does not sync its metadata to disk, and accepts older signed metadata if its own copy was lost; the floor, which is
synced to disk, prevents that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from tuf.api import exceptions as tuf
from tuf.api.metadata import Metadata, Root, Signed, Snapshot, TargetFile, Timestamp
from tuf.api.serialization import DeserializationError
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from causeway_server.router.bundle.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_PLAN_BYTES,
    BundleManifest,
    RolloutPlan,
    assigned_bundle,
    read_manifest,
    read_plan,
)
from causeway_server.router.bundle.refusals import (
    BundleAltered,
    BundleNotSigned,
    DownloadTooSlow,
    EndlessData,
    MetadataFrozen,
    MetadataInvalid,
    MetadataMixed,
    MetadataRollback,
    RoleExpired,
    TooFewSignatures,
    UpdateRefused,
    UpdateUnavailable,
)

from .inspection import UpdateCheckRequest, UpdateCheckResult
from .source import DownloadBounds
from .store import Disk

Fetch = Callable[[str], Iterator[bytes]]
"""Function that yields the file at a path. Raises FileNotFoundError for a missing file, OSError for a failed source."""

_METADATA, _TARGETS, _FLOOR = "tuf/metadata/", "tuf/targets/", "floor.json"
_FRESHNESS = ("timestamp", "snapshot")
_CONFIG = UpdaterConfig(root_max_length=256 * 1024, snapshot_max_length=256 * 1024, targets_max_length=2 * 1024 * 1024)


BOUNDS = DownloadBounds(deadline_s=120.0, grace_s=10.0, least_bytes_per_s=256.0)
"""Limits of one update's metadata and manifests together."""


class UpdateVerifier:
    """Verifies one update of one fleet; each needs a new one. `folder` holds metadata and floor; `root` is trusted
    since the enrolment. Metadata that expired before `not_before` (Unix seconds) is refused, whatever a slow clock
    says.
    """

    def __init__(
        self,
        folder: Path,
        root: bytes,
        fetch: Fetch,
        monotonic: Callable[[], float],
        bounds: DownloadBounds = BOUNDS,
        *,
        not_before: float = 0.0,
    ) -> None:
        self._folder = folder
        self._not_before = datetime.fromtimestamp(not_before, UTC)
        self._fetcher = _BoundedFetcher(fetch, monotonic, bounds)
        folder.mkdir(parents=True, exist_ok=True)
        with self._translated("root"):
            self._updater = Updater(
                str(folder), _METADATA, None, _TARGETS, self._fetcher, config=_CONFIG, bootstrap=root
            )

    def refresh(self) -> None:
        """Fetch and verify root, timestamp, snapshot and artifacts. UpdateRefused names the role. Raises OSError."""
        with self._translated():
            self._updater.refresh()
        self._check_time()
        self._raise_floor()

    def plan(self, cohort: str) -> RolloutPlan | None:
        """Return the cohort's plan, if any. Artifacts sign every bundle that it names, else BundleNotSigned is raised;
        BundleInvalid: the plan is malformed or another cohort's; UpdateRefused: it cannot be used.
        """
        with self._translated():
            target = self._updater.get_targetinfo(f"rollouts/{cohort}.json")
        if target is None:
            return None
        self._check_role("rollout")
        plan = read_plan(self._download(target, MAX_PLAN_BYTES), cohort)
        for bundle in sorted(plan.bundles):
            self._signed_bundle(bundle)
        return plan

    def manifest(self, bundle: str, daemon_version: str) -> BundleManifest:
        """Fetch and verify the manifest of a bundle. Raises UpdateRefused; BundleNotSigned unless artifacts sign it."""
        return read_manifest(self._download(self._signed_bundle(bundle), MAX_MANIFEST_BYTES), bundle, daemon_version)

    def _signed_bundle(self, bundle: str) -> TargetFile:
        with self._translated():
            target = self._updater.get_targetinfo(f"bundles/{bundle}.json")
        if target is None:
            raise BundleNotSigned(f"Bundle {bundle} is not signed by the role artifacts.")
        return target

    def _download(self, target: TargetFile, max_bytes: int) -> bytes:
        if target.length > max_bytes:
            raise EndlessData(f"{target.path} has {target.length} bytes, but at most {max_bytes} bytes are accepted.")
        path = self._folder / "download"
        try:
            with self._translated():
                self._updater.download_target(target, str(path))
        except MetadataMixed as error:
            raise BundleAltered(error.message) from error
        return path.read_bytes()

    def _check_time(self) -> None:
        """Check the expiry times against the earliest possible time, as python-tuf did against the clock."""
        for role in ("root", "timestamp", "snapshot", "targets"):
            self._check_role(role)

    def _check_role(self, role: str) -> None:
        expires = _read_signed(self._folder / f"{role}.json").expires
        if expires < self._not_before:
            late = f"it is at least {self._not_before:%Y-%m-%d} now (is the clock wrong?)"
            raise _expired(role)(f"The metadata of the role {role} expired at {expires:%Y-%m-%d %H:%M}, but {late}")

    def _raise_floor(self) -> None:
        """Refuse versions below any that were verified before, then sync the present ones to disk."""
        versions = self._versions()
        path = self._folder / _FLOOR
        floor = _read_floor(path)
        for role, version in floor.items():
            if versions.get(role, 0) < version:
                message = f"{role} has version {versions.get(role, 0)}, but version {version} was verified before"
                raise MetadataRollback(message)
        if versions != floor:
            Disk().replace_synced(path, msgspec.json.encode(versions, order="deterministic"))

    def _versions(self) -> dict[str, int]:
        root = Metadata[Root].from_file(str(self._folder / "root.json")).signed
        timestamp = Metadata[Timestamp].from_file(str(self._folder / "timestamp.json")).signed
        snapshot = Metadata[Snapshot].from_file(str(self._folder / "snapshot.json")).signed
        versions = {"root": root.version, "timestamp": timestamp.version, "snapshot": snapshot.version}
        return versions | {name.removesuffix(".json"): meta.version for name, meta in snapshot.meta.items()}

    @contextmanager
    def _translated(self, role: str = "") -> Iterator[None]:
        """Translate python-tuf's errors; the role is that of the file requested last."""
        try:
            yield
        except (tuf.RepositoryError, tuf.DownloadError) as error:
            raise self._refusal(error, role or self._fetcher.role) from error

    def _refusal(self, error: Exception, role: str) -> UpdateRefused:
        if isinstance(error, tuf.ExpiredMetadataError):
            if self._root_has_expired():
                return RoleExpired(f"Root: {error}")
            return _expired(role)(f"{role}: {error}")
        for known, refusal in _REFUSALS:
            if isinstance(error, known):
                return refusal(f"{role}: {error}")
        if isinstance(error, DeserializationError):
            advice = "the operator must check it at the control plane and at any cache before it"
            return MetadataInvalid(
                f"{role}: the metadata file at the source is damaged or truncated ({error}); {advice}"
            )
        return MetadataInvalid(f"{role}: {error}")

    def _root_has_expired(self) -> bool:
        return Metadata[Root].from_file(str(self._folder / "root.json")).signed.is_expired(datetime.now(UTC))


_REFUSALS: tuple[tuple[type[Exception], type[UpdateRefused]], ...] = (
    (tuf.UnsignedMetadataError, TooFewSignatures),
    (tuf.BadVersionNumberError, MetadataRollback),
    (tuf.LengthOrHashMismatchError, MetadataMixed),
    (tuf.DownloadLengthMismatchError, EndlessData),
    (tuf.SlowRetrievalError, DownloadTooSlow),
    (tuf.DownloadError, UpdateUnavailable),
)


class _BoundedFetcher(FetcherInterface):
    """A fetcher that limits the time and the rate of all files together; python-tuf limits the length of each."""

    def __init__(self, fetch: Fetch, monotonic: Callable[[], float], bounds: DownloadBounds) -> None:
        self._source = fetch
        self._monotonic = monotonic
        self._bounds = bounds
        self._started = monotonic()
        self._received = 0
        self.role = "root"

    def _fetch(self, url: str) -> Iterator[bytes]:
        name = url.rpartition("/")[2].removesuffix(".json").rpartition(".")[2]
        self.role = name if url.startswith(_METADATA) else url.removeprefix(_TARGETS)
        try:
            for chunk in self._source(url):
                self._received += len(chunk)
                self._check_rate(url)
                yield chunk
        except FileNotFoundError as error:
            raise tuf.DownloadHTTPError(f"{url} does not exist.", 404) from error
        except OSError as error:
            raise tuf.DownloadError(f"{url}: {error}") from error

    def _check_rate(self, url: str) -> None:
        elapsed = self._monotonic() - self._started
        if elapsed > self._bounds.deadline_s:
            raise tuf.SlowRetrievalError(f"The download of {url} was not complete after {self._bounds.deadline_s:g} s.")
        if elapsed > self._bounds.grace_s and self._received < elapsed * self._bounds.least_bytes_per_s:
            rate = self._received / elapsed
            raise tuf.SlowRetrievalError(
                f"The download of {url} is too slow: {rate:.0f} bytes/s instead of at least "
                f"{self._bounds.least_bytes_per_s:g} bytes/s."
            )


def _expired(role: str) -> type[UpdateRefused]:
    return MetadataFrozen if role in _FRESHNESS else RoleExpired


def _read_signed(path: Path) -> Signed:
    signed: Signed = Metadata.from_file(str(path)).signed
    return signed


def _read_floor(path: Path) -> dict[str, int]:
    """Return the version floor. A damaged file, which no remote party can cause, counts as empty, lest a device with a
    failing disk lose updates forever.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def check_updates(request: UpdateCheckRequest, fetch: Fetch, monotonic: Callable[[], float]) -> UpdateCheckResult:
    """Check the fleet's published files once: return the verified plan and manifest. Raises UpdateRefused, OSError."""
    update = UpdateVerifier(Path(request.folder), request.root, fetch, monotonic, not_before=request.not_before)
    update.refresh()
    plan = update.plan(request.cohort)
    wanted = None if plan is None else assigned_bundle(plan, request.device, request.running)
    manifest = None
    if wanted is not None and wanted not in request.known:
        manifest = update.manifest(wanted, request.daemon_version)
    return UpdateCheckResult(plan, wanted, manifest)
