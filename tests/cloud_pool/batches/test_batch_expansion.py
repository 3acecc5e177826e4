"""Lines become jobs as earlier ones end, each exactly once: with killed, paused and competing workers and lost stores.

The user's load: files of thousands of lines, several workers, a worker or the store of files dying at any moment.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import msgspec
import pytest
import pytest_asyncio

from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.jobs.worker.runner import TokenRevoked
from causeway_server.cloud_pool.storage.batch_store import Batch, ResultPart, batch_job_id, is_final
from causeway_server.cloud_pool.storage.config import BatchConfig, FilesConfig, JobsConfig
from causeway_server.cloud_pool.storage.file_contents import FileStoreUnavailable
from causeway_server.cloud_pool.storage.file_store import FilePart
from causeway_server.cloud_pool.storage.redis_client import Argument, RedisClient, Reply, as_int, as_list, as_text
from causeway_server.cloud_pool.storage.stores import SCRIPTS, JobStores
from causeway_server.router.errors import JobStoreUnavailable
from tests.cloud_pool.jobs.conftest import Clock, until
from tests.cloud_pool.jobs.test_api import TIER
from tests.cloud_pool.storage.s3_server import S3Server

from .batch_support import (
    OWNER,
    answer_jobs,
    create_batch,
    create_from,
    custom_ids,
    input_line,
    numbers,
    process,
    rows,
    upload,
)

TIERS = {"large": TIER}
LIMITS = BatchConfig(max_open_jobs=5, max_line_bytes=2000)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(config: JobsConfig) -> JobsConfig:
    return msgspec.structs.replace(config, batches=LIMITS)


def processor_of(stores: JobStores, config: JobsConfig) -> BatchProcessor:
    return BatchProcessor(stores, SubmissionParser(config, TIERS), config)


@pytest.fixture
def processor(stores: JobStores, config: JobsConfig) -> BatchProcessor:
    return processor_of(stores, config)


async def job_keys(stores: JobStores) -> list[str]:
    keys = as_list(await stores.database.command("KEYS", stores.database.key("job", "*")))
    return [as_text(key) for key in keys]


async def current(stores: JobStores, name: str = "batch_1") -> Batch:
    batch = await stores.batches.lookup(name)
    assert batch is not None
    return batch


async def assert_exact(stores: JobStores, batch: Batch, lines: int) -> None:
    """Each line is in the output once, in order, and nothing of the batch is left but its record and files."""
    assert await custom_ids(stores, batch, "output") == numbers(range(1, lines + 1))
    assert (batch.total, batch.completed, batch.failed, batch.ended) == (lines, lines, 0, lines)
    assert await job_keys(stores) == []


@pytest.mark.slow
async def test_a_large_batch_has_a_few_jobs_at_a_time(
    stores: JobStores, processor: BatchProcessor, clock: Clock
) -> None:
    """500 lines never have more than 5 open jobs, nor more than 20 in Redis; the input is not copied."""
    await create_batch(stores, 500)
    most_open = most_kept = 0
    while not is_final((batch := await current(stores)).state):
        await processor.step()
        most_open = max(most_open, sum(depth.queued for depth in (await stores.jobs.depths()).queues))
        most_kept = max(most_kept, len(await job_keys(stores)))
        await answer_jobs(stores, 3)
        clock.now += 1.0
    assert batch.state == "completed"
    assert most_open == LIMITS.max_open_jobs
    assert most_kept <= 4 * LIMITS.max_open_jobs
    await assert_exact(stores, batch, 500)


@pytest.mark.slow
async def test_a_line_that_takes_long_holds_back_only_so_many_others(
    stores: JobStores, processor: BatchProcessor, clock: Clock
) -> None:
    """The output keeps the input's order, and the outcomes that wait for the slow line are bounded."""
    await create_batch(stores, 100)
    await processor.step()
    await processor.step()
    slow = next(record for record in (await stores.jobs.claim("w", "large", ["bulk"])).records)
    for _ in range(60):
        await answer_jobs(stores)
        clock.now += 1.0
        await processor.step()
    assert (await current(stores)).submitted == 4 * LIMITS.max_open_jobs
    await stores.jobs.succeed(slow.id, slow.fence, b"{}")
    batch = await process(stores, processor, clock)
    await assert_exact(stores, batch, 100)


