"""Publishes plans and renews what expires, with the keys of the online roles. One process writes at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from securesystemslib.signer import CryptoSigner

from router.bundle.manifest import BundleManifest
from router.bundle.rollout import RolloutPlan
from router.errors import ConfigError

from ..trust.keys import ONLINE, Trust, load_signer, read_trust
from ..trust.online import publish_online, published_plans, renewal_due, signed_bundles
from ..trust.published import PublishedFolder


class Publication(msgspec.Struct, frozen=True):
    """The result of publishing.

    Attributes:
        written: Whether anything was signed.
        problems: Why a cohort's plan was left as it is, or why nothing can be published; for operators.
    """

    written: bool
    problems: tuple[str, ...] = ()


class Publisher:
    """The published folder of one fleet, and the keys to change it.

    Everything here reads or writes files: call it in a thread.
    """

    def __init__(self, fleet: Path, keys: Path) -> None:
        """`fleet`: the folder with `trust.yaml`; `keys`: the folder with the private keys of the online roles."""
        self._fleet = fleet
        self._keys = keys
        self._folder = PublishedFolder(fleet)

    def check(self) -> None:
        """Check at start that every online role has a key here.

        Raises:
            ConfigError: `trust.yaml` is invalid, or a role has no key.
        """
        self._signers(self._trust())

    def published(self) -> dict[str, RolloutPlan]:
        """Return the newest signed plan of each cohort, published or about to be after an interruption."""
        return published_plans(self._folder)

    def signed(self) -> frozenset[str]:
        """Return the ids of the bundles that a plan may name."""
        return signed_bundles(self._folder)

    def manifest(self, bundle: str) -> BundleManifest | None:
        """Return the manifest of a signed bundle; None: it is not signed."""
        metadata = self._folder.targets("targets")
        target = None if metadata is None else metadata.signed.targets.get(f"bundles/{bundle}.json")
        return None if target is None else msgspec.json.decode(self._folder.read_target(target), type=BundleManifest)

    def blob(self, sha256: str) -> Path:
        return self._folder.blob(sha256)

    def publish(self, plans: Mapping[str, RolloutPlan], now: float, least_version: int = 0) -> Publication:
        """Publish the store's plans, and renew metadata that expires. Idempotent.

        1. Cohorts that the store does not know keep their plan.
        2. A box that is pinned to a bundle which is no longer signed is held instead: it keeps the bundle that it runs.
        3. A plan of which another bundle is not signed is not published; other cohorts are.

        Args:
            plans: The plan of each cohort that has a rollout.
            now: Unix seconds.
            least_version: See `publish_online`.
        """
        trust, current, signed = self._trust(), self.published(), self.signed()
        problems = []
        wanted = dict(current)  # (1)
        for cohort, plan in plans.items():
            fitting = _without_lost_pins(plan, signed)  # (2)
            lost = sorted(fitting.bundles - signed)
            if lost:
                problems.append(f"{cohort}: the plan of {plan.rollout} names bundle {lost[0]}, which is not signed")
            else:
                wanted[cohort] = fitting
        at = datetime.fromtimestamp(now, UTC)
        changed = wanted != current
        if not changed and not renewal_due(trust, self._folder, at):
            return Publication(False, tuple(problems))
        signers = self._signers(trust)
        publish_online(trust, self._folder, signers, at, wanted if changed else None, least_version)
        return Publication(True, tuple(problems))

    def _trust(self) -> Trust:
        trust, problems = read_trust(self._fleet)
        if trust is None:
            raise ConfigError(problems[0].message, where=str(problems[0].location))
        return trust

    def _signers(self, trust: Trust) -> Sequence[CryptoSigner]:
        signers: dict[str, CryptoSigner] = {}
        for role in ONLINE:
            names = [trust.names[key.keyid] for key in trust.roles[role].keys]
            found = [self._keys / f"{name}.pem" for name in names if (self._keys / f"{name}.pem").is_file()]
            if not found:
                raise ConfigError(f"the role {role} needs one of {', '.join(names)} (.pem)", where=str(self._keys))
            signers[found[0].name] = load_signer(found[0], None)
        return tuple(signers.values())


def _without_lost_pins(plan: RolloutPlan, signed: frozenset[str]) -> RolloutPlan:
    lost = {device for device, bundle in plan.pins.items() if bundle not in signed}
    if not lost:
        return plan
    pins = {device: bundle for device, bundle in plan.pins.items() if device not in lost}
    return msgspec.structs.replace(plan, pins=pins, holds=plan.holds | lost)
