"""A box refuses each attack on its source with a code of its own, and accepts what is right before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, TargetFile, Targets

from causeway_server.edge_node.agent.source import DownloadBounds
from causeway_server.edge_node.agent.verifier import Fetch, UpdateVerifier
from causeway_server.fleet.trust.online import publish_freshness
from causeway_server.router.bundle.manifest import blob_of, encode_canonical
from causeway_server.router.bundle.refusals import UpdateRefused
from tests.fleet.repository.fleets import edit

from .signed_fleet import NOW, SignedFleet, days, plan_of, served, verifier

pytestmark = pytest.mark.slow

TIMESTAMP = "tuf/metadata/timestamp.json"


@pytest.fixture
def fleet(tmp_path: Path) -> SignedFleet:
    return SignedFleet(tmp_path / "fleet")


@pytest.fixture
def box(tmp_path: Path, fleet: SignedFleet) -> Callable[..., UpdateVerifier]:
    """One box: each call is its next update, over the same state, from this source."""

    def update(replaced: dict[str, bytes] | None = None, fetch: Fetch | None = None) -> UpdateVerifier:
        return verifier(tmp_path / "box", fleet.root, fetch or served(fleet.published.path, replaced))

    return update


Box = Callable[..., UpdateVerifier]


def file(fleet: SignedFleet, path: str) -> bytes:
    return (fleet.published.path / path).read_bytes()


def refused(update: Callable[[], object]) -> str:
    with pytest.raises(UpdateRefused) as caught:
        update()
    return caught.value.code


def test_a_box_gets_its_plan_and_its_bundle(fleet: SignedFleet, box: Box) -> None:
    bundle = fleet.release()
    update = box()
    update.refresh()
    plan = update.plan("kiosk")
    assert plan == plan_of(bundle)
    assert update.manifest(bundle, "0.1.0").cohort == "kiosk"
    assert update.plan("others") is None


def test_an_update_twice_is_fine(fleet: SignedFleet, box: Box) -> None:
    fleet.release()
    box().refresh()
    box().refresh()
    fleet.publish()
    box().refresh()


def test_rollback(fleet: SignedFleet, box: Box) -> None:
    """Older, rightly signed metadata."""
    fleet.release()
    old = file(fleet, TIMESTAMP)
    fleet.publish()
    box().refresh()
    assert refused(box({TIMESTAMP: old}).refresh) == "metadata_rollback"
    box().refresh()


@pytest.mark.parametrize("lost", ["timestamp.json", "snapshot.json", "both"])
def test_rollback_after_the_box_lost_metadata(fleet: SignedFleet, box: Box, tmp_path: Path, lost: str) -> None:
    """A power cut truncated python-tuf's own copies; the floor was synced."""
    fleet.release()
    old = file(fleet, TIMESTAMP)
    fleet.publish()
    box().refresh()
    for name in ("timestamp.json", "snapshot.json") if lost == "both" else (lost,):
        (tmp_path / "box" / name).write_bytes(b"")
    assert refused(box({TIMESTAMP: old}).refresh) == "metadata_rollback"


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"[]", b'{"root": "x"}'])
@pytest.mark.parametrize("name", ["floor.json", "timestamp.json", "snapshot.json", "targets.json", "root.json"])
def test_damaged_state_heals(fleet: SignedFleet, box: Box, tmp_path: Path, name: str, content: bytes) -> None:
    """No damage of one file on the box's disk keeps it from the next update."""
    bundle = fleet.release()
    box().refresh()
    path = tmp_path / "box" / name
    path.unlink()
    path.write_bytes(content)
    update = box()
    update.refresh()
    assert update.plan("kiosk") == plan_of(bundle)


def test_freeze(fleet: SignedFleet, box: Box) -> None:
    """The source never brings anything newer, until the timestamp has expired."""
    fleet.release(now=NOW - days(3))
    assert refused(box().refresh) == "metadata_frozen"


@pytest.mark.parametrize(("age", "role"), [(8, "rollout"), (91, "targets"), (366, "root")])
def test_an_expired_role(fleet: SignedFleet, box: Box, age: int, role: str) -> None:
    """Snapshot and timestamp are fresh, signed by a server that is in the attacker's hands."""
    bundle = fleet.release(now=NOW - days(age))
    fleet.publish(plan_of(bundle))
    if role == "rollout":
        expire_rollout(fleet)

    def update() -> None:
        ready = box()
        ready.refresh()
        ready.plan("kiosk")

    assert refused(update) == "role_expired"


