"""Publication of the store's rollouts as plans, signed by the online roles, and their delivery."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from anyio import to_thread
from securesystemslib.signer import CryptoSigner

from causeway_server.router.bundle.manifest import BundleManifest, RolloutPlan, decode_signed, encode_canonical
from causeway_server.router.bundle.protocol import ErasureOrder, SignedOrder
from causeway_server.router.documents.reader import read_struct
from causeway_server.router.errors import ConfigError

from ..repository.fleet_file import FLEET_FILE, CohortDoc, FleetDoc, maintenance_windows
from ..rollout.rollout import plan_of
from ..rollout.settings import RolloutState
from ..store.database import Store
from ..store.generations import CohortPace, advance, read_generations, set_pace
from ..store.rollouts import RolloutRecord, pins_and_holds
from ..trust.keys import ONLINE, Trust, load_signer, read_trust
from ..trust.online import publish_online, published_plans, renewal_due, signed_bundles, signer_of
from ..trust.published import ROLLOUT, PublishedFolder

REVERTING = (RolloutState.ABORTED, RolloutState.REVERTING)


class Publisher:
    """A fleet's published folder, and the keys to change it. One process writes; call the methods in a thread."""

    def __init__(self, fleet: Path, keys: Path) -> None:
        """Create the publisher. `fleet`: the folder with `trust.yaml`; `keys`: the private keys of the online roles."""
        self._fleet = fleet
        self._keys = keys
        self._folder = PublishedFolder(fleet)

    def check(self) -> None:
        """Check at start that the folder of keys has one for every online role. Raises ConfigError."""
        self._signers(self._trust())

    def published(self) -> dict[str, RolloutPlan]:
        """Return the newest signed plan of each cohort, even if its publication was interrupted."""
        return published_plans(self._folder)

    def manifest(self, bundle: str) -> BundleManifest | None:
        """Return the manifest of a signed bundle; None if the bundle is not signed."""
        metadata = self._folder.targets("targets")
        target = None if metadata is None else metadata.signed.targets.get(f"bundles/{bundle}.json")
        return None if target is None else decode_signed(self._folder.read_target(target))

    def blob(self, sha256: str) -> Path:
        return self._folder.blob(sha256)

    def publish(self, plans: Mapping[str, RolloutPlan], now: float, min_version: int = 0) -> tuple[str, ...]:
        """Publish the store's plans, and renew metadata that expires. Idempotent.

        1. Cohorts that the store does not know keep their plan.
        2. A device pinned to a bundle that is no longer signed is held instead, so it keeps the bundle that it runs.
        3. A plan with another unsigned bundle is not published; the plans of other cohorts are.

        Returns the reasons for which a plan was not changed, for operators. `now`: Unix s; `min_version`: see
        `publish_online`.
        """
        trust, current, signed = self._trust(), self.published(), signed_bundles(self._folder)
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
            return tuple(problems)
        signers = self._signers(trust)
        publish_online(trust, self._folder, signers, at, wanted if changed else None, min_version)
        return tuple(problems)

    def sign_order(self, order: ErasureOrder) -> SignedOrder:
        """Sign an order to erase with the key of the role rollout. Raises ConfigError."""
        text, trust = msgspec.json.encode(order), self._trust()
        signature = signer_of(trust, ROLLOUT, self._signers(trust)).sign(text)
        return SignedOrder(order=text.decode(), key=signature.keyid, signature=signature.signature)

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
                raise ConfigError(
                    f"The role {role} needs one of these private keys: {', '.join(names)} (.pem).",
                    where=str(self._keys),
                )
            signers[found[0].name] = load_signer(found[0], None)
        return tuple(signers.values())


def _without_lost_pins(plan: RolloutPlan, signed: frozenset[str]) -> RolloutPlan:
    lost = {device for device, bundle in plan.pins.items() if bundle not in signed}
    if not lost:
        return plan
    pins = {device: bundle for device, bundle in plan.pins.items() if device not in lost}
    return msgspec.structs.replace(plan, pins=pins, holds=plan.holds | lost)


