"""A fleet with its keys in a folder, signed as its people would: anna, ben and carla offline, a server online."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from securesystemslib.signer import CryptoSigner

from causeway_server.edge_node.agent.source import DownloadBounds
from causeway_server.edge_node.agent.verifier import BOUNDS, Fetch, UpdateVerifier
from causeway_server.fleet.repository.folder import check_fleet
from causeway_server.fleet.trust.keys import Trust, load_signer, new_key, read_trust
from causeway_server.fleet.trust.offline import RoleReport, sign_offline, signed_manifests
from causeway_server.fleet.trust.online import publish_online
from causeway_server.fleet.trust.published import PublishedFolder
from causeway_server.router.bundle.manifest import RolloutPlan, bundle_id
from tests.fleet.repository.fleets import write_fleet

NOW = datetime.now(UTC)
PEOPLE = ("anna", "ben", "carla")
TRUST = """\
version: 1
root: {keys: [keys/anna.pub, keys/ben.pub, keys/carla.pub], threshold: 2, expires: 365d}
artifacts: {keys: [keys/anna.pub, keys/ben.pub, keys/carla.pub], threshold: 2, expires: 90d}
rollout: {keys: [keys/server.pub], expires: 7d}
snapshot: {keys: [keys/server.pub], expires: 7d}
timestamp: {keys: [keys/server.pub], expires: 2d}
"""


class SignedFleet:
    """The folder, the keys, and what the programs of the fleet do with them."""

    def __init__(self, path: Path) -> None:
        self.path = write_fleet(path)
        for name in (*PEOPLE, "server", "mallory"):
            new_key(path / "keys", name, None)
        (path / "trust.yaml").write_text(TRUST)
        self.published = PublishedFolder(path)

    @property
    def trust(self) -> Trust:
        trust, problems = read_trust(self.path)
        assert trust is not None, problems
        return trust

    def signer(self, name: str) -> CryptoSigner:
        return load_signer(self.path / "keys" / f"{name}.pem", None)

    def sign(self, *names: str, now: datetime = NOW) -> tuple[RoleReport, ...]:
        signers = [self.signer(name) for name in names]
        return sign_offline(check_fleet(self.path), self.trust, self.published, signers, now)

    def publish(self, *plans: RolloutPlan, now: datetime = NOW) -> int:
        by_cohort = {plan.cohort: plan for plan in plans} if plans else None
        return publish_online(self.trust, self.published, [self.signer("server")], now, by_cohort)

    def release(self, now: datetime = NOW) -> str:
        """Sign with two keys and give the kiosks their newest bundle; return its id."""
        self.sign("anna", "ben", now=now)
        bundle = bundle_id(signed_manifests(self.published)["kiosk"])
        self.publish(plan_of(bundle), now=now)
        return bundle

    @property
    def root(self) -> bytes:
        return (self.published.path / "tuf" / "metadata" / "1.root.json").read_bytes()


def plan_of(bundle: str, **changes: object) -> RolloutPlan:
    plan = RolloutPlan("kiosk", "r-1", None, bundle, "salt", 1000, {}, frozenset())
    return msgspec.structs.replace(plan, **changes)


def served(folder: Path, replaced: dict[str, bytes] | None = None) -> Fetch:
    """A source that serves the folder, except for the files that an attacker has replaced."""

    def fetch(path: str) -> Iterator[bytes]:
        if replaced and path in replaced:
            yield replaced[path]
            return
        yield (folder / path).read_bytes()

    return fetch


def verifier(state: Path, root: bytes, fetch: Fetch, bounds: DownloadBounds = BOUNDS) -> UpdateVerifier:
    return UpdateVerifier(state, root, fetch, lambda: 0.0, bounds)


def days(count: float) -> timedelta:
    return timedelta(days=count)