def expire_rollout(fleet: SignedFleet) -> None:
    """Sign the rollout as if a week ago, below a fresh snapshot."""
    rollout = fleet.published.targets("rollout")
    assert rollout is not None
    rollout.signed.expires = (NOW - days(1)).replace(microsecond=0)
    replace_rollout(fleet, rollout)


def replace_rollout(fleet: SignedFleet, rollout: Metadata[Targets], *signers: str) -> None:
    """Put this rollout under a fresh snapshot and timestamp: all that the online keys can do."""
    rollout.signatures.clear()
    for name in signers or ("server",):
        rollout.sign(fleet.signer(name), append=True)
    fleet.published.write_metadata("rollout", rollout)
    reseal(fleet)


def reseal(fleet: SignedFleet) -> None:
    publish_freshness(fleet.trust, fleet.published, [fleet.signer("server")], NOW)


@pytest.mark.parametrize("role", ["snapshot", "targets", "rollout"])
def test_mix_and_match(fleet: SignedFleet, box: Box, role: str) -> None:
    """A rightly signed file of another release in the place of the one that is named."""
    fleet.release()
    old = file(fleet, f"tuf/metadata/1.{role}.json")
    edit(fleet.path / "fleet.yaml", "engine.threads: 4", "engine.threads: 2")
    fleet.release()
    update = box({f"tuf/metadata/2.{role}.json": old})

    def attack() -> None:
        update.refresh()
        update.plan("kiosk")

    assert refused(attack) == "metadata_mixed"


def test_endless_metadata(fleet: SignedFleet, box: Box) -> None:
    fleet.release()

    def endless(path: str) -> Iterator[bytes]:
        if path != TIMESTAMP:
            yield from served(fleet.published.path)(path)
            return
        while True:
            yield b" " * 4096

    assert refused(box(fetch=endless).refresh) == "endless_data"


def test_an_endless_bundle(fleet: SignedFleet, box: Box) -> None:
    bundle = fleet.release()
    path = f"tuf/targets/bundles/{bundle}.{bundle}.json"
    update = box({path: file(fleet, path) + b" "})
    update.refresh()
    assert refused(lambda: update.manifest(bundle, "0.1.0")) == "endless_data"


def test_a_wrong_hash(fleet: SignedFleet, box: Box) -> None:
    bundle = fleet.release()
    path = f"tuf/targets/bundles/{bundle}.{bundle}.json"
    update = box({path: file(fleet, path).replace(b'"kiosk"', b'"kiosc"')})
    update.refresh()
    assert refused(lambda: update.manifest(bundle, "0.1.0")) == "bundle_altered"


def test_too_few_signatures(fleet: SignedFleet, box: Box) -> None:
    """One thief of one offline key and of the server's keys signs artifacts of his own."""
    fleet.release()
    artifacts = fleet.published.targets("targets")
    assert artifacts is not None
    artifacts.signatures.clear()
    artifacts.signed.version += 1
    for name in ("anna", "mallory", "server"):
        artifacts.sign(fleet.signer(name), append=True)
    fleet.published.write_metadata("targets", artifacts)
    reseal(fleet)
    assert refused(box().refresh) == "too_few_signatures"


def test_a_signature_of_another_key_on_the_rollout(fleet: SignedFleet, box: Box) -> None:
    fleet.release()
    rollout = fleet.published.targets("rollout")
    assert rollout is not None
    replace_rollout(fleet, rollout, "mallory", "anna")
    update = box()
    update.refresh()
    assert refused(lambda: update.plan("kiosk")) == "too_few_signatures"


@pytest.mark.parametrize("field", ["to_bundle", "from_bundle", "pins"])
def test_a_rollout_of_an_unsigned_bundle(fleet: SignedFleet, box: Box, field: str) -> None:
    """The online keys alone cannot bring a bundle of their own, not even for one pinned box."""
    bundle = fleet.release()
    plan = plan_of(bundle, **{field: {"box-1": "a" * 64} if field == "pins" else "a" * 64})
    sign_plan(fleet, "rollouts/kiosk.json", encode_canonical(plan))
    update = box()
    update.refresh()
    assert refused(lambda: update.plan("kiosk")) == "bundle_not_signed"


