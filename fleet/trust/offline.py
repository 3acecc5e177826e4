"""The offline roles: root defines the keys of each role, artifacts signs bundles. Signatures are collected one by one.
New metadata waits in `pending` until enough keys have signed exactly the same bytes. Each signer's folder is built
again and compared first, so that each person signs only the content of their own checkout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import PurePath

import msgspec
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import DelegatedRole, Delegations, Metadata, Role, Root, T, TargetFile, Targets

from causeway_server.router.bundle.manifest import BundleManifest, encode_canonical

from ..repository.build import BuiltBundle, build_bundles
from ..repository.folder import CheckedFleet
from .keys import Trust, TrustedRole
from .published import ROLLOUT, PublishedFolder, RepositoryInvalid

KEPT_BUNDLES = 20
"""The number of newest bundles of each cohort that stay signed, so that rollouts can return to them."""
TOP_ROLES = {"root": "root", "targets": "artifacts", "snapshot": "snapshot", "timestamp": "timestamp"}
"""Our names of TUF's top roles."""


class RoleReport(msgspec.Struct, frozen=True):
    """The state of a role after signing. `waiting`: names of keys that may still sign; empty once published."""

    role: str
    version: int
    signed: tuple[str, ...]
    threshold: int
    published: bool
    waiting: tuple[str, ...] = ()


def sign_offline(
    checked: CheckedFleet, trust: Trust, folder: PublishedFolder, signers: Sequence[CryptoSigner], now: datetime
) -> tuple[RoleReport, ...]:
    """Add the signatures of `signers` to changed metadata, and publish metadata with enough signatures.

    Returns a report for root, and, once there is a root, one for artifacts. Raises RepositoryInvalid or OSError.

    Args:
        checked: A fleet without errors.
        folder: The folder of static files and pending metadata.
        signers: Private keys; keys without an offline role are ignored.
        now: The time, with a time zone.
    """
    reports = [_sign_root(trust, folder, signers, now)]
    root = folder.root()
    if root is not None:
        reports.append(_sign_artifacts(checked, trust, folder, signers, now, root.signed))
    return tuple(reports)


def signed_manifests(folder: PublishedFolder) -> dict[str, BundleManifest]:
    """Return the newest published bundle of each cohort."""
    return _newest_manifests(folder, folder.targets("targets"))


def all_signed_manifests(folder: PublishedFolder) -> dict[str, dict[str, BundleManifest]]:
    """Return every published bundle: cohort → bundle id → manifest."""
    found: dict[str, dict[str, BundleManifest]] = {}
    for target, manifest in folder.manifests(folder.targets("targets")):
        found.setdefault(manifest.cohort, {})[PurePath(target.path).stem] = manifest
    return found


def _newest_manifests(folder: PublishedFolder, metadata: Metadata[Targets] | None) -> dict[str, BundleManifest]:
    found: dict[str, BundleManifest] = {}
    for _, manifest in folder.manifests(metadata):
        if manifest.cohort not in found or found[manifest.cohort].serial < manifest.serial:
            found[manifest.cohort] = manifest
    return found


# --- root ------------------------------------------------------------------------------------------------------------


def _sign_root(trust: Trust, folder: PublishedFolder, signers: Sequence[CryptoSigner], now: datetime) -> RoleReport:
    current = folder.root()
    role = trust.roles["root"]
    wanted = _root(trust, 1 if current is None else current.signed.version + 1, role.expiry(now))
    if current is not None and _same(current.signed, wanted) and not _ageing(current.signed, role, now):
        folder.drop_pending("root")
        return RoleReport("root", current.signed.version, (), role.threshold, published=True)
    pending = folder.read_pending("root", Metadata[Root])
    if pending is None or not _resumable(pending.signed, wanted, role, now):
        pending = Metadata(wanted)
    before = None if current is None else current.signed
    holders = {*wanted.roles["root"].keyids, *(() if before is None else before.roles["root"].keyids)}
    _add_signatures(pending, signers, holders)
    result = pending.signed.get_root_verification_result(before, pending.signed_bytes, pending.signatures)
    if result.verified:
        folder.write_metadata("root", pending)
        folder.drop_pending("root")
    else:
        folder.write_pending("root", pending)
    return _report("root", pending.signed.version, result.signed, result.unsigned, role, trust, result.verified)


def _root(trust: Trust, version: int, expires: datetime) -> Root:
    roles = {tuf_name: Role([], trust.roles[name].threshold) for tuf_name, name in TOP_ROLES.items()}
    root = Root(version=version, expires=expires, keys={}, roles=roles, consistent_snapshot=True)
    for tuf_name, name in TOP_ROLES.items():
        for key in trust.roles[name].keys:
            root.add_key(key, tuf_name)
    return root


# --- artifacts -------------------------------------------------------------------------------------------------------


