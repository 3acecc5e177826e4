"""The online roles, held by a server: `rollout` moves devices between signed bundles, snapshot and timestamp name the
newest metadata. Their metadata expires within days, so devices soon notice if it is no longer renewed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Snapshot, T, TargetFile, Targets, Timestamp

from causeway_server.router.bundle.manifest import RolloutPlan, encode_canonical, read_plan
from causeway_server.router.bundle.refusals import BundleNotSigned
from causeway_server.router.errors import ConfigError

from .keys import Trust
from .published import ROLLOUT, PublishedFolder, RepositoryInvalid

log = logging.getLogger(__name__)


class OnlineKeyMissing(ConfigError, code="online_key_missing"):
    """The key of an online role is missing."""


class SignaturesMissing(ConfigError, code="signatures_missing"):
    """Root or artifacts lack signatures, so devices would refuse the update."""


def publish_online(
    trust: Trust,
    folder: PublishedFolder,
    signers: Sequence[CryptoSigner],
    now: datetime,
    plans: Mapping[str, RolloutPlan] | None = None,
    min_version: int = 0,
) -> int:
    """Make signed bundles visible to devices by signing rollout, snapshot and timestamp again; return the last's
    version.

    Args:
        folder: A folder with root and artifacts.
        signers: The private keys, at least one for each online role.
        now: The time, with a time zone.
        plans: The plans by cohort; None: the published plans stay.
        min_version: The minimum of new versions, since devices may know newer ones after a restored backup.

    Raises:
        OnlineKeyMissing: A role has no key among `signers`.
        SignaturesMissing: Root or artifacts lack signatures.
        BundleNotSigned: A plan names a bundle that artifacts did not sign.
    """
    root, artifacts = folder.root(), folder.targets("targets")
    if root is None or artifacts is None:
        raise SignaturesMissing("The roles root and artifacts need their signatures first.")
    if not root.signed.get_verification_result("targets", artifacts.signed_bytes, artifacts.signatures).verified:
        raise SignaturesMissing("The role root now names other keys, so the role artifacts needs new signatures first.")
    signer = signer_of(trust, ROLLOUT, signers)
    for role in ("snapshot", "timestamp"):
        signer_of(trust, role, signers)  # all or nothing
    rollout = _rollout(folder, artifacts.signed, plans, trust.roles[ROLLOUT].expiry(now))
    rollout.version = max(rollout.version, min_version)
    _publish(folder, ROLLOUT, Metadata(rollout), signer)
    return publish_freshness(trust, folder, signers, now, min_version)


def publish_freshness(
    trust: Trust, folder: PublishedFolder, signers: Sequence[CryptoSigner], now: datetime, min_version: int = 0
) -> int:
    """Sign snapshot and timestamp; return the latter's version. As `publish_online`. Raises OnlineKeyMissing."""
    snapshot_version, timestamp_version = folder.next_versions()
    meta = {f"{role}.json": _meta(folder, role) for role in ("targets", ROLLOUT)}
    version = max(snapshot_version, min_version)
    snapshot = Snapshot(version=version, expires=trust.roles["snapshot"].expiry(now), meta=meta)
    _publish(folder, "snapshot", Metadata(snapshot), signer_of(trust, "snapshot", signers))
    timestamp = Timestamp(
        version=max(timestamp_version, min_version),
        expires=trust.roles["timestamp"].expiry(now),
        snapshot_meta=_meta(folder, "snapshot"),
    )
    _publish(folder, "timestamp", Metadata(timestamp), signer_of(trust, "timestamp", signers))
    return timestamp.version


def published_plans(folder: PublishedFolder) -> dict[str, RolloutPlan]:
    """Return the plans by cohort in the newest rollout metadata, even if snapshot and timestamp do not name it yet.

    Raises RepositoryInvalid for a missing or altered file, BundleInvalid for a malformed plan.
    """
    metadata = folder.targets(ROLLOUT)
    plans = {}
    for path, target in ({} if metadata is None else metadata.signed.targets).items():
        cohort = path.removeprefix("rollouts/").removesuffix(".json")
        plans[cohort] = read_plan(folder.read_target(target), cohort)
    return plans


