"""Uploads on bad days: a full disk, restarts, kills, damage, and what a deletion leaves."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from causeway_server.edge_node.clock import Clock, system_clock
from causeway_server.edge_node.config.schema import DeviceFilesConfig
from causeway_server.edge_node.files.store import DeviceFileStore, StorageFull
from causeway_server.router.parts.uploads import UploadTerms
from causeway_server.router.types import RoutingHints
from tests.edge_node.cli.test_serve import ready_line, serve
from tests.edge_node.parts.test_fusion import ask
from tests.models.parts.test_files import NOTE
from tests.waiting import until

from .support import ACCEPTING, contents, filing, folder_of
from .test_parts import named

MIB = 1024 * 1024


@pytest.mark.slow
async def test_files_survive_a_restart_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        folder = folder_of(device)
        (stored,) = contents(folder)
        assert [stat.S_IMODE(path.stat().st_mode) for path in (stored, folder)] == [0o600, 0o700]
        assert stat.S_IMODE((folder / "clock.json").stat().st_mode) == 0o600
    async with filing(tmp_path) as (device, client):
        assert await client.files.retrieve(uploaded.id) == uploaded
        assert (await ask(device, named(uploaded.id))).status == 200


async def test_a_deleted_file_is_overwritten_before_its_name_goes(tmp_path: Path) -> None:
    """A second name of the same blocks shows what is left of them."""
    async with filing(tmp_path) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode() * 100_000), purpose="user_data")
        (stored,) = contents(folder_of(device))
        os.link(stored, tmp_path / "blocks")
        assert len((tmp_path / "blocks").read_bytes()) > len(NOTE) * 100_000
        await client.files.delete(uploaded.id)
        left = (tmp_path / "blocks").read_bytes()
        assert left == bytes(len(left))


@pytest.mark.slow
async def test_what_a_killed_daemon_left_is_erased_at_the_start(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        half = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        folder = folder_of(device)
        whole = (folder / half.id).read_bytes()
    (folder / "file-1.draft").write_bytes(whole[:5000])
    (folder / half.id).write_bytes(whole[:-1])
    (folder / "file-4").write_bytes(bytes(len(whole)))
    os.link(folder / "file-1.draft", tmp_path / "blocks")
    (folder / "clock.json").write_bytes(b"{")
    async with filing(tmp_path) as (device, client):
        assert [path.name for path in contents(folder)] == [uploaded.id]
        assert not any((tmp_path / "blocks").read_bytes())
        assert (await ask(device, named(uploaded.id))).status == 200


async def test_a_damaged_file_is_no_part_of_a_request(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        (stored,) = contents(folder_of(device))
        stored.write_bytes(stored.read_bytes()[:-1] + b"?")
        answer = await ask(device, named(uploaded.id))
        assert (answer.status, answer.code) == (503, "file_store_unavailable")
        assert uploaded.id in str(device.parts.problems())
        assert (await client.files.delete(uploaded.id)).deleted


async def test_bounds_are_507_with_what_to_do_and_what_expired_makes_room(tmp_path: Path) -> None:
    bounds = DeviceFilesConfig(accept=True, max_files=2, max_bytes=10_000)
    async with filing(tmp_path, files=bounds) as (device, client):
        first = await client.files.create(file=("a.txt", b"a" * 6000), purpose="user_data")
        with pytest.raises(openai.InternalServerError, match=r"files\.max_bytes") as full:
            await client.files.create(file=("b.txt", b"b" * 6000), purpose="user_data")
        assert full.value.status_code == 507
        await client.files.create(file=("b.txt", b"b"), purpose="user_data")
        with pytest.raises(openai.InternalServerError, match=r"files\.max_files"):
            await client.files.create(file=("c.txt", b"c"), purpose="user_data")
        assert len(contents(folder_of(device))) == 2
        await client.files.delete(first.id)
        await client.files.create(file=("c.txt", b"c" * 6000), purpose="user_data")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    state = tmp_path / "state"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(state)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    yield state
    subprocess.run(["umount", "-l", str(state)], check=True)


@pytest.mark.slow
async def test_a_full_disk_is_507_and_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    async with filing(tmp_path) as (device, client):
        note = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        filler = small_disk / "filler"
        filler.write_bytes(bytes(3 * MIB))
        with pytest.raises(openai.InternalServerError, match="disk of this device is full") as full:
            await client.files.create(file=("large.txt", b"x" * (5 * MIB)), purpose="user_data")
        assert full.value.status_code == 507
        assert [path.name for path in contents(folder_of(device))] == [note.id]
        assert (await ask(device, named(note.id))).status == 200
        filler.unlink()
        await client.files.create(file=("large.txt", b"x" * (2 * MIB)), purpose="user_data")


@pytest.mark.slow
async def test_a_daemon_that_is_killed_during_an_upload_has_no_half_file(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "files"
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        b"Content-Length: 4000000\r\n\r\n--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n"
    )
    with serve(tmp_path, "--set", "files.accept=true") as daemon:
        url, _ = ready_line(daemon)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            whole = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as upload:
            await asyncio.to_thread(upload.sendall, head + b"x" * 2_500_000)
            await until(lambda: any(path.name.endswith(".draft") for path in contents(folder)))
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
    assert len(contents(folder)) == 2
    with serve(tmp_path, "--set", "files.accept=true") as daemon:
        url, _ = ready_line(daemon)
        assert [path.name for path in contents(folder)] == [whole.id]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            assert await client.files.retrieve(whole.id) == whole
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0


def test_accepting_is_a_choice() -> None:
    assert not DeviceFilesConfig().accept
    assert ACCEPTING.accept


async def keep(store: DeviceFileStore, owner: str, size: int = 10) -> bool:
    """Upload a file; False: there is no room for it."""
    try:
        async with store.write(owner, size) as writer:
            await writer.write(b"x" * size)
            await writer.finish("note.txt", UploadTerms("user_data", None), RoutingHints())
    except StorageFull:
        return False
    return True


@pytest.mark.parametrize(
    ("bounds", "size"),
    [(DeviceFilesConfig(accept=True, max_files=8), 10), (DeviceFilesConfig(accept=True, max_bytes=80), 10)],
    ids=["number", "bytes"],
)
async def test_one_client_does_not_fill_the_folder_for_others(
    tmp_path: Path, bounds: DeviceFilesConfig, size: int
) -> None:
    """Alone it has seven of eight; beside another's file it gets no more until it has less than half."""
    store = DeviceFileStore(tmp_path, bounds, MIB, system_clock())
    assert [await keep(store, "flood", size) for _ in range(8)] == [True] * 7 + [False]
    assert await keep(store, "quiet", size)
    assert not await keep(store, "quiet", size), "the folder is full"
    for file in store.list_owned("flood")[:4]:
        await store.delete(file.id, "flood")
    assert [await keep(store, "quiet", size) for _ in range(4)] == [True] * 3 + [False]
    assert [await keep(store, "flood", size) for _ in range(2)] == [True, False]
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"\xff", b"\x09\0\0\0\0"], ids=["length", "head"])
async def test_a_file_whose_header_cannot_be_read_is_set_aside_and_taken_back(tmp_path: Path, damage: bytes) -> None:
    """After an upgrade: a downgrade erases nothing."""
    async with filing(tmp_path) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        other = await client.files.create(file=("other.txt", NOTE.encode()), purpose="user_data")
        folder = folder_of(device)
    whole = (folder / uploaded.id).read_bytes()
    (folder / uploaded.id).write_bytes(damage + whole[len(damage) :])
    for _ in range(2):
        async with filing(tmp_path) as (device, client):
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(uploaded.id)
            assert (await ask(device, named(other.id))).status == 200
            assert "1 uploaded files cannot be read" in str(device.parts.problems())
        (aside,) = folder.glob("*.unreadable")
        assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    aside.write_bytes(whole)
    async with filing(tmp_path) as (device, client):
        assert await client.files.retrieve(uploaded.id) == uploaded
        assert (await ask(device, named(uploaded.id))).status == 200
        assert not device.parts.problems()


async def test_a_file_that_cannot_be_read_is_erased_when_it_would_have_expired(tmp_path: Path) -> None:
    now = 100.0
    clock = Clock(lambda: now, lambda: now, "one")

    async def opened() -> DeviceFileStore:
        files = DeviceFileStore(tmp_path, DeviceFilesConfig(accept=True, ttl_s=50.0), 1000, clock)
        await files.start()
        return files

    files = await opened()
    async with files.write("me", 4) as writer:
        await writer.write(b"text")
        kept = await writer.finish("note.txt", UploadTerms(purpose="user_data"), RoutingHints(client="me"))
    files.close()
    path = tmp_path / "files" / kept.id
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    files = await opened()
    files.close()
    os.link(next((tmp_path / "files").glob("*.unreadable")), tmp_path / "blocks")
    now += 49.0
    files = await opened()
    await files.sweep()
    assert len(files.problems) == 1
    now += 2.0
    await files.sweep()
    assert files.problems == ()
    assert not any((tmp_path / "blocks").read_bytes())
    files.close()