def _sign_artifacts(
    checked: CheckedFleet,
    trust: Trust,
    folder: PublishedFolder,
    signers: Sequence[CryptoSigner],
    now: datetime,
    root: Root,
) -> RoleReport:
    current = folder.targets("targets")
    pending = folder.read_pending("targets", Metadata[Targets])
    role = trust.roles["artifacts"]
    built = _build(checked, folder, current, pending, now)
    wanted = _artifacts(trust, folder, built, current, role.expiry(now))
    if current is not None and _same(current.signed, wanted) and not _ageing(current.signed, role, now):
        result = root.get_verification_result("targets", current.signed_bytes, current.signatures)
        if result.verified:  # the keys of a later root must have signed it, too
            folder.drop_pending("targets")
            return RoleReport("artifacts", current.signed.version, (), role.threshold, published=True)
    if pending is None or not _resumable(pending.signed, wanted, role, now):
        pending = Metadata(wanted)
    _add_signatures(pending, signers, set(root.roles["targets"].keyids))
    # Bundles and blobs first, so that signed files can be fetched, and the next signer finds the manifests.
    for bundle in built.values():
        folder.write_target(f"bundles/{bundle.id}.json", encode_canonical(bundle.manifest))
    result = root.get_verification_result("targets", pending.signed_bytes, pending.signatures)
    if result.verified:
        for bundle in built.values():
            for sha256, path in bundle.files.items():
                folder.write_blob(sha256, path)
        folder.write_metadata("targets", pending)
        folder.drop_pending("targets")
    else:
        folder.write_pending("targets", pending)
    return _report("artifacts", pending.signed.version, result.signed, result.unsigned, role, trust, result.verified)


def _build(
    checked: CheckedFleet,
    folder: PublishedFolder,
    current: Metadata[Targets] | None,
    pending: Metadata[Targets] | None,
    now: datetime,
) -> dict[str, BuiltBundle]:
    """Build the bundles. A pending bundle that differs only in its time keeps its time."""
    built = build_bundles(checked, _newest_manifests(folder, current), int(now.timestamp()))
    try:
        waiting = _newest_manifests(folder, pending)
    except RepositoryInvalid:
        waiting = {}  # without its manifests the pending metadata is useless, and is replaced
    for name, bundle in built.items():
        if name in waiting:
            candidate = msgspec.structs.replace(bundle.manifest, created=waiting[name].created)
            if candidate == waiting[name]:
                built[name] = msgspec.structs.replace(bundle, manifest=candidate)
    return built


def _artifacts(
    trust: Trust,
    folder: PublishedFolder,
    built: Mapping[str, BuiltBundle],
    current: Metadata[Targets] | None,
    expires: datetime,
) -> Targets:
    kept: dict[str, list[tuple[int, str, TargetFile]]] = {}
    for target, manifest in folder.manifests(current):
        kept.setdefault(manifest.cohort, []).append((manifest.serial, target.path, target))
    for name, bundle in built.items():
        path = f"bundles/{bundle.id}.json"
        target = TargetFile.from_data(path, encode_canonical(bundle.manifest), ["sha256"])
        entries = [entry for entry in kept.get(name, []) if entry[1] != path]
        kept[name] = sorted([*entries, (bundle.manifest.serial, path, target)], key=lambda entry: entry[:2])
    targets = {path: target for entries in kept.values() for _, path, target in entries[-KEPT_BUNDLES:]}
    rollout = trust.roles[ROLLOUT]
    delegated = DelegatedRole(ROLLOUT, [], rollout.threshold, terminating=True, paths=["rollouts/*"])
    version = 1 if current is None else current.signed.version + 1
    delegations = Delegations({}, {ROLLOUT: delegated})
    signed = Targets(version=version, expires=expires, targets=targets, delegations=delegations)
    for key in rollout.keys:
        signed.add_key(key, ROLLOUT)
    return signed


# --- both ------------------------------------------------------------------------------------------------------------


def _ageing(signed: Root | Targets, role: TrustedRole, now: datetime) -> bool:
    """Return whether less than a third of the metadata's validity is left, so that it is signed again unchanged."""
    return signed.expires < now + timedelta(seconds=role.expires_s / 3)


def _same(one: Root | Targets, other: Root | Targets) -> bool:
    """Return whether both are equal except for version and expiry."""
    left, right = one.to_dict(), other.to_dict()
    for part in (left, right):
        part.pop("version")
        part.pop("expires")
    return left == right


def _resumable(pending: Root | Targets, wanted: Root | Targets, role: TrustedRole, now: datetime) -> bool:
    """Return whether signatures may be added to pending metadata: same content, and the right expiry."""
    same = pending.version == wanted.version and _same(pending, wanted)
    return same and pending.expires <= wanted.expires and not _ageing(pending, role, now)


def _add_signatures(metadata: Metadata[T], signers: Sequence[CryptoSigner], holders: set[str]) -> None:
    for signer in signers:
        if signer.public_key.keyid in holders:
            metadata.sign(signer, append=True)


def _report(
    role: str,
    version: int,
    signed: Mapping[str, object],
    unsigned: Mapping[str, object],
    trusted: TrustedRole,
    trust: Trust,
    published: bool,
) -> RoleReport:
    def names(keyids: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(sorted(trust.names.get(keyid, keyid[:12]) for keyid in keyids))

    return RoleReport(role, version, names(signed), trusted.threshold, published, () if published else names(unsigned))
