"""Encryption of the state folder: no byte of it tells content, and what earlier versions left is encrypted."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from causeway_server.edge_node.clock import system_clock
from causeway_server.edge_node.config.schema import DeviceFilesConfig, OutboxConfig, ResponsesConfig
from causeway_server.edge_node.daemon.state_encryption import open_folder, rotate_keys
from causeway_server.edge_node.files.folder import DeviceFile, FileFolder
from causeway_server.edge_node.files.store import DeviceFileStore
from causeway_server.edge_node.jobs.record import JobAnswer, ReplyTo
from causeway_server.edge_node.jobs.store import JobOutbox
from causeway_server.edge_node.storage.background_sqlite import SqliteStore
from causeway_server.edge_node.storage.cache import AnswerCache
from causeway_server.edge_node.storage.decisions import DecisionStore
from causeway_server.edge_node.storage.responses import DeviceResponseStore
from causeway_server.edge_node.storage.sealed import SEALED, unpacked
from causeway_server.edge_node.storage.sessions import SessionStore
from causeway_server.router.decision.sessions import KEY_BYTES
from causeway_server.router.errors import ConfigError
from causeway_server.router.openai.answer import CachedAnswer
from causeway_server.router.parts.uploads import UploadTerms
from causeway_server.router.serving.at_rest import state_keys
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.types import RoutingHints, Session
from tests.edge_node.jobs.killed_outbox import new_job
from tests.waiting import until

from .encrypted import database_of
from .test_cache import REQUEST, ManualClock, answer, key
from .test_decisions import record

CLIENT, DIGEST = "planted-client", b"d" * KEY_BYTES
WORDS = tuple(
    f"planted-{name}" for name in ("request", "answer", "filename", "content", "response", "cached", "address")
)
PLANTED = tuple(word.encode() for word in (*WORDS, CLIENT))


def found(folder: Path) -> set[bytes]:
    """The planted words in any byte of a folder."""
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return {word for word in PLANTED if word in content}


def queued(store: SqliteStore) -> int:
    stats = store.disk()
    return 0 if stats is None else stats.queued_writes


class Stores:
    """Every store of a folder, as a daemon has them."""

    def __init__(self, folder: Path) -> None:
        clock = system_clock()
        self.keys = StateKeys(folder)
        self.jobs = JobOutbox(folder, OutboxConfig(), clock, keys=self.keys)
        self.responses = DeviceResponseStore(folder, ResponsesConfig(), clock, self.keys)
        self.sessions = SessionStore(folder, clock.monotonic, keys=self.keys)
        self.files = DeviceFileStore(folder, DeviceFilesConfig(accept=True), 8 << 20, clock, self.keys)
        self.decisions = DecisionStore(
            memory_records=0, max_age_s=1e6, directory=folder, clock=ManualClock().clock, keys=self.keys
        )
        self.cache = AnswerCache(
            memory_bytes=1 << 20, disk_bytes=1 << 20, directory=folder, clock=ManualClock().clock, keys=self.keys
        )

    async def open(self) -> None:
        for store in (self.jobs, self.decisions, self.cache):
            store.start()
        await self.jobs.open()
        await self.files.start()
        await self.sessions.load()

    async def fill(self) -> None:
        job = msgspec.structs.replace(new_job(self.jobs, "one"), owner=CLIENT)
        await self.jobs.accept(job, b'{"planted-request": 1}', ReplyTo(b"planted-address"))
        (claimed,) = await self.jobs.claim("edge", 1)
        await self.jobs.succeed(claimed.job, JobAnswer(b'{"planted-answer": 1}', "miss", "edge", "d"))
        other = msgspec.structs.replace(new_job(self.jobs, "two"), owner=CLIENT)
        await self.jobs.accept(other, b'{"planted-request": 2}')
        await self.jobs.run(self.jobs.webhooks.secrets, CLIENT)
        await self.responses.put(CLIENT, "resp_1", b"planted-response", private=False, user="")
        written = self.sessions.put(DIGEST, {key(1): Session(target="small")})
        assert written is not None
        await written
        async with self.files.write(CLIENT, 0) as writer:
            await writer.write(b"planted-content " * 100_000)
            await writer.finish("planted-filename", UploadTerms("user_data"), RoutingHints(client=CLIENT))
        one = record(1)
        self.decisions.add(msgspec.structs.replace(one, request=msgspec.structs.replace(one.request, client=CLIENT)))
        self.cache.put(key(1), answer("planted-cached"), owner=CLIENT)
        await until(lambda: not (queued(self.decisions) or queued(self.cache)))

    async def check(self) -> None:
        """Read everything that `fill` wrote."""
        ended, _ = sorted(await self.jobs.list_owned(CLIENT, "", 10), key=lambda job: job.seq)
        assert await self.jobs.get(ended.id, CLIENT) == (ended, b'{"planted-answer": 1}')
        assert [one.body for one in await self.jobs.claim("edge", 9)] == [b'{"planted-request": 2}']
        assert (await self.jobs.list_owned("another", "", 10)) == []
        ((due,),) = [await self.jobs.run(self.jobs.replies.due, 9)]
        assert (due.address, due.result) == (b"planted-address", b'{"planted-answer": 1}')
        assert await self.responses.read(CLIENT, ["resp_1"]) == [b"planted-response"]
        assert await self.responses.read("another", ["resp_1"]) == [b""]
        assert self.sessions.find(DIGEST, key(1)) == Session(target="small")
        (file,) = self.files.list_owned(CLIENT)
        assert (file.filename, await self.files.read(file)) == ("planted-filename", b"planted-content " * 100_000)
        kept = await self.decisions.get("d1", client=CLIENT)
        assert kept is not None
        hit = await self.cache.lookup_disk(key(1), REQUEST)
        assert hit is not None
        assert isinstance(hit.answer.body, CachedAnswer)
        assert hit.answer.body.chunks[0].text == "planted-cached"

    def close(self) -> None:
        for store in (self.jobs, self.responses, self.sessions, self.files, self.decisions, self.cache):
            store.close()


async def filled(folder: Path) -> StateKeys:
    stores = Stores(folder)
    await stores.open()
    await stores.fill()
    stores.close()
    return stores.keys


async def test_no_byte_of_a_folder_tells_content_while_it_is_used_and_after_a_kill(tmp_path: Path) -> None:
    """The copy of a folder in use is what a kill leaves, with logs and temporary files."""
    stores = Stores(tmp_path / "state")
    await stores.open()
    await stores.fill()
    assert found(tmp_path) == set()
    shutil.copytree(tmp_path / "state", tmp_path / "killed" / "state")
    stores.close()
    assert found(tmp_path) == set()
    shutil.copy(tmp_path / "state.key", tmp_path / "killed" / "state.key")
    again = Stores(tmp_path / "killed" / "state")
    await again.open()
    await again.check()
    again.close()
    assert found(tmp_path) == set()


async def test_rows_that_change_their_places_cannot_be_read(tmp_path: Path) -> None:
    await filled(tmp_path / "state")
    with database_of(tmp_path / "state" / "responses-2.sqlite") as database:
        database.execute("UPDATE objects SET owner = keyed('another')")
    stores = Stores(tmp_path / "state")
    assert await stores.responses.read("another", ["resp_1"]) == [b""]
    stores.close()


@pytest.mark.parametrize("passphrase", ["", "correct horse battery"])
async def test_another_key_and_a_missing_one_are_refused_and_nothing_is_changed(
    tmp_path: Path, passphrase: str
) -> None:
    if passphrase:
        (tmp_path / "state.key").write_text(passphrase)
    await filled(tmp_path / "state")
    own, keys_file = (tmp_path / "state.key").read_bytes(), tmp_path / "state" / "keys.json"
    before = {path.name: path.read_bytes() for path in (tmp_path / "state").glob("*.*")}
    for other in (None, base64.b64encode(bytes(32)), b"another passphrase", b"short"):
        (tmp_path / "state.key").unlink(missing_ok=True)
        if other is not None:
            (tmp_path / "state.key").write_bytes(other)
        with pytest.raises(ConfigError, match=r"encryption\.key_file|keys\.json"):
            open_folder(StateKeys(tmp_path / "state"))
    (tmp_path / "state.key").write_bytes(own)
    modified = json.loads(keys_file.read_bytes())
    keys_file.write_text(json.dumps(modified | {"keys": modified["keys"] * 2}))
    with pytest.raises(ConfigError, match="was modified"):
        open_folder(StateKeys(tmp_path / "state"))
    keys_file.unlink()
    with pytest.raises(ConfigError, match=r"is missing, and .* cannot be read"):
        open_folder(StateKeys(tmp_path / "state"))
    keys_file.write_bytes(before["keys.json"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "state").glob("*.*")} == before
    stores = Stores(tmp_path / "state")
    await stores.open()
    await stores.check()
    stores.close()


async def test_a_credential_of_systemd_comes_before_the_file(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / state_keys.CREDENTIAL).write_bytes(base64.b64encode(b"c" * 32))
    keys = StateKeys(tmp_path / "state", environ={"CREDENTIALS_DIRECTORY": str(credentials)})
    sealed = keys.seal(b"content", "place")
    assert not (tmp_path / "state.key").exists()
    assert StateKeys(tmp_path / "state", environ={"CREDENTIALS_DIRECTORY": str(credentials)}).open(sealed, "place")
    with pytest.raises(ConfigError, match="not on this device"):
        StateKeys(tmp_path / "state", environ={}).check()


async def test_a_rotation_encrypts_everything_again_and_forgets_the_old_key(tmp_path: Path) -> None:
    """In small steps beside the stores; the owner's key changes on its own."""
    stores = Stores(tmp_path / "state")
    await stores.open()
    await stores.fill()
    old = stores.keys.head
    other = StateKeys(tmp_path / "state")  # the command
    other.rotate()
    other.change_owner(tmp_path / "elsewhere.key")
    (tmp_path / "state.key").write_bytes(b"")
    while True:
        await rotate_keys(stores.keys, stores.files, 1e9)
        if stores.keys.count == 1:
            break
    assert stores.keys.head == other.head != old
    stores.close()
    content = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert old not in content
    stores = Stores(tmp_path / "state")
    await stores.open()
    await stores.check()
    stores.close()


