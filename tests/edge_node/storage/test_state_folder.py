"""The state folder: one daemon at a time, and what it keeps when the daemon is killed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from causeway_server.edge_node.app import build
from causeway_server.edge_node.config.schema import DeviceFilesConfig, ServerConfig
from causeway_server.router.errors import ConfigError
from tests.waiting import until

from ..device import config, running
from ..scripted import ScriptedCloud, ScriptedEngine
from ..test_app import cloud_only, daemon


async def test_a_second_daemon_on_one_state_folder_is_refused(tmp_path: Path) -> None:
    """The message names the folder, the process and what to do; the first daemon keeps answering."""
    async with running(tmp_path) as device:
        second = build(config(tmp_path), make_engine=lambda _: ScriptedEngine(), environ={})
        with pytest.raises(ConfigError) as refused:
            await second.start()
        for text in (f"process {os.getpid()}", str(tmp_path / "state"), "--state-dir"):
            assert text in refused.value.message
        assert (await device.ask()).status == 200
    after = build(config(tmp_path), make_engine=lambda _: ScriptedEngine(), environ={})
    await after.start()
    await after.close()


@pytest.mark.parametrize("name", ["cache-3", "decisions-3", "spend-2", "shadow-3", "jobs-4"])
async def test_a_downgraded_daemon_names_a_database_of_a_newer_version_and_leaves_it(tmp_path: Path, name: str) -> None:
    state = tmp_path / "state"
    state.mkdir()
    newer = state / f"{name}.sqlite"
    newer.write_bytes(b"of a layout that this version does not know")
    async with running(tmp_path) as device:
        assert (await device.ask()).status == 200
        (problem,) = (await device.get("/readyz")).json["problems"]
        assert problem.startswith(f"{newer} belongs to a newer version of the daemon")
    assert newer.read_bytes() == b"of a layout that this version does not know"


async def filled(folder: Path) -> Path:
    """A state folder with something in each file."""
    cloud = ScriptedCloud()
    async with running(folder, cloud=cloud, files=DeviceFilesConfig(accept=True)) as device:
        assert (await device.ask("cached", temperature=0.0)).status == 200
        assert (await device.ask("paid for", tags="cloud")).status == 200
        body = {"model": "auto", "messages": [{"role": "user", "content": "a job"}]}
        async with device.session.post("/v1/jobs", json=body) as response:
            assert response.status == 202
        form = aiohttp.FormData({"purpose": "user_data"})
        form.add_field("file", b"some text", filename="note.txt")
        async with device.session.post("/v1/files", data=form) as response:
            assert response.status == 200
        await until(lambda: all((folder / "state" / name).exists() for name in DATABASES))
    return folder / "state"


DATABASES = ("cache-2.sqlite", "decisions-2.sqlite", "jobs-3.sqlite", "spend-1.sqlite")
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "noise at the start": lambda content: b"\xff" * min(64, len(content)) + content[64:],
    "noise in the middle": lambda content: (
        content[: len(content) // 2] + b"\xc1" * 64 + content[len(content) // 2 + 64 :]
    ),
    "noise at the end": lambda content: content[:-64] + b"\xc1" * 64,
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
async def test_no_damaged_file_of_the_state_folder_stops_the_daemon(tmp_path: Path, damage: str) -> None:
    """One at a time: it starts, answers, takes jobs and reloads its policy; its background tasks go on."""
    state = await filled(tmp_path)
    whole = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    assert {path.name for path in whole} >= {*DATABASES, "policy.last-good.yaml", "clock.json"}
    for damaged in (path for path in whole if path.name != "keys.json"):  # without it the start is refused
        for path in state.rglob("*"):
            if path.is_file():
                path.unlink()
        for path, content in whole.items():
            path.write_bytes(DAMAGES[damage](content) if path == damaged else content)
        async with running(tmp_path, files=DeviceFilesConfig(accept=True)) as device:
            assert (await device.ask("after it")).status == 200, damaged
            body = {"model": "auto", "messages": [{"role": "user", "content": "another job"}]}
            async with device.session.post("/v1/jobs", json=body) as response:
                assert response.status in (202, 503), damaged
            await device.parts.policies.reload()
            assert not device.app.failed, damaged


@pytest.mark.slow
async def test_a_killed_daemon_leaves_no_lock(tmp_path: Path) -> None:
    cloud = await ScriptedCloud().start()
    settings = cloud_only(tmp_path, cloud.url)
    async with daemon(tmp_path, settings) as (process, _):
        process.kill()
        await process.wait()
    async with daemon(tmp_path, settings):
        pass
    await cloud.stop()


async def test_a_failed_start_leaves_no_lock(tmp_path: Path) -> None:
    bad = build(config(tmp_path, policy="version: 1\n"), make_engine=lambda _: ScriptedEngine(), environ={})
    with pytest.raises(ConfigError):
        await bad.start()
    async with running(tmp_path, server=ServerConfig(port=0)) as device:
        assert (await device.ask()).status == 200


async def test_a_folder_that_cannot_be_locked_does_not_stop_the_daemon(tmp_path: Path) -> None:
    """A read-only folder or a full disk: answers come from memory."""
    (tmp_path / "state" / "lock").mkdir(parents=True)
    async with running(tmp_path) as device:
        assert (await device.ask()).status == 200


def open_to_others(folder: Path) -> dict[str, str]:
    """Return what other accounts may read or enter, with its mode."""
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}
    return {str(path.relative_to(folder)): f"{mode:o}" for path, mode in modes.items() if mode & 0o077}


async def test_the_files_of_an_earlier_version_are_closed_at_the_start(tmp_path: Path) -> None:
    """A link in the folder is not followed: what it names keeps its rights."""
    state, outside = tmp_path / "state", tmp_path / "outside"
    (state / "fleet" / "store").mkdir(parents=True)
    for path in (outside, state / "cache-2.sqlite", state / "fleet" / "store" / "plan.json"):
        path.write_bytes(b"")
        path.chmod(0o644)
    (state / "link").symlink_to(outside)
    state.chmod(0o755)
    async with running(tmp_path) as device:
        assert (await device.ask()).status == 200
        assert not {"cache-2.sqlite", "fleet", "fleet/store", "fleet/store/plan.json", "."} & set(open_to_others(state))
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644


async def test_files_of_others_in_the_state_folder_keep_their_rights(tmp_path: Path) -> None:
    """Somebody named a folder that has more in it, such as a home."""
    state = tmp_path / "state"
    (state / "project").mkdir(parents=True)
    for path in (state / "notes.txt", state / "project" / "page.html"):
        path.write_bytes(b"")
        path.chmod(0o644)
    (state / "project").chmod(0o755)
    async with running(tmp_path) as device:
        assert (await device.ask()).status == 200
        assert {"notes.txt", "project", "project/page.html"} <= set(open_to_others(state))


async def test_a_folder_of_all_accounts_is_no_state_folder(tmp_path: Path) -> None:
    """As /tmp: to close it would stop the others."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "notes.txt").touch()
    state.chmod(0o1777)
    app = build(config(tmp_path), make_engine=lambda _: ScriptedEngine(), environ={})
    with pytest.raises(ConfigError, match="shared by all accounts"):
        await app.start()
    assert (stat.S_IMODE(state.stat().st_mode), list(state.iterdir())) == (0o1777, [state / "notes.txt"])


