"""Signatures are collected one by one; nothing is published before its threshold is met."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.fleet.trust.keys import KeyInvalid, is_encrypted, list_keys, load_signer, new_key, read_trust
from causeway_server.fleet.trust.offline import signed_manifests
from causeway_server.fleet.trust.online import OnlineKeyMissing, SignaturesMissing, publish_online
from causeway_server.router.bundle.manifest import bundle_id
from causeway_server.router.bundle.refusals import BundleNotSigned
from tests.fleet.repository.fleets import edit

from .signed_fleet import NOW, SignedFleet, days, plan_of, served, verifier


@pytest.fixture
def fleet(tmp_path: Path) -> SignedFleet:
    return SignedFleet(tmp_path / "fleet")


def test_one_of_two_signatures_publishes_nothing(fleet: SignedFleet) -> None:
    (root,) = fleet.sign("anna")
    assert (root.role, root.signed, root.waiting, root.published) == ("root", ("anna",), ("ben", "carla"), False)
    assert not (fleet.published.path / "tuf" / "metadata").exists()
    with pytest.raises(SignaturesMissing):
        fleet.publish()


def test_only_the_online_keys_make_it_visible(fleet: SignedFleet) -> None:
    fleet.sign("anna", "ben")
    with pytest.raises(OnlineKeyMissing, match="server"):
        publish_online(fleet.trust, fleet.published, [fleet.signer("anna")], NOW)
    assert fleet.published.newest("snapshot") is None


def test_signatures_of_two_sittings_add_up(fleet: SignedFleet) -> None:
    """Carla signs later, on her own machine, exactly the bytes that anna signed."""
    fleet.sign("anna")
    root, artifacts = fleet.sign("carla", now=NOW + days(1))
    assert (root.published, root.signed) == (True, ("anna", "carla"))
    assert (artifacts.published, artifacts.signed) == (False, ("carla",))
    _, artifacts = fleet.sign("ben", now=NOW + days(2))
    assert (artifacts.published, artifacts.signed) == (True, ("ben", "carla"))
    assert list((fleet.path / "pending").iterdir()) == []
    fleet.publish(now=NOW)


def test_the_same_key_twice_counts_once(fleet: SignedFleet) -> None:
    fleet.sign("anna")
    (root,) = fleet.sign("anna", "mallory", "server")
    assert (root.signed, root.published) == (("anna",), False)


def test_nothing_new_needs_no_signature(fleet: SignedFleet) -> None:
    fleet.release()
    reports = fleet.sign(now=NOW + days(3))
    assert [(one.version, one.published) for one in reports] == [(1, True), (1, True)]
    assert not (fleet.path / "pending").exists()


def test_metadata_is_renewed_in_its_last_third(fleet: SignedFleet) -> None:
    fleet.release()
    root, artifacts = fleet.sign("anna", "ben", now=NOW + days(70))
    assert (root.version, artifacts.version, artifacts.published) == (1, 2, True)


@pytest.mark.slow
def test_another_content_needs_all_signatures_again(fleet: SignedFleet) -> None:
    fleet.release()
    edit(fleet.path / "fleet.yaml", "engine.threads: 4", "engine.threads: 2")
    fleet.sign("anna")
    edit(fleet.path / "fleet.yaml", "engine.threads: 2", "engine.threads: 1")
    _, artifacts = fleet.sign("ben")
    assert (artifacts.signed, artifacts.published) == (("ben",), False)
    _, artifacts = fleet.sign("anna")
    assert artifacts.published
    manifest = signed_manifests(fleet.published)["kiosk"]
    assert (manifest.serial, manifest.settings["engine.threads"]) == (2, 1)


@pytest.mark.slow
def test_a_new_root_needs_the_old_keys_and_the_new(fleet: SignedFleet, tmp_path: Path) -> None:
    """A device that trusts only the first root follows."""
    fleet.release()
    first = fleet.root
    new_key(fleet.path / "keys", "dora", None)
    trust = (fleet.path / "trust.yaml").read_text()
    (fleet.path / "trust.yaml").write_text(trust.replace("keys/anna.pub, keys/ben.pub", "keys/anna.pub, keys/dora.pub"))
    root, _ = fleet.sign("anna", "dora")
    assert (root.version, root.published) == (2, False)
    root, artifacts = fleet.sign("ben")
    assert (root.version, root.published) == (2, True)
    assert not artifacts.published
    with pytest.raises(SignaturesMissing):
        fleet.publish()
    _, artifacts = fleet.sign("anna", "carla")
    assert artifacts.published
    fleet.publish()
    device = verifier(tmp_path / "device", first, served(fleet.published.path))
    device.refresh()
    assert device.plan("kiosk") is not None


def test_a_rollout_of_an_unsigned_bundle_is_not_published(fleet: SignedFleet) -> None:
    fleet.release()
    with pytest.raises(BundleNotSigned):
        fleet.publish(plan_of("a" * 64))


@pytest.mark.slow
def test_earlier_bundles_stay_signed(fleet: SignedFleet, tmp_path: Path) -> None:
    first = fleet.release()
    edit(fleet.path / "fleet.yaml", "engine.threads: 4", "engine.threads: 2")
    second = fleet.release()
    assert first != second == bundle_id(signed_manifests(fleet.published)["kiosk"])
    fleet.publish(plan_of(second, from_bundle=first))
    device = verifier(tmp_path / "device", fleet.root, served(fleet.published.path))
    device.refresh()
    assert device.manifest(first, "0.1.0").serial == 1


def test_every_blob_can_be_fetched(fleet: SignedFleet) -> None:
    fleet.release()
    for manifest in signed_manifests(fleet.published).values():
        assert fleet.published.missing_blobs(manifest) == []


# --- key files -------------------------------------------------------------------------------------------------------


def test_a_private_key_is_for_its_owner_only(tmp_path: Path) -> None:
    new_key(tmp_path, "anna", None)
    assert (tmp_path / "anna.pem").stat().st_mode & 0o777 == 0o600
    (tmp_path / "anna.pem").chmod(0o640)
    with pytest.raises(KeyInvalid, match="readable by others"):
        load_signer(tmp_path / "anna.pem", None)


def test_a_passphrase_encrypts_the_key(tmp_path: Path) -> None:
    new_key(tmp_path, "anna", b"correct horse")
    assert is_encrypted(tmp_path / "anna.pem")
    assert load_signer(tmp_path / "anna.pem", b"correct horse").public_key.keyid == list_keys(tmp_path)[0].keyid
    with pytest.raises(KeyInvalid, match="passphrase is wrong"):
        load_signer(tmp_path / "anna.pem", b"battery staple")
    with pytest.raises(KeyInvalid, match="needs its passphrase"):
        load_signer(tmp_path / "anna.pem", None)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    new_key(tmp_path, "anna", None)
    before = (tmp_path / "anna.pem").read_bytes()
    with pytest.raises(FileExistsError):
        new_key(tmp_path, "anna", None)
    assert (tmp_path / "anna.pem").read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("threshold: 2, expires: 365d", "threshold: 4, expires: 365d", "but lists only 3 different keys"),
        ("keys/carla.pub], threshold: 2, expires: 365d", "keys/server.pub]", "cannot be the key of an offline role"),
        ("keys/ben.pub", "keys/missing.pub", "Cannot read the public key"),
        ("expires: 2d", "expires: soon", "a time such as"),
        ("timestamp:", "timestmp:", "did you mean `timestamp`"),
    ],
)
def test_a_mistake_in_trust_yaml_is_told_with_its_key(fleet: SignedFleet, old: str, new: str, words: str) -> None:
    edit(fleet.path / "trust.yaml", old, new)
    trust, problems = read_trust(fleet.path)
    assert trust is None
    assert words in problems[0].message
    assert problems[0].location.line > 0