async def test_an_upload_during_a_rotation_can_be_read_afterwards(tmp_path: Path) -> None:
    stores = Stores(tmp_path / "state")
    await stores.open()
    await stores.fill()
    async with stores.files.write(CLIENT, 0) as writer:
        await writer.write(b"early, " * 300_000)
        await rotate_keys(stores.keys, stores.files, 0.0)
        await rotate_keys(stores.keys, stores.files, 1e9)
        assert stores.keys.count == 2  # the upload's first pieces have the old key
        await writer.finish("late", UploadTerms("user_data"), RoutingHints(client=CLIENT))
    while stores.keys.count > 1:
        await rotate_keys(stores.keys, stores.files, 1e9)
    stores.close()
    stores = Stores(tmp_path / "state")
    await stores.open()
    (file,) = (one for one in stores.files.list_owned(CLIENT) if one.filename == "late")
    assert await stores.files.read(file) == b"early, " * 300_000
    stores.close()


async def test_a_damaged_row_does_not_keep_the_old_key(tmp_path: Path) -> None:
    keys = await filled(tmp_path / "state")
    with closing(sqlite3.connect(tmp_path / "state" / "responses-2.sqlite")) as database, database:
        database.execute("UPDATE objects SET data = CAST(substr(data, 1, length(data) - 16) || zeroblob(16) AS BLOB)")
    stores = Stores(tmp_path / "state")
    keys.rotate()
    for _ in range(2):  # encrypt again; forget
        await rotate_keys(stores.keys, stores.files, 1e9)
    assert stores.keys.count == 1
    stores.close()


