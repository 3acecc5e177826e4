"""Signed metadata that is damaged or cut off, at the control plane, at the source, or on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from causeway_server.edge_node.agent.verifier import UpdateVerifier
from causeway_server.fleet.cli.commands import main
from causeway_server.fleet.controller.publisher import Publisher
from causeway_server.fleet.trust.published import RepositoryInvalid
from causeway_server.router.bundle.refusals import UpdateRefused

from .signed_fleet import NOW, SignedFleet, days, plan_of, served, verifier

DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "no-text": lambda _: b"\xff\xfe",
    "gone": lambda _: None,
}


def damage(path: Path, kind: str) -> None:
    content = DAMAGE[kind](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.fixture
def fleet(tmp_path: Path) -> SignedFleet:
    return SignedFleet(tmp_path / "fleet")


@pytest.fixture
def metadata(fleet: SignedFleet) -> Path:
    return fleet.published.path / "tuf" / "metadata"


def device(fleet: SignedFleet, folder: Path, replaced: dict[str, bytes] | None = None) -> UpdateVerifier:
    return verifier(folder, fleet.root, served(fleet.published.path, replaced))


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("role", ["timestamp", "snapshot"])
@pytest.mark.parametrize("by", ["server", "sign"])
def test_the_control_plane_signs_a_damaged_timestamp_again(
    fleet: SignedFleet, metadata: Path, tmp_path: Path, role: str, kind: str, by: str
) -> None:
    """Also `causeway-fleet sign`. No device takes it for a rollback, however often it was renewed before."""
    bundle = fleet.release()
    for _ in range(3):
        fleet.publish()
    device(fleet, tmp_path / "device").refresh()
    damage(metadata / ("timestamp.json" if role == "timestamp" else "4.snapshot.json"), kind)
    if by == "server":
        publisher = Publisher(fleet.path, fleet.path / "keys")
        assert publisher.publish({}, NOW.timestamp()) == ()
        version = fleet.published.timestamp_version()
        assert publisher.publish({}, NOW.timestamp()) == ()
        assert fleet.published.timestamp_version() == version, "it was signed once"
    else:
        key = str(fleet.path / "keys" / "server.pem")
        signed = CliRunner().invoke(main, ["sign", str(fleet.path), "--key", key])
        assert signed.exit_code == 0, signed.output
    update = device(fleet, tmp_path / "device")
    update.refresh()
    assert update.plan("kiosk") == plan_of(bundle)


@pytest.mark.parametrize("role", ["root", "targets", "rollout"])
def test_what_cannot_be_made_anew_is_named_with_the_way_out(fleet: SignedFleet, metadata: Path, role: str) -> None:
    fleet.release()
    path = max(metadata.glob(f"*.{role}.json"))
    whole = path.read_bytes()
    damage(path, "cut")
    publisher = Publisher(fleet.path, fleet.path / "keys")
    later = (NOW + days(6)).timestamp()
    wanted = rf"{path.name}: The file is damaged or truncated.*Restore it from git, a backup"
    with pytest.raises(RepositoryInvalid, match=wanted):
        publisher.publish({}, later)
    path.write_bytes(whole)
    version = fleet.published.timestamp_version()
    assert publisher.publish({}, later) == ()
    assert fleet.published.timestamp_version() == version + 1


def test_a_pending_file_that_is_damaged_is_removed_and_signed_again(fleet: SignedFleet) -> None:
    fleet.sign("anna")
    damage(fleet.published.pending / "root.json", "cut")
    with pytest.raises(
        RepositoryInvalid, match=r"pending/root\.json: The file is damaged or truncated.*Remove it, and sign again"
    ):
        fleet.sign("ben")
    (fleet.published.pending / "root.json").unlink()
    fleet.sign("ben")


@pytest.mark.parametrize("kind", ["empty", "cut", "zeros", "no-text"])
@pytest.mark.parametrize("role", ["timestamp", "snapshot"])
def test_a_device_refuses_a_damaged_source_says_where_and_takes_the_next_whole_one(
    fleet: SignedFleet, metadata: Path, tmp_path: Path, role: str, kind: str
) -> None:
    fleet.release()
    device(fleet, tmp_path / "device").refresh()
    floor = (tmp_path / "device" / "floor.json").read_bytes()
    fleet.publish()
    name = "timestamp.json" if role == "timestamp" else "2.snapshot.json"
    cut = DAMAGE[kind]((metadata / name).read_bytes())
    assert cut is not None
    with pytest.raises(UpdateRefused, match=rf"^{role}: ") as refused:
        device(fleet, tmp_path / "device", {f"tuf/metadata/{name}": cut}).refresh()
    if role == "timestamp":
        assert refused.value.code == "metadata_invalid"
        assert "the metadata file at the source is damaged or truncated" in refused.value.message
        assert "the operator must check it at the control plane and at any cache before it" in refused.value.message
    assert (tmp_path / "device" / "floor.json").read_bytes() == floor
    device(fleet, tmp_path / "device").refresh()


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["timestamp.json", "snapshot.json", "targets.json", "root.json"])
def test_a_device_fetches_its_own_damaged_copy_anew_and_its_floor_stays(
    fleet: SignedFleet, metadata: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Older metadata, rightly signed, is refused meanwhile."""
    fleet.release()
    old = (metadata / "timestamp.json").read_bytes()
    fleet.publish()
    device(fleet, tmp_path / "device").refresh()
    floor = msgspec.json.decode((tmp_path / "device" / "floor.json").read_bytes())
    damage(tmp_path / "device" / name, kind)
    with pytest.raises(UpdateRefused) as refused:
        device(fleet, tmp_path / "device", {"tuf/metadata/timestamp.json": old}).refresh()
    assert refused.value.code == "metadata_rollback"
    device(fleet, tmp_path / "device").refresh()
    assert msgspec.json.decode((tmp_path / "device" / "floor.json").read_bytes()) == floor
    assert (tmp_path / "device" / name).stat().st_size > 0