def signed_bundles(folder: PublishedFolder) -> frozenset[str]:
    """Return the ids of the bundles that artifacts signed."""
    metadata = folder.targets("targets")
    paths = () if metadata is None else metadata.signed.targets
    return frozenset(path.removeprefix("bundles/").removesuffix(".json") for path in paths)


def renewal_due(trust: Trust, folder: PublishedFolder, now: datetime) -> bool:
    """Return whether to sign the online roles again.

    1. A role's metadata is missing, or half of its time is over.
    2. Snapshot or timestamp does not name the newest metadata, after new signatures or an interrupted publication.
    3. Snapshot or timestamp is damaged; both can be made from the other metadata.
    """
    try:
        snapshot, timestamp = folder.snapshot(), folder.timestamp()
    except RepositoryInvalid as error:
        log.error("%s: the control plane signs the file again.", error)
        return True  # (3)
    rollout, artifacts = folder.targets(ROLLOUT), folder.targets("targets")
    if snapshot is None or timestamp is None or rollout is None or artifacts is None:
        return True
    for role, metadata in ((ROLLOUT, rollout), ("snapshot", snapshot), ("timestamp", timestamp)):
        if metadata.signed.expires < now + timedelta(seconds=trust.roles[role].expires_s / 2):
            return True  # (1)
    named = snapshot.signed.meta
    versions = {"targets.json": artifacts.signed.version, f"{ROLLOUT}.json": rollout.signed.version}
    return (  # (2)
        any(path not in named or named[path].version != version for path, version in versions.items())
        or timestamp.signed.snapshot_meta.version != snapshot.signed.version
    )


def holds_online_role(trust: Trust, signers: Sequence[CryptoSigner]) -> bool:
    given = {signer.public_key.keyid for signer in signers}
    return all(given & {key.keyid for key in trust.roles[role].keys} for role in (ROLLOUT, "snapshot", "timestamp"))


def _rollout(
    folder: PublishedFolder, artifacts: Targets, plans: Mapping[str, RolloutPlan] | None, expires: datetime
) -> Targets:
    current = folder.targets(ROLLOUT)
    targets = {} if current is None else dict(current.signed.targets)
    if plans is not None:
        targets = {}
        for cohort, plan in plans.items():
            unsigned = sorted(one for one in plan.bundles if f"bundles/{one}.json" not in artifacts.targets)
            if unsigned:
                raise BundleNotSigned(
                    f"The rollout of {cohort} names the bundle {unsigned[0]}, which the role artifacts has not signed."
                )
            path, content = f"rollouts/{cohort}.json", encode_canonical(plan)
            targets[path] = TargetFile.from_data(path, content, ["sha256"])
            folder.write_target(path, content)
    return Targets(version=1 if current is None else current.signed.version + 1, expires=expires, targets=targets)


def signer_of(trust: Trust, role: str, signers: Sequence[CryptoSigner]) -> CryptoSigner:
    """Return the signer of a role. Raises OnlineKeyMissing."""
    holders = {key.keyid for key in trust.roles[role].keys}
    for signer in signers:
        if signer.public_key.keyid in holders:
            return signer
    names = ", ".join(sorted(trust.names[keyid] for keyid in holders))
    raise OnlineKeyMissing(f"The role {role} needs one of these keys: {names}.")


def _publish(folder: PublishedFolder, role: str, metadata: Metadata[T], signer: CryptoSigner) -> None:
    metadata.sign(signer)
    folder.write_metadata(role, metadata)


def _meta(folder: PublishedFolder, role: str) -> MetaFile:
    """Describe the newest file of a role by version, length and hash, so that it cannot be exchanged for another."""
    newest = folder.newest(role)
    assert newest is not None
    return MetaFile.from_data(newest[0], newest[1], ["sha256"])