class Killed(BaseException):
    """The process of a worker ends here."""


class MortalDatabase(RedisClient):
    """Dies at a command: before Redis gets it, or after Redis has executed it."""

    def __init__(self, config: JobsConfig, clock: Clock) -> None:
        super().__init__(config, SCRIPTS, clock=clock)
        self.lives = 0
        self.executes = False

    async def command(self, *arguments: Argument) -> Reply:
        dies = self._count()
        reply = None if dies and not self.executes else await super().command(*arguments)
        if dies:
            raise Killed
        return reply

    async def run(self, script: str, *arguments: Argument) -> Reply:
        dies = self._count()
        reply = None if dies and not self.executes else await super().run(script, *arguments)
        if dies:
            raise Killed
        return reply

    def _count(self) -> bool:
        self.lives -= 1
        return self.lives == 0


@pytest.mark.parametrize("executes", [False, True])
async def test_a_worker_that_dies_at_any_command_loses_and_repeats_no_line(
    stores: JobStores, config: JobsConfig, clock: Clock, *, executes: bool
) -> None:
    """It dies at the first command of its life, its successor at the second of its, and so on."""
    lines = 23
    await create_batch(stores, lines)
    deaths, ran = 0, []
    for lives in range(1, 400):
        database = MortalDatabase(config, clock)
        database.lives, database.executes = lives % 40 + 1, executes
        processor = processor_of(JobStores.over(database, config), config)
        try:
            while not is_final((await current(stores)).state):
                await processor.step()
                ran += await answer_jobs(stores, 4)
                clock.now += 1.0
        except Killed:
            deaths += 1
        await database.close()
        clock.now += config.lease_s  # until the dead worker's lease is over
        ran += await answer_jobs(stores, 4)
        if is_final((batch := await current(stores)).state):
            break
    assert deaths > 10
    assert batch.state == "completed"
    await assert_exact(stores, batch, lines)
    assert sorted(ran) == sorted(batch_job_id("batch_1", at) for at in range(1, lines + 1))


@pytest.mark.slow
async def test_workers_that_advance_a_batch_at_once_lose_and_repeat_no_line(
    stores: JobStores, config: JobsConfig, clock: Clock
) -> None:
    """Their leases do not help: each acts as if the others were dead."""
    config = msgspec.structs.replace(config, lease_s=0.001)
    await create_batch(stores, 200)
    processors = [processor_of(stores, config) for _ in range(6)]
    ran: list[str] = []
    while not is_final((batch := await current(stores)).state):
        clock.now += 1.0
        async with anyio.create_task_group() as tasks:
            for processor in processors:
                tasks.start_soon(processor.step)
                clock.now += 0.01
        ran += await answer_jobs(stores)
    await assert_exact(stores, batch, 200)
    assert len(ran) == len(set(ran)) == 200


async def test_a_worker_that_was_paused_beyond_its_lease_changes_nothing(
    stores: JobStores, processor: BatchProcessor, clock: Clock
) -> None:
    """It writes its part under a name of its own, and its report is too late."""
    await create_batch(stores, 20)
    await processor.step()
    await processor.step()
    await answer_jobs(stores)
    paused = await current(stores)
    clock.now += 1.0
    await processor.step()
    assert (await current(stores)).collected == 5
    name = "file-1-output"
    await stores.files.write_part(name, "kiosk", "5-late", b"late\n")
    parts: list[tuple[ResultPart, FilePart]] = [("output", FilePart("5-late", 5))]
    assert not await stores.batches.record_collected(paused, 5, parts, "redis", expired=False)
    assert not await stores.batches.refuse_line(paused, paused.submitted, 0, "x", b"{}")
    await assert_exact(stores, await process(stores, processor, clock), 20)