async def test_a_new_volume_is_a_state_folder(tmp_path: Path) -> None:
    """A container's tmpfs lets all accounts write until the daemon closes it."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o1777)
    async with running(tmp_path) as device:
        assert (await device.ask()).status == 200
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


async def test_the_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "victim").write_text("content")
    (tmp_path / "state" / "lock").symlink_to(tmp_path / "victim")
    async with running(tmp_path) as device:
        assert (await device.ask()).status == 200
    assert (tmp_path / "victim").read_text() == "content"


async def test_a_write_that_a_power_cut_interrupted_is_removed_at_the_start(tmp_path: Path) -> None:
    """Whole files stay, and so does a folder with such a name."""
    state = tmp_path / "state"
    (state / "fleet").mkdir(parents=True)
    left = [state / "tmpabc.partial", state / "fleet" / "tmpabc.partial"]
    kept = [state / "tmpabc.partial.txt", state / "notes.partial"]
    for path in (*left, *kept):
        path.write_text("half")
    (state / "tmpfolder.partial").mkdir()
    async with running(tmp_path) as device:
        assert (await device.ask()).status == 200
        assert not any(path.exists() for path in left)
        assert all(path.read_text() == "half" for path in kept)
        assert (state / "tmpfolder.partial").is_dir()
        assert (await device.get("/readyz")).status == 200


async def test_a_file_system_without_locks_is_said_and_the_daemon_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As some network file systems are; its answers are kept all the same."""

    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("causeway_server.edge_node.storage.state_folder.fcntl.flock", refuse)
    async with running(tmp_path) as device:
        assert (await device.ask()).status == 200
    assert f"The state folder {tmp_path / 'state'} cannot be locked: No locks available" in caplog.text
    assert (tmp_path / "state" / DATABASES[1]).exists()