class Plans:
    """Publication of each cohort's plan, and notification of its devices. Idempotent: only differences are written.

    `published` wakes the devices whose polls wait in this process.
    """

    def __init__(
        self, store: Store, folder: Path, publisher: Publisher, published: Callable[[], Awaitable[None]] | None
    ) -> None:
        self._store = store
        self._folder = folder
        self._publisher = publisher
        self._published = published
        self._fleet: FleetDoc | None = None

    async def publish(self, newest: Sequence[RolloutRecord], now: float, devices: Mapping[str, int]) -> tuple[str, ...]:
        """Publish the plans of these rollouts, renew expiring metadata, and notify the devices.

        Returns the reasons for which a plan was not published. Raises StoreUnavailable, CausewayError if keys or
        signatures are missing, or OSError.

        Args:
            newest: The newest begun rollout of each cohort.
            now: Unix seconds.
            devices: The number of devices by cohort.
        """
        async with self._store.read() as connection:
            decided = await pins_and_holds(connection)
        plans = {}
        for record in newest:
            pins, holds = decided.get(record.rollout.cohort, ({}, frozenset()))
            plans[record.rollout.cohort] = plan_of(record.rollout, pins, holds)
        if not plans and not await to_thread.run_sync(self._publisher.published):
            return ()  # no cohort has begun a rollout
        # After a restored backup devices have seen newer metadata: once an operator has decided, publish a newer
        # version.
        least = int(now) if any(record.acknowledged for record in newest) else 0
        problems = await to_thread.run_sync(self._publisher.publish, plans, now, least)
        await self._tell({record.rollout.cohort: record.rollout.state in REVERTING for record in newest}, devices)
        return problems

    async def _tell(self, reverting: Mapping[str, bool], devices: Mapping[str, int]) -> None:
        """Wake the devices of each cohort whose published plan has changed since they were last woken."""
        published = await to_thread.run_sync(self._publisher.published)
        async with self._store.read() as connection:
            generations = await read_generations(connection)
        is_any_new = False
        for cohort, plan in published.items():
            doc, rate = self.cohort_doc(cohort), self.records_per_hour(cohort, devices.get(cohort, 0))
            windows, digest = maintenance_windows(doc.rollout), hashlib.sha256(encode_canonical(plan)).hexdigest()
            pace = CohortPace(windows, doc.rollout.per_site, reverting.get(cohort, False), digest, rate)
            before = generations[cohort].pace if cohort in generations else None
            if before == pace:
                continue
            async with self._store.write() as connection:
                if before is not None and before.plan == digest:
                    await set_pace(connection, cohort, pace)
                else:
                    await advance(connection, cohort, pace)
            is_any_new = True
        if is_any_new and self._published is not None:
            await self._published()

    def records_per_hour(self, cohort: str, devices: int) -> float:
        """Return the records that a device may send per hour: its share, rounded down to a power of two."""
        rate = self.cohort_doc(cohort).replay.records_per_day / 24.0 / max(1, devices)
        if self._fleet is None or cohort not in self._fleet.cohorts:
            return 0.0  # no signer has agreed to such a cohort
        return 2.0 ** math.floor(math.log2(rate)) if rate else 0.0

    def cohort_doc(self, cohort: str) -> CohortDoc:
        """Return the cohort in `fleet.yaml` (with errors: of the last valid one); the defaults if it is gone."""
        try:
            text = (self._folder / FLEET_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        self._fleet = read_struct(text, FLEET_FILE, FleetDoc)[0] or self._fleet
        cohorts: Mapping[str, CohortDoc] = {} if self._fleet is None else self._fleet.cohorts
        return cohorts.get(cohort) or CohortDoc(policy="")


def newest_begun(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """Return each cohort's newest rollout that has begun, whose plan is the cohort's. `records`: newest first."""
    found: dict[str, RolloutRecord] = {}
    for record in records:
        if record.rollout.has_begun:
            found.setdefault(record.rollout.cohort, record)
    return list(found.values())