@pytest.mark.slow
async def test_a_batch_survives_workers_that_are_killed(config: JobsConfig) -> None:
    """kill -9 of five workers, one after another, while each expands, runs and collects: each line has one answer."""
    lines = 400
    limits = BatchConfig(max_open_jobs=40)
    config = msgspec.structs.replace(config, batches=limits, lease_s=0.5, reclaim_interval_s=0.05)
    stores = JobStores.open(config)
    await create_batch(stores, lines)
    argument = msgspec.json.encode(config).decode()
    for kill_after in (20, 60, 40, 50, 30, None):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.cloud_pool.batches.batch_worker_process",
            argument,
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        if kill_after is None:
            reading = asyncio.create_task(process.stdout.read())

            async def over() -> bool:
                return is_final((await current(stores)).state)

            await until(over, patience_s=120.0)
            process.kill()
            await reading
        else:
            for _ in range(kill_after):
                await process.stdout.readline()
            process.kill()
        await process.wait()
    batch = await current(stores)
    assert batch.state == "completed"
    await assert_exact(stores, batch, lines)
    await stores.close()


async def test_cancelling_in_the_middle_loses_no_line(
    stores: JobStores, processor: BatchProcessor, config: JobsConfig, clock: Clock
) -> None:
    """Two workers are at it; answers are kept, and every other line is in the error file once."""
    other = processor_of(stores, msgspec.structs.replace(config, lease_s=0.001))
    batch = await create_batch(stores, 60)
    for _ in range(12):
        await processor.step()
        await answer_jobs(stores, 3)
        clock.now += 1.0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(processor.step)
        tasks.start_soon(stores.batches.cancel, batch)
        tasks.start_soon(other.step)
    ended = await process(stores, processor, clock)
    assert ended.state == "cancelled"
    answered, others = await custom_ids(stores, ended, "output"), await custom_ids(stores, ended, "errors")
    assert len(answered) >= 9
    assert sorted(answered + others, key=int) == numbers(range(1, 61))
    assert {row["error"]["code"] for row in await rows(stores, ended, "errors")} == {"batch_cancelled"}  # type: ignore[index]
    assert (ended.completed, ended.failed) == (len(answered), len(others))
    assert await job_keys(stores) == []


async def test_expiry_in_the_middle_loses_no_line(stores: JobStores, processor: BatchProcessor, clock: Clock) -> None:
    await create_batch(stores, 60)
    for _ in range(12):
        await processor.step()
        await answer_jobs(stores, 3)
        clock.now += 1.0
    clock.now += LIMITS.completion_window_s
    await stores.jobs.promote_and_expire()
    ended = await process(stores, processor, clock)
    assert ended.state == "expired"
    answered, others = await custom_ids(stores, ended, "output"), await custom_ids(stores, ended, "errors")
    assert answered
    assert sorted(answered + others, key=int) == numbers(range(1, 61))
    assert {row["error"]["code"] for row in await rows(stores, ended, "errors")} == {"batch_expired"}  # type: ignore[index]


async def test_lines_of_a_tier_that_is_gone_fail_by_name(
    stores: JobStores, config: JobsConfig, processor: BatchProcessor, clock: Clock
) -> None:
    """The configuration changed while the batch ran: its other lines go on."""
    body = {"model": "going", "messages": [{"role": "user", "content": "hi"}]}
    lines = [input_line(str(at)) if at % 2 else input_line(str(at), body=body) for at in range(1, 9)]
    await create_from(stores, await upload(stores, "\n".join(lines).encode()))
    before = BatchProcessor(stores, SubmissionParser(config, TIERS | {"going": TIER}), config)
    await before.step()
    ended = await process(stores, processor, clock)
    assert ended.state == "completed"
    assert await custom_ids(stores, ended, "output") == numbers(range(1, 9, 2))
    assert {row["error"]["code"] for row in await rows(stores, ended, "errors")} == {"model_not_found"}  # type: ignore[index]
    assert await custom_ids(stores, ended, "errors") == numbers(range(2, 9, 2))


