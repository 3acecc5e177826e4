"""A device refuses each attack on its source with a code of its own, and accepts what is right before and after."""

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
def device(tmp_path: Path, fleet: SignedFleet) -> Callable[..., UpdateVerifier]:
    """One device: each call is its next update, over the same state, from this source."""

    def update(replaced: dict[str, bytes] | None = None, fetch: Fetch | None = None) -> UpdateVerifier:
        return verifier(tmp_path / "device", fleet.root, fetch or served(fleet.published.path, replaced))

    return update


Device = Callable[..., UpdateVerifier]


def file(fleet: SignedFleet, path: str) -> bytes:
    return (fleet.published.path / path).read_bytes()


def refused(update: Callable[[], object]) -> str:
    with pytest.raises(UpdateRefused) as caught:
        update()
    return caught.value.code


def test_a_device_gets_its_plan_and_its_bundle(fleet: SignedFleet, device: Device) -> None:
    bundle = fleet.release()
    update = device()
    update.refresh()
    plan = update.plan("kiosk")
    assert plan == plan_of(bundle)
    assert update.manifest(bundle, "0.1.0").cohort == "kiosk"
    assert update.plan("others") is None


def test_an_update_twice_is_fine(fleet: SignedFleet, device: Device) -> None:
    fleet.release()
    device().refresh()
    device().refresh()
    fleet.publish()
    device().refresh()


def test_rollback(fleet: SignedFleet, device: Device) -> None:
    """Older, rightly signed metadata."""
    fleet.release()
    old = file(fleet, TIMESTAMP)
    fleet.publish()
    device().refresh()
    assert refused(device({TIMESTAMP: old}).refresh) == "metadata_rollback"
    device().refresh()


@pytest.mark.parametrize("lost", ["timestamp.json", "snapshot.json", "both"])
def test_rollback_after_the_device_lost_metadata(fleet: SignedFleet, device: Device, tmp_path: Path, lost: str) -> None:
    """A power cut truncated python-tuf's own copies; the floor was synced."""
    fleet.release()
    old = file(fleet, TIMESTAMP)
    fleet.publish()
    device().refresh()
    for name in ("timestamp.json", "snapshot.json") if lost == "both" else (lost,):
        (tmp_path / "device" / name).write_bytes(b"")
    assert refused(device({TIMESTAMP: old}).refresh) == "metadata_rollback"


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"[]", b'{"root": "x"}'])
@pytest.mark.parametrize("name", ["floor.json", "timestamp.json", "snapshot.json", "targets.json", "root.json"])
def test_damaged_state_heals(fleet: SignedFleet, device: Device, tmp_path: Path, name: str, content: bytes) -> None:
    """No damage of one file on the device's disk keeps it from the next update."""
    bundle = fleet.release()
    device().refresh()
    path = tmp_path / "device" / name
    path.unlink()
    path.write_bytes(content)
    update = device()
    update.refresh()
    assert update.plan("kiosk") == plan_of(bundle)


def test_freeze(fleet: SignedFleet, device: Device) -> None:
    """The source never brings anything newer, until the timestamp has expired."""
    fleet.release(now=NOW - days(3))
    assert refused(device().refresh) == "metadata_frozen"


@pytest.mark.parametrize(("age", "role"), [(8, "rollout"), (91, "targets"), (366, "root")])
def test_an_expired_role(fleet: SignedFleet, device: Device, age: int, role: str) -> None:
    """Snapshot and timestamp are fresh, signed by a server that is in the attacker's hands."""
    bundle = fleet.release(now=NOW - days(age))
    fleet.publish(plan_of(bundle))
    if role == "rollout":
        expire_rollout(fleet)

    def update() -> None:
        ready = device()
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
def test_mix_and_match(fleet: SignedFleet, device: Device, role: str) -> None:
    """A rightly signed file of another release in the place of the one that is named."""
    fleet.release()
    old = file(fleet, f"tuf/metadata/1.{role}.json")
    edit(fleet.path / "fleet.yaml", "engine.threads: 4", "engine.threads: 2")
    fleet.release()
    update = device({f"tuf/metadata/2.{role}.json": old})

    def attack() -> None:
        update.refresh()
        update.plan("kiosk")

    assert refused(attack) == "metadata_mixed"


def test_endless_metadata(fleet: SignedFleet, device: Device) -> None:
    fleet.release()

    def endless(path: str) -> Iterator[bytes]:
        if path != TIMESTAMP:
            yield from served(fleet.published.path)(path)
            return
        while True:
            yield b" " * 4096

    assert refused(device(fetch=endless).refresh) == "endless_data"


def test_an_endless_bundle(fleet: SignedFleet, device: Device) -> None:
    bundle = fleet.release()
    path = f"tuf/targets/bundles/{bundle}.{bundle}.json"
    update = device({path: file(fleet, path) + b" "})
    update.refresh()
    assert refused(lambda: update.manifest(bundle, "0.1.0")) == "endless_data"


