"""Requests, results, texts and files are encrypted in Redis and in the content stores, whatever happens to the keys."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.storage.config import FilesConfig, JobsConfig
from causeway_server.cloud_pool.storage.encryption import (
    ContentCipher,
    ContentKeyMissing,
    ContentKind,
    read_keys,
    rotate_keys,
)
from causeway_server.cloud_pool.storage.file_contents import FileContentLost
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import LiveText, NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient, as_bytes, as_text
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.cloud_pool.streams.effects import STREAM_SCRIPTS, EffectStore
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import ConfigError, JobStoreUnavailable, RecordUnreadable
from causeway_server.router.jobs.job import JobState
from causeway_server.router.serving.at_rest.sealing import MAGIC
from tests.cloud_pool.batches.batch_support import create_batch, process, rows, upload
from tests.cloud_pool.jobs.conftest import BODY, Clock, until
from tests.cloud_pool.jobs.scripted_worker import ANSWER, RunningWorker, ScriptedRunner

from .redis_contents import contents

OWNER = "acme/1"
DAY_S = 86_400.0
Place = tuple[ContentKind, str, str]
PLACE: Place = ("request", "acme/kiosk", "job_1")
OTHERS: tuple[Place, ...] = (("result", *PLACE[1:]), ("request", "rival/kiosk", "job_1"), (*PLACE[:2], "job_2"))
MakeJob = Callable[..., NewJob]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.keys"
    rotate_keys(path, 0.0, 0.0)
    return path


@pytest.fixture
def encrypted(config: JobsConfig, key_file: Path) -> JobsConfig:
    return msgspec.structs.replace(config, encryption_key_file=str(key_file))


@asynccontextmanager
async def opened(config: JobsConfig, clock: Clock) -> AsyncIterator[JobStores]:
    stores = JobStores.open(config, clock)
    try:
        yield stores
    finally:
        await stores.close()


# --- the cipher ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"{}", bytes(range(256)) * 4096])
def test_a_sealed_value_opens_in_its_own_place_only(key_file: Path, data: bytes) -> None:
    cipher = ContentCipher(str(key_file))
    sealed = cipher.seal(data, *PLACE)
    assert sealed != cipher.seal(data, *PLACE), "each value has its own nonce"
    assert cipher.open(sealed, *PLACE) == data
    for place in OTHERS:
        with pytest.raises(RecordUnreadable):
            cipher.open(sealed, *place)


def test_no_changed_byte_opens(key_file: Path) -> None:
    cipher = ContentCipher(str(key_file))
    sealed = cipher.seal(b"an answer", *PLACE)
    for at in range(len(sealed)):
        changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        if changed.startswith(MAGIC):
            with pytest.raises((RecordUnreadable, ContentKeyMissing)):
                cipher.open(changed, *PLACE)
    for length in range(len(MAGIC), len(sealed)):
        with pytest.raises((RecordUnreadable, ContentKeyMissing)):
            cipher.open(sealed[:length], *PLACE)


def test_what_was_written_before_encryption_is_read(key_file: Path) -> None:
    assert ContentCipher(str(key_file)).open(BODY, *PLACE) == BODY
    assert ContentCipher().seal(BODY, *PLACE) == BODY


def test_a_new_key_seals_from_its_time_on_and_the_old_one_opens(key_file: Path, clock: Clock) -> None:
    """A process reads the changed file by itself, and at once for a key that it does not know."""
    writer, reader = ContentCipher(str(key_file), clock), ContentCipher(str(key_file), clock)
    old = writer.sealing_key
    sealed = writer.seal(b"first", *PLACE)
    new = rotate_keys(key_file, 600.0, clock.now)
    clock.now += 10.0
    assert writer.sealing_key == old
    clock.now += 600.0
    assert writer.sealing_key == new.id
    assert reader.open(writer.seal(b"second", *PLACE), *PLACE) == b"second"
    assert reader.open(sealed, *PLACE) == b"first"
    assert [key.id for key in read_keys(key_file)] == [old, new.id]
    assert key_file.stat().st_mode & 0o777 == 0o600


def test_a_faulty_key_file_leaves_the_keys_in_use(
    key_file: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    cipher = ContentCipher(str(key_file), clock)
    sealed = cipher.seal(b"an answer", *PLACE)
    for text in ("garbage\n", ""):
        key_file.write_text(text)
        clock.now += 10.0
        assert cipher.open(cipher.seal(b"another", *PLACE), *PLACE) == b"another"
    key_file.unlink()
    clock.now += 10.0
    assert cipher.seal(b"another", *PLACE).startswith(MAGIC)
    assert cipher.open(sealed, *PLACE) == b"an answer"
    assert sum("The encryption keys were not read again" in line for line in caplog.messages) == 3
    assert "garbage" not in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "contains no key"),
        ("a 2026-01-01T00:00:00+00:00 c2VjcmV0\n", "32 bytes"),
        ("a 2026-01-01T00:00:00 " + "A" * 43 + "=\n", "a time has its zone"),
        ("a then " + "A" * 43 + "=\n", "line 1: a line must be"),
        ("é\n", "not ASCII"),
        (("a 2026-01-01T00:00:00+00:00 " + "A" * 43 + "=\n") * 2, "the same id"),
    ],
)
def test_an_unusable_key_file_is_a_config_error_that_quotes_no_key(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        ContentCipher(str(path))
    assert caught.value.where == "jobs.encryption_key_file"
    assert not any(key in str(caught.value) for key in ("AAAA", "c2Vj"))


# --- jobs and files --------------------------------------------------------------------------------------------------


async def test_redis_never_has_the_content_of_a_job(encrypted: JobsConfig, clock: Clock, new_job: MakeJob) -> None:
    async with opened(encrypted, clock) as stores:
        job = (await stores.jobs.accept(new_job(owner=OWNER))).id
        (record,) = (await stores.jobs.claim("w", "large", ["standard"])).records
        await stores.jobs.texts.append([LiveText(OWNER, job, record.fence, 0, "an answer")])
        running = b"".join((await contents(stores.database)).values())
        assert await stores.jobs.release(job, record.fence)
        async with RunningWorker(stores.jobs, ScriptedRunner(), encrypted):
            await until(lambda: _has_ended(stores.jobs, job))
        ended = b"".join((await contents(stores.database)).values())
        assert (await stores.jobs.get(job, OWNER)).state is JobState.SUCCEEDED
        answer = json.loads(await stores.jobs.read_result(job, OWNER))
    assert answer["choices"][0]["message"]["content"] == ANSWER[0].text
    for found in (running, ended):
        assert MAGIC in found
        assert not any(text in found for text in (b"secret question", b"messages", b"an answer", b"choices"))


@pytest.mark.parametrize("store", ["redis", "path"])
async def test_no_store_has_the_content_of_a_batch(
    encrypted: JobsConfig, clock: Clock, tmp_path: Path, store: str
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    files = FilesConfig(path=str(folder)) if store == "path" else FilesConfig()
    async with opened(msgspec.structs.replace(encrypted, files=files), clock) as stores:
        tiers = {"large": Tier(TierConfig(name="large"), ChatFormat("{{ messages }}"))}
        await create_batch(stores, 3, OWNER)
        batch = await process(stores, BatchProcessor(stores, SubmissionParser(encrypted, tiers), encrypted), clock)
        assert [row["custom_id"] for row in await rows(stores, batch, "output")] == ["1", "2", "3"]
        found = b"".join((await contents(stores.database)).values())
        found += b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        assert not any(part in found for part in (b'"messages"', b'"response"'))
        first, second = await upload(stores, b"one", OWNER), await upload(stores, b"two", "rival/1")
        swapped = msgspec.structs.replace(first, id=second.id)
        with pytest.raises(FileContentLost, match="belongs to another record"):
            await stores.files.read_part(swapped, (await stores.files.parts(second.id))[0])


async def test_keys_are_rotated_while_jobs_wait(
    encrypted: JobsConfig, key_file: Path, clock: Clock, new_job: MakeJob
) -> None:
    """A worker that got the file late has lost none of them, and no attempt; nor have dead letters their request."""
    old_file = key_file.with_name("old.keys")
    shutil.copyfile(key_file, old_file)
    async with opened(encrypted, clock) as stores:
        jobs = [(await stores.jobs.accept(new_job(owner=OWNER))).id]
        rotate_keys(key_file, 0.0, DAY_S)
    outdated = msgspec.structs.replace(encrypted, encryption_key_file=str(old_file), backoff_max_s=0.001)
    async with opened(encrypted, clock) as stores, opened(outdated, clock) as late:
        jobs.append((await stores.jobs.accept(new_job(owner=OWNER))).id)
        async with RunningWorker(late.jobs, ScriptedRunner(), outdated):
            await until(lambda: _has_ended(stores.jobs, jobs[0]))
            await until(lambda: _was_postponed(stores.jobs, jobs[1]))
            waiting = await stores.jobs.get(jobs[1], OWNER)
            assert json.loads(waiting.error)["code"] == "content_key_missing"
            shutil.copyfile(key_file, old_file)
            await until(lambda: _has_ended(stores.jobs, jobs[1]))
        for job in jobs:
            record = await stores.jobs.get(job, OWNER)
            assert (record.state, record.attempts) == (JobState.SUCCEEDED, 1)
            assert await stores.jobs.read_result(job, OWNER)


async def test_a_process_without_the_keys_of_the_others_takes_no_part(
    encrypted: JobsConfig, config: JobsConfig, clock: Clock
) -> None:
    """A gateway refuses jobs and a worker does not start, until they have the file."""
    async with opened(encrypted, clock) as stores, opened(config, clock) as without:
        await stores.durability.ensure()
        with pytest.raises(ContentKeyMissing) as caught:
            await without.durability.ensure()
        assert (caught.value.status, caught.value.code) == (503, "content_key_missing")
        with pytest.raises(ConfigError, match=r"jobs\.encryption_key_file"):
            await without.durability.wait()


async def test_swapped_requests_and_results_are_not_read(
    encrypted: JobsConfig, clock: Clock, new_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = msgspec.structs.replace(encrypted, max_attempts=1)
    async with opened(config, clock) as stores:
        mine = (await stores.jobs.accept(new_job(owner=OWNER))).id
        theirs = (await stores.jobs.accept(new_job(owner="rival/1"))).id
        database = stores.database
        body = as_bytes(await database.command("HGET", database.key("job", theirs), "body"))
        await database.command("HSET", database.key("job", mine), "body", body)
        async with RunningWorker(stores.jobs, ScriptedRunner(), config):
            await until(lambda: _has_ended(stores.jobs, mine))
            await until(lambda: _has_ended(stores.jobs, theirs, "rival/1"))
        assert [(letter.id, letter.code) for letter in await stores.jobs.dead_letters()] == [
            (mine, "record_unreadable")
        ]
        result = as_bytes(await database.command("GET", database.key("result", theirs)))
        await database.command("SET", database.key("result", mine), result)
        with pytest.raises(RecordUnreadable):
            await stores.jobs.read_result(mine, OWNER)
        assert as_text(await database.command("HGET", database.key("job", mine), "body"))
    assert "secret" not in caplog.text


async def test_an_outcome_that_waits_for_its_broker_is_sealed(encrypted: JobsConfig, key_file: Path) -> None:
    """Another process with the keys publishes it; one that cannot read it does not run the message again."""
    database = RedisClient(encrypted, STREAM_SCRIPTS)
    effects = EffectStore(database, "p", "", ttl_s=60.0, cipher=ContentCipher(str(key_file)))
    await effects.claim(["one"])
    assert await effects.record("one", "run", b"an answer", "")
    assert b"an answer" not in b"".join((await contents(database)).values())
    assert (await effects.claim(["one"]))[0].outcome == b"an answer"
    await database.command("COPY", database.key("effect", "p", "one"), database.key("effect", "p", "two"))
    for reader, effect in ((effects, "two"), (EffectStore(database, "p", "", ttl_s=60.0), "one")):
        with pytest.raises(JobStoreUnavailable):
            await reader.claim([effect])
    await database.close()


async def _has_ended(store: JobStore, job: str, owner: str = OWNER) -> bool:
    return (await store.get(job, owner)).ended


async def _was_postponed(store: JobStore, job: str) -> bool:
    return (await store.get(job, OWNER)).postponed > 0