def sign_plan(fleet: SignedFleet, path: str, content: bytes) -> None:
    rollout = fleet.published.targets("rollout")
    assert rollout is not None
    rollout.signed.targets[path] = TargetFile.from_data(path, content, ["sha256"])
    fleet.published.write_target(path, content)
    replace_rollout(fleet, rollout)


def test_a_bundle_signed_by_the_rollout_role(fleet: SignedFleet, box: Box) -> None:
    """Its paths are `rollouts/*`: what it signs elsewhere does not exist."""
    bundle = fleet.release()
    content = file(fleet, f"tuf/targets/bundles/{bundle}.{bundle}.json").replace(b'"serial":1', b'"serial":9')
    own = blob_of(content).sha256
    sign_plan(fleet, f"bundles/{own}.json", content)
    update = box()
    update.refresh()
    assert refused(lambda: update.manifest(own, "0.1.0")) == "bundle_not_signed"


def test_the_plan_of_another_cohort(fleet: SignedFleet, box: Box) -> None:
    bundle = fleet.release()
    sign_plan(fleet, "rollouts/others.json", encode_canonical(plan_of(bundle)))
    update = box()
    update.refresh()
    assert refused(lambda: update.plan("others")) == "bundle_invalid"


def test_a_root_of_other_keys(fleet: SignedFleet, box: Box, tmp_path: Path) -> None:
    """A box keeps to the root of its enrolment, whatever another fleet has signed."""
    fleet.release()
    other = SignedFleet(tmp_path / "other")
    other.release()
    assert refused(box(fetch=served(other.published.path)).refresh) == "too_few_signatures"


def test_garbage(fleet: SignedFleet, box: Box) -> None:
    fleet.release()
    assert refused(box({TIMESTAMP: b"<html>sign in to the Wi-Fi</html>"}).refresh) == "metadata_invalid"
    assert refused(box({TIMESTAMP: b'{"signed": {}, "signatures": []}'}).refresh) == "metadata_invalid"


def test_a_source_without_the_file(fleet: SignedFleet, box: Box) -> None:
    fleet.release()
    (fleet.published.path / TIMESTAMP).unlink()
    assert refused(box().refresh) == "update_unavailable"


def test_a_dead_source(fleet: SignedFleet, box: Box) -> None:
    fleet.release()

    def dead(path: str) -> Iterator[bytes]:
        raise ConnectionRefusedError(path)

    assert refused(box(fetch=dead).refresh) == "update_unavailable"


@pytest.mark.parametrize("bounds", [DownloadBounds(60.0, 10.0, 0.0), DownloadBounds(1e9, 10.0, 256.0)])
def test_a_drip(fleet: SignedFleet, tmp_path: Path, bounds: DownloadBounds) -> None:
    """20 bytes a second never leave a gap that a timeout of the connection would see."""
    fleet.release()
    clock = [0.0]

    def drip(path: str) -> Iterator[bytes]:
        for content in served(fleet.published.path)(path):
            for start in range(0, len(content), 20):
                clock[0] += 1.0
                yield content[start : start + 20]

    box = UpdateVerifier(tmp_path / "box", fleet.root, drip, lambda: clock[0], bounds)
    assert refused(box.refresh) == "download_too_slow"
    assert clock[0] < 62


def test_a_bundle_of_a_later_daemon(fleet: SignedFleet, box: Box) -> None:
    edit(fleet.path / "fleet.yaml", "min_daemon: 0.1.0", "min_daemon: 9.0.0")
    bundle = fleet.release()
    update = box()
    update.refresh()
    assert refused(lambda: update.manifest(bundle, "0.1.0")) == "daemon_too_old"


def test_a_refused_update_leaves_the_box_as_it_was(fleet: SignedFleet, box: Box) -> None:
    bundle = fleet.release()
    box().refresh()
    assert refused(box({TIMESTAMP: b"{}"}).refresh) == "metadata_invalid"
    update = box()
    update.refresh()
    assert update.plan("kiosk") == plan_of(bundle)
