"""A bundle from a medium, for a device without a network: verified as from the network, taken by the agent itself."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from causeway_server.edge_node.agent.link.control_plane import ControlPlane
from causeway_server.edge_node.agent.link.identity import Identity
from causeway_server.edge_node.agent.link.offline_media import Imported, ImportFailed, import_medium
from causeway_server.edge_node.agent.source import SourceWithImport
from causeway_server.router.bundle.protocol import DeviceState
from causeway_server.router.bundle.refusals import (
    BundleAltered,
    EndlessData,
    MetadataRollback,
    TooFewSignatures,
    UpdateRefused,
    UpdateUnavailable,
)
from tests.edge_node.agent.fleet import Publisher, TestDevice

pytestmark = pytest.mark.slow


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "fleet")


def identity_of(publisher: Publisher) -> Identity:
    return Identity(
        device="device-1",
        tenant="stores",
        cohort="kiosk",
        fleet="retail",
        url="https://fleet.example",
        root=publisher.root,
        joined=0.0,
    )


def take(device: TestDevice, medium: Path, publisher: Publisher | None = None) -> Imported:
    return import_medium(device.folder, medium, identity_of(publisher or device.publisher), device.agent.running)


class Away:
    """A control plane that cannot be reached."""

    def __init__(self) -> None:
        self.asked = 0

    async def fetch(self, path: str, offset: int = 0) -> AsyncIterator[bytes]:
        self.asked += 1
        raise OSError("no network")
        yield b""


def as_folder(published: Path, place: Path) -> Path:
    return Path(shutil.copytree(published, place / "stick" / "fleet" / "published"))


def as_tar(published: Path, place: Path) -> Path:
    with tarfile.open(place / "fleet.tar.gz", "w:gz") as archive:
        archive.add(published, "published")
    return place / "fleet.tar.gz"


def as_zip(published: Path, place: Path) -> Path:
    return Path(shutil.make_archive(str(place / "fleet"), "zip", published))


@pytest.mark.parametrize("pack", [as_folder, as_tar, as_zip])
async def test_a_device_without_a_network_takes_a_bundle_from_a_stick(
    publisher: Publisher, tmp_path: Path, pack: Callable[[Path, Path], Path]
) -> None:
    away = Away()
    now = [0.0]
    bundle = publisher.release()
    device = TestDevice(tmp_path / "state", publisher)
    source = SourceWithImport(away, device.folder, lambda: now[0])
    device.source = source
    device.start()
    await device.agent.advance()
    await device.agent.advance()
    assert (device.agent.state, device.agent.row.code) == (DeviceState.IDLE, "update_unavailable")
    assert take(device, pack(publisher.folder, tmp_path)) == Imported(bundle, serial=1, blobs=2)
    assert source.wanted == bundle
    before = away.asked
    await device.change()
    assert device.agent.running == bundle
    assert away.asked - before <= 2, "the time-out of the network is waited for once, not for each file"
    source.remove()
    assert not source.stamp


async def test_blobs_that_the_device_has_are_not_needed(publisher: Publisher, tmp_path: Path) -> None:
    publisher.release()
    device = TestDevice(tmp_path / "state", publisher)
    await device.change()
    newer = publisher.release()
    medium = as_folder(publisher.folder, tmp_path)
    for blob in (device.folder / "store" / "blobs").iterdir():
        (medium / "blobs" / blob.name).unlink()
    assert take(device, medium.parent.parent) == Imported(newer, serial=2, blobs=1)


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        (lambda blob: blob.write_bytes(b"x" * blob.stat().st_size), BundleAltered),
        (lambda blob: blob.write_bytes(blob.read_bytes()[:-1]), BundleAltered),
        (lambda blob: blob.write_bytes(blob.read_bytes() + b"x"), EndlessData),
        (lambda blob: blob.unlink(), UpdateUnavailable),
    ],
)
async def test_a_damaged_stick_is_refused_whole(
    publisher: Publisher, tmp_path: Path, damage: Callable[[Path], None], refusal: type[UpdateRefused]
) -> None:
    publisher.release()
    device = TestDevice(tmp_path / "state", publisher)
    medium = as_folder(publisher.folder, tmp_path)
    damage(medium / "blobs" / publisher.manifest().policy.sha256)
    with pytest.raises(refusal):
        take(device, medium)
    assert not any(path.name.startswith("import") for path in device.folder.iterdir())


async def test_another_fleets_stick_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    publisher.release()
    other = Publisher(tmp_path / "other")
    other.release()
    device = TestDevice(tmp_path / "state", publisher)
    with pytest.raises(UpdateRefused) as caught:
        take(device, other.folder)
    assert isinstance(caught.value, TooFewSignatures | UpdateRefused)
    assert not (device.folder / "import").exists()


async def test_an_older_stick_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    publisher.release()
    old = as_folder(publisher.folder, tmp_path)
    publisher.release()
    device = TestDevice(tmp_path / "state", publisher)
    await device.change()
    with pytest.raises(MetadataRollback):
        take(device, old)


async def test_a_damaged_stick_leaves_the_earlier_import(publisher: Publisher, tmp_path: Path) -> None:
    bundle = publisher.release()
    device = TestDevice(tmp_path / "state", publisher)
    take(device, publisher.folder)
    medium = as_folder(publisher.folder, tmp_path)
    (medium / "tuf" / "metadata" / "timestamp.json").write_bytes(b"{")
    with pytest.raises(UpdateRefused):
        take(device, medium)
    assert SourceWithImport(Away(), device.folder, lambda: 0.0).wanted == bundle


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04broken"])
def test_a_file_that_is_no_medium_is_said(publisher: Publisher, tmp_path: Path, content: bytes) -> None:
    publisher.release()
    (tmp_path / "stick").write_bytes(content)
    device = TestDevice(tmp_path / "state", publisher)
    with pytest.raises(ImportFailed) as failed:
        take(device, tmp_path / "stick")
    assert len(str(failed.value).splitlines()) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImportFailed, match=r"timestamp\.json"):
        take(device, tmp_path / "empty")


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "tuf/../../escaped", "tuf\\..\\escaped"])
def test_names_that_climb_are_left_out(publisher: Publisher, tmp_path: Path, name: str) -> None:
    publisher.release()
    medium = as_zip(publisher.folder, tmp_path)
    with zipfile.ZipFile(medium, "a") as archive:
        archive.writestr(name, "x")
    device = TestDevice(tmp_path / "state", publisher)
    take(device, medium)
    assert not list(tmp_path.rglob("*escaped*"))
    link = tarfile.TarInfo("tuf/metadata/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "links.tar", "w") as links:
        links.add(publisher.folder, "published")
        links.addfile(link, io.BytesIO())
    take(device, tmp_path / "links.tar")
    assert not list(device.folder.rglob("link"))


async def test_the_network_comes_first_for_metadata_and_the_stick_for_blobs(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.release()
    device = TestDevice(tmp_path / "state", publisher)
    take(device, publisher.folder)
    (device.folder / "import" / "tuf" / "metadata" / "timestamp.json").write_bytes(b"from the stick")

    class Network(ControlPlane):
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def fetch(self, path: str, offset: int = 0):  # type: ignore[no-untyped-def]
            self.asked.append(path)
            yield b"from the network"

    network = Network()
    source = SourceWithImport(network, device.folder, lambda: 0.0)
    assert [chunk async for chunk in source.fetch("tuf/metadata/timestamp.json")] == [b"from the network"]
    blob = f"blobs/{publisher.manifest().policy.sha256}"
    assert b"".join([chunk async for chunk in source.fetch(blob, 3)]) == (publisher.folder / blob).read_bytes()[3:]
    assert network.asked == ["tuf/metadata/timestamp.json"]