def test_a_file_is_kept_whatever_the_length_of_its_header_is(tmp_path: Path) -> None:
    """A header of an earlier version begins with a brace, and so may the length of an encrypted one."""
    folder = FileFolder(tmp_path / "state" / "files", StateKeys(tmp_path / "state"))
    folder.open()
    one = DeviceFile(
        id="", owner="o", filename="", purpose="user_data", bytes=1, sha256=hashlib.sha256(b"x").hexdigest(),
        created_unix=1.0, expires=2.0,
    )  # fmt: skip
    first = set()
    for number in range(256):
        file = msgspec.structs.replace(one, id=f"file-{number:03}", filename="n" * number)
        draft = folder.begin(file.id)
        draft.write(b"x")
        draft.finish(file)
        draft.path.replace(folder.path / file.id)
        first.add((folder.path / file.id).read_bytes()[:1])
    assert len(first) == 256
    files, unreadable, _ = folder.open()
    assert (len(files), unreadable) == (256, [])
    assert [folder.read(file) for file in files] == [b"x"] * 256


async def test_a_key_that_is_too_old_is_replaced(tmp_path: Path) -> None:
    keys = await filled(tmp_path / "state")
    stores, old = Stores(tmp_path / "state"), keys.head
    await rotate_keys(stores.keys, stores.files, 0.0)
    assert stores.keys.count == 2
    assert stores.keys.head != old
    stores.close()


async def test_an_erased_key_makes_the_folder_unreadable(tmp_path: Path) -> None:
    keys = await filled(tmp_path / "state")
    keys.erase()
    assert not (tmp_path / "state" / "keys.json").exists()
    with pytest.raises(ConfigError, match="cannot be read without"):
        open_folder(StateKeys(tmp_path / "state"))


# --- folders of the version before encryption -------------------------------------------------------------------------


def plain_folder(folder: Path) -> None:
    """Write what a daemon before encryption wrote: its files are changed back to that layout, by fixed SQL."""
    for name, file in SEALED.items():
        if not (folder / name).exists():
            continue
        with database_of(folder / name) as database:
            database.create_function("body", -1, lambda data: bytes(100) + data + bytes(-len(data) % 1020))
            database.executescript(PLAIN[name])
        with closing(sqlite3.connect(folder / name)) as database:
            database.execute("PRAGMA user_version=0")
            database.execute("PRAGMA journal_mode=DELETE")
        (folder / name).rename(folder / file.earlier)
    (folder / "keys.json").unlink()


