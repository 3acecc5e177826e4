"""`causeway-fleet serve` as a process: it starts, serves, stops and starts again with the same identity."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import stat
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec
import pytest

from causeway_server.fleet.app import ServeSettings, running, serve, sqlite_url
from causeway_server.fleet.store.generations import CohortPace
from causeway_server.fleet.store.rollouts import RolloutUnreadable, list_rollouts, working_rollouts
from causeway_server.router.errors import CausewayError, ConfigError
from tests.check.sources import ROOT
from tests.fleet.repository.fleets import edit
from tests.ports import free_port

pytestmark = pytest.mark.slow


@asynccontextmanager
async def served(folder: Path, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = ["serve", str(folder), "--keys", str(folder / "keys"), "--state-dir", str(folder / "data"), *more]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "causeway_server.fleet", *arguments, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def started(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        if b"The control plane serves the fleet" in line:
            return
    raise AssertionError("it ended before it served")


async def jwks(port: int) -> object:
    answer = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/.well-known/jwks.json")
    return json.loads(answer.read())


async def test_it_stops_at_sigterm_and_keeps_its_key(fleet_folder: Path) -> None:
    """A gateway that has read the keys accepts the tokens after a restart too."""
    port = free_port()
    found = []
    for number in (signal.SIGTERM, signal.SIGINT):
        async with served(fleet_folder, "--listen", f"127.0.0.1:{port}") as process:
            await started(process)
            found.append(await jwks(port))
            process.send_signal(number)
            assert await process.wait() == 0
    assert found[0] == found[1]
    assert (fleet_folder / "data" / "token-key.jwk").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--database", "mysql://host/name"), b"--database"),
        (("--database", "postgresql://causeway@127.0.0.1:1/none"), b"does not answer"),
    ],
)
async def test_what_it_cannot_use_is_named(fleet_folder: Path, more: tuple[str, ...], reason: bytes) -> None:
    async with served(fleet_folder, *more) as process:
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert reason in errors
    assert b"Traceback" not in errors


async def test_a_folder_or_database_that_it_cannot_use_is_named(fleet_folder: Path) -> None:
    (fleet_folder / "file").touch()
    (fleet_folder / "data" / "fleet.db").mkdir(parents=True)
    for state_dir, words in (
        (Path("/proc/state"), "/proc/state: No such file or directory."),
        (fleet_folder / "file" / "state", f"{fleet_folder}/file/state: Not a directory."),
        (fleet_folder / "data", f"{fleet_folder}/data/fleet.db: Is a directory."),
    ):
        async with served(fleet_folder, "--state-dir", str(state_dir)) as process:
            _, errors = await process.communicate()
        assert (process.returncode, errors.decode()) == (1, f"Error: {words}\n")


async def test_a_taken_port_is_named(fleet_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with served(fleet_folder, "--listen", f"127.0.0.1:{taken.getsockname()[1]}") as process:
            _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"another program listens there" in errors


async def test_the_database_goes_back_to_a_revision_that_an_earlier_version_knows(fleet_folder: Path) -> None:
    async def downgrade(*words: object) -> tuple[int | None, bytes]:
        words = ("-m", "causeway_server.fleet", "downgrade", *words)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, words), cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        return process.returncode, output

    state_dir = fleet_folder / "data"
    code, output = await downgrade("0001", "--state-dir", state_dir)
    assert (code, b"no database fleet.db in" in output, state_dir.exists()) == (1, True, False)
    async with running(ServeSettings(fleet_folder, fleet_folder / "keys", state_dir, port=0)):
        pass
    assert await downgrade("0001", "--state-dir", state_dir) == (0, b"The database has revision 0001.\n")
    for revision in ("0003", ""):
        code, output = await downgrade(revision, "--state-dir", state_dir)
        assert (code, f"revision 0001, not `{revision}` or a later one".encode() in output) == (1, True)
    assert await downgrade("0001", "--database", sqlite_url(state_dir)) == (0, b"The database has revision 0001.\n")
    code, output = await downgrade("0001")
    assert (code, b"Add --state-dir or --database." in output) == (2, True)


async def test_a_key_that_others_can_read_is_refused(fleet_folder: Path) -> None:
    (fleet_folder / "data").mkdir()
    key = fleet_folder / "data" / "token-key.jwk"
    key.write_text("{}")
    key.chmod(0o644)
    async with served(fleet_folder) as process:
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"Other accounts can read" in errors


PUBLIC = '{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}'


@pytest.mark.parametrize(
    ("content", "words"),
    [("nonsense", "not an Ed25519 key as a JWK"), ("{}", "not an Ed25519 key as a JWK"), (PUBLIC, "not a private")],
)
async def test_a_token_key_that_is_none_is_named(fleet_folder: Path, content: str, words: str) -> None:
    """A new one in its place would refuse every token that devices have."""
    key = fleet_folder / "data" / "token-key.jwk"
    key.parent.mkdir()
    key.write_text(content)
    key.chmod(0o600)
    with pytest.raises(ConfigError, match=words) as caught:
        async with running(ServeSettings(fleet_folder, fleet_folder / "keys", fleet_folder / "data", port=0)):
            pass
    assert caught.value.where == str(key)
    assert key.read_text() == content


async def test_a_fleet_with_an_error_does_not_start(fleet_folder: Path) -> None:
    """The first error is named with its place; nothing is written."""
    edit(fleet_folder / "fleet.yaml", "match: {role: kiosk}", "macth: {role: kiosk}")
    with pytest.raises(ConfigError, match="macth") as caught:
        async with running(ServeSettings(fleet_folder, fleet_folder / "keys", fleet_folder / "data", port=0)):
            pass
    assert "fleet.yaml:5:" in caught.value.where
    assert not (fleet_folder / "data").exists()


async def test_a_background_task_that_fails_ends_the_control_plane_with_a_line(
    fleet_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The command ends with status 1 for this error."""
    settings = ServeSettings(fleet_folder, fleet_folder / "keys", fleet_folder / "data", port=0)
    broken = msgspec.structs.replace(settings, survey_s=cast("float", "no number"))
    async with asyncio.timeout(60.0):
        with pytest.raises(CausewayError, match="A background task failed, and the control plane ends"):
            await serve(broken)
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.CRITICAL] == [True]