async def test_a_line_whose_token_is_revoked_says_so(
    stores: JobStores, processor: BatchProcessor, clock: Clock
) -> None:
    await create_batch(stores, 3)
    await processor.step()
    await processor.step()
    for record in (await stores.jobs.claim("w", "large", ["bulk"])).records:
        await stores.jobs.fail(record.id, record.fence, TokenRevoked("The job did not run."), "cancel")
    ended = await process(stores, processor, clock)
    (row,) = await rows(stores, ended, "errors")
    assert row["error"] == {"code": "token_revoked", "message": "The job did not run."}


# --- over each store of files -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    server = S3Server("batches")
    yield server
    server.stop()


@pytest_asyncio.fixture(params=["redis", "path", "s3"])
async def stored(
    request: pytest.FixtureRequest, config: JobsConfig, clock: Clock, tmp_path: Path
) -> AsyncIterator[JobStores]:
    files = FilesConfig()
    if request.param == "s3":
        files = request.getfixturevalue("s3_server").files
    if request.param == "path":
        files = FilesConfig(path=str(tmp_path))
    stores = JobStores.open(msgspec.structs.replace(config, files=files), clock)
    yield stores
    await stores.close()


@pytest.mark.slow
async def test_a_batch_is_complete_over_every_store(stored: JobStores, config: JobsConfig, clock: Clock) -> None:
    """A file of several parts: lines continue across them."""
    filler = "x" * 1500
    lines = [input_line(str(at), note=filler) for at in range(1, 1001)]
    file = await upload(stored, "\n".join(lines).encode())
    assert len(await stored.files.parts(file.id)) == 2
    config = msgspec.structs.replace(config, batches=msgspec.structs.replace(LIMITS, max_open_jobs=200))
    await create_from(stored, file)
    batch = await process(stored, processor_of(stored, config), clock)
    assert batch.state == "completed"
    await assert_exact(stored, batch, 1000)


async def test_a_store_that_goes_away_delays_a_batch_and_loses_nothing(
    stored: JobStores, config: JobsConfig, clock: Clock
) -> None:
    await create_batch(stored, 40)
    processor = processor_of(stored, config)
    for _ in range(4):
        await processor.step()
        await answer_jobs(stored)
        clock.now += 1.0
    content = FaultyContent(stored)
    content.fails = True
    for _ in range(3):
        clock.now += config.lease_s + 1.0
        with pytest.raises(JobStoreUnavailable):
            await processor_of(content.stores, config).step()
    content.fails = False
    clock.now += config.lease_s + 1.0
    await assert_exact(stored, await process(stored, processor_of(content.stores, config), clock), 40)


class FaultyContent:
    """A content store that can be switched off."""

    def __init__(self, stores: JobStores) -> None:
        self.fails = False
        self._inner = stores.contents.current
        self.name = self._inner.name
        self.stores = stores
        stores.contents.current = self
        self._named = stores.contents.named

    async def put(self, file: str, part: str, data: bytes) -> None:
        await self._inner.put(file, part, data) if not self.fails else self._fail()

    async def get(self, file: str, part: str) -> bytes:
        return await self._inner.get(file, part)

    async def delete(self, file: str) -> None:
        await self._inner.delete(file) if not self.fails else self._fail()

    def _fail(self) -> None:
        raise FileStoreUnavailable("switched off")


async def test_a_batch_whose_content_something_else_deleted_fails_and_keeps_its_answers(
    stored: JobStores, config: JobsConfig, clock: Clock
) -> None:
    batch = await create_batch(stored, 40)
    processor = processor_of(stored, config)
    for _ in range(4):
        await processor.step()
        await answer_jobs(stored)
        clock.now += 1.0
    await stored.contents.current.delete(batch.input)
    ended = await process(stored, processor_of(stored, config), clock)
    assert ended.state == "failed"
    assert "file_content_lost" in ended.line_errors
    assert len(await custom_ids(stored, ended, "output")) >= 5
    assert as_int(await stored.database.command("ZCARD", stored.database.key("open", OWNER.partition("/")[0]))) == 0