PLAIN = {
    "jobs-3.sqlite": f"""
        UPDATE requests SET body = body(opened_body(body, 'requests', seq));
        UPDATE results SET body = body(opened_body(body, 'results', seq));
        UPDATE replies SET address = opened(address, 'replies', seq);
        UPDATE webhook_secrets SET secret = CAST(opened(secret, 'webhook_secrets', owner) AS TEXT), owner = '{CLIENT}';
        UPDATE jobs SET record = opened(record, 'jobs', seq), owner = '{CLIENT}', key = iif(seq = 1, 'one', 'two');""",
    "responses-2.sqlite": f"""
        UPDATE objects SET data = opened(data, 'objects', owner, name), owner = '{CLIENT}';""",
    "sessions-2.sqlite": """
        UPDATE sessions SET state = opened(state, 'sessions', key);
        UPDATE sessions SET key = substr(state, 4, 32), state = substr(state, 36);""",
    "decisions-2.sqlite": "UPDATE decisions SET record = opened(record, 'decisions', id);",
    "cache-2.sqlite": f"""
        UPDATE answers SET value = opened(value, 'answers', key), key = x'{key(1).hex()}';
        ALTER TABLE answers DROP COLUMN owner;""",
}


def plain_files(folder: Path) -> None:
    (file,) = (path for path in (folder / "files").iterdir() if path.name.startswith("file-"))
    header = unpacked(file.read_bytes()[:4096])
    fields = json.loads(StateKeys(folder).open(header, "file", file.name))
    del fields["stored_bytes"]
    content = b"planted-content " * 100_000
    file.write_bytes(json.dumps(fields).encode().ljust(4096, b"\0") + content)


async def plain(folder: Path) -> None:
    """Make a folder of the version before."""
    await filled(folder)
    plain_files(folder)
    plain_folder(folder)
    assert found(folder) == set(PLANTED)
    folder.with_name("state.key").unlink(missing_ok=True)


async def read_again(folder: Path) -> None:
    open_folder(StateKeys(folder))
    stores = Stores(folder)
    await stores.open()
    await stores.check()
    stores.close()
    assert found(folder) == set()
    assert not any((folder / file.earlier).exists() for file in SEALED.values())


async def test_a_folder_of_the_version_before_is_encrypted_at_the_start(tmp_path: Path) -> None:
    """With the files that it set aside."""
    await plain(tmp_path / "state")
    (tmp_path / "state" / "jobs-2.sqlite.bad").write_bytes(b"planted-request")
    await read_again(tmp_path / "state")


KILLED = """
import sys, time
from pathlib import Path
from causeway_server.edge_node.daemon.state_encryption import open_folder
from causeway_server.router.serving.at_rest.state_keys import StateKeys

class Paused(StateKeys):
    left = int(sys.argv[2])
    def seal(self, data, *place):
        Paused.left -= 1
        if not Paused.left:
            print("now", flush=True)
            time.sleep(600)
        return super().seal(data, *place)

open_folder(Paused(Path(sys.argv[1])))
"""


@pytest.mark.slow
async def test_a_killed_encryption_is_continued(tmp_path: Path) -> None:
    """The start is killed within the transaction of each table."""
    await plain(tmp_path / "state")
    for number in (1, 2, 3, 2, 3, 2, 2, 2):
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", KILLED, str(tmp_path / "state"), str(number)), stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        assert await child.stdout.readline() == b"now\n"
        child.kill()
        await child.wait()
    await read_again(tmp_path / "state")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", ["UPDATE requests", "UPDATE webhook_secrets", "VACUUM INTO"])
async def test_an_interrupted_encryption_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await plain(tmp_path / "state")
    connect = sqlite3.connect

    class Dying(sqlite3.Connection):
        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            if statement.startswith(step):
                raise Killed
            return super().execute(statement, *values)  # type: ignore[arg-type]

    def dying(*args: object, **options: object) -> sqlite3.Connection:
        return connect(*args, **options, factory=Dying)  # type: ignore[call-overload]

    monkeypatch.setattr(sqlite3, "connect", dying)
    with pytest.raises(Killed):
        open_folder(StateKeys(tmp_path / "state"))
    monkeypatch.undo()
    await read_again(tmp_path / "state")


async def test_without_space_nothing_is_changed_until_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await plain(tmp_path / "state")
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    before = (tmp_path / "state" / "jobs-2.sqlite").read_bytes()
    open_folder(StateKeys(tmp_path / "state"))
    assert (tmp_path / "state" / "jobs-2.sqlite").read_bytes() == before
    assert "1000 are free" in caplog.text
    monkeypatch.undo()
    await read_again(tmp_path / "state")