async def test_rows_that_cannot_be_read_stop_nothing_else(fleet_folder: Path) -> None:
    """Of a newer version, or damaged: the pace of a cohort, a rollout of one that pauses, what a device reported."""
    settings = ServeSettings(fleet_folder, fleet_folder / "keys", fleet_folder / "data", port=0)
    rollout = ("newer", "kiosk", "soak", 1, "{}", 1, "anna", 1.0, 1.0, 0, 1, "[]")
    columns = "id, cohort, state, begun, body_json, version, author, created, updated, allow_leaving, without_replay"
    async with running(settings) as (plane, _), plane.store.write() as connection:
        await connection.exec_driver_sql("INSERT INTO generations VALUES ('kiosk', 1, 'n', '{\"pace\": ')")
        marks = ", ".join("?" * len(rollout))
        statement = f"INSERT INTO rollouts ({columns}, acknowledged_json) VALUES ({marks})"
        await connection.exec_driver_sql(statement, rollout)
    async with running(settings) as (plane, _):
        assert plane.wakes.pace("kiosk") == CohortPace()
        async with plane.store.read() as connection:
            assert await list_rollouts(connection, readable=True) == []
            assert (await working_rollouts(connection))[1][0].startswith("The cohort kiosk pauses, because ")
            with pytest.raises(RolloutUnreadable):
                await list_rollouts(connection, "kiosk")


async def test_files_of_others_in_the_data_folder_keep_their_rights(fleet_folder: Path) -> None:
    """The folder may be a home folder."""
    data = fleet_folder / "data"
    data.mkdir()
    (data / "notes.txt").touch(mode=0o644)
    (data / "folder").mkdir(mode=0o755)
    (data / "folder" / "fleet.db").touch(mode=0o644)
    async with running(ServeSettings(fleet_folder, fleet_folder / "keys", data, port=0)):
        names = ("notes.txt", "folder", "folder/fleet.db")
        assert [stat.S_IMODE((data / name).stat().st_mode) & 0o077 for name in names] == [0o044, 0o055, 0o044]


async def test_a_folder_of_all_accounts_is_no_data_folder(fleet_folder: Path) -> None:
    data = fleet_folder / "data"
    data.mkdir()
    (data / "notes.txt").touch()
    data.chmod(0o1777)
    with pytest.raises(ConfigError, match="Name a folder that only this server uses"):
        async with running(ServeSettings(fleet_folder, fleet_folder / "keys", data, port=0)):
            pass
    assert stat.S_IMODE(data.stat().st_mode) == 0o1777


async def test_no_other_account_can_read_the_data(fleet_folder: Path) -> None:
    """The database, its side files, keys and tokens; those of an earlier version are repaired at the start."""
    data = fleet_folder / "data"
    data.mkdir()
    (data / "fleet.db").touch(mode=0o644)
    data.chmod(0o755)
    async with served(fleet_folder, "--listen", f"127.0.0.1:{free_port()}") as process:
        await started(process)
        names = {path.name for path in data.iterdir()}
        assert {"fleet.db", "fleet.db-wal", "token-key.jwk", "bootstrap-token"} <= names
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (data, *data.rglob("*"))}
        assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