def test_a_wrong_hash(fleet: SignedFleet, device: Device) -> None:
    bundle = fleet.release()
    path = f"tuf/targets/bundles/{bundle}.{bundle}.json"
    update = device({path: file(fleet, path).replace(b'"kiosk"', b'"kiosc"')})
    update.refresh()
    assert refused(lambda: update.manifest(bundle, "0.1.0")) == "bundle_altered"


def test_too_few_signatures(fleet: SignedFleet, device: Device) -> None:
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
    assert refused(device().refresh) == "too_few_signatures"


def test_a_signature_of_another_key_on_the_rollout(fleet: SignedFleet, device: Device) -> None:
    fleet.release()
    rollout = fleet.published.targets("rollout")
    assert rollout is not None
    replace_rollout(fleet, rollout, "mallory", "anna")
    update = device()
    update.refresh()
    assert refused(lambda: update.plan("kiosk")) == "too_few_signatures"


@pytest.mark.parametrize("field", ["to_bundle", "from_bundle", "pins"])
def test_a_rollout_of_an_unsigned_bundle(fleet: SignedFleet, device: Device, field: str) -> None:
    """The online keys alone cannot bring a bundle of their own, not even for one pinned device."""
    bundle = fleet.release()
    plan = plan_of(bundle, **{field: {"device-1": "a" * 64} if field == "pins" else "a" * 64})
    sign_plan(fleet, "rollouts/kiosk.json", encode_canonical(plan))
    update = device()
    update.refresh()
    assert refused(lambda: update.plan("kiosk")) == "bundle_not_signed"


def sign_plan(fleet: SignedFleet, path: str, content: bytes) -> None:
    rollout = fleet.published.targets("rollout")
    assert rollout is not None
    rollout.signed.targets[path] = TargetFile.from_data(path, content, ["sha256"])
    fleet.published.write_target(path, content)
    replace_rollout(fleet, rollout)


def test_a_bundle_signed_by_the_rollout_role(fleet: SignedFleet, device: Device) -> None:
    """Its paths are `rollouts/*`: what it signs elsewhere does not exist."""
    bundle = fleet.release()
    content = file(fleet, f"tuf/targets/bundles/{bundle}.{bundle}.json").replace(b'"serial":1', b'"serial":9')
    own = blob_of(content).sha256
    sign_plan(fleet, f"bundles/{own}.json", content)
    update = device()
    update.refresh()
    assert refused(lambda: update.manifest(own, "0.1.0")) == "bundle_not_signed"


def test_the_plan_of_another_cohort(fleet: SignedFleet, device: Device) -> None:
    bundle = fleet.release()
    sign_plan(fleet, "rollouts/others.json", encode_canonical(plan_of(bundle)))
    update = device()
    update.refresh()
    assert refused(lambda: update.plan("others")) == "bundle_invalid"


def test_a_root_of_other_keys(fleet: SignedFleet, device: Device, tmp_path: Path) -> None:
    """A device keeps to the root of its enrolment, whatever another fleet has signed."""
    fleet.release()
    other = SignedFleet(tmp_path / "other")
    other.release()
    assert refused(device(fetch=served(other.published.path)).refresh) == "too_few_signatures"


def test_garbage(fleet: SignedFleet, device: Device) -> None:
    fleet.release()
    assert refused(device({TIMESTAMP: b"<html>sign in to the Wi-Fi</html>"}).refresh) == "metadata_invalid"
    assert refused(device({TIMESTAMP: b'{"signed": {}, "signatures": []}'}).refresh) == "metadata_invalid"


def test_a_source_without_the_file(fleet: SignedFleet, device: Device) -> None:
    fleet.release()
    (fleet.published.path / TIMESTAMP).unlink()
    assert refused(device().refresh) == "update_unavailable"


def test_a_dead_source(fleet: SignedFleet, device: Device) -> None:
    fleet.release()

    def dead(path: str) -> Iterator[bytes]:
        raise ConnectionRefusedError(path)

    assert refused(device(fetch=dead).refresh) == "update_unavailable"


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

    device = UpdateVerifier(tmp_path / "device", fleet.root, drip, lambda: clock[0], bounds)
    assert refused(device.refresh) == "download_too_slow"
    assert clock[0] < 62


def test_a_bundle_of_a_later_daemon(fleet: SignedFleet, device: Device) -> None:
    edit(fleet.path / "fleet.yaml", "min_daemon: 0.1.0", "min_daemon: 9.0.0")
    bundle = fleet.release()
    update = device()
    update.refresh()
    assert refused(lambda: update.manifest(bundle, "0.1.0")) == "daemon_too_old"


def test_a_refused_update_leaves_the_device_as_it_was(fleet: SignedFleet, device: Device) -> None:
    bundle = fleet.release()
    device().refresh()
    assert refused(device({TIMESTAMP: b"{}"}).refresh) == "metadata_invalid"
    update = device()
    update.refresh()
    assert update.plan("kiosk") == plan_of(bundle)
