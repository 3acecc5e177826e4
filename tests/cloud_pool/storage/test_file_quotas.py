"""Quotas of tenants on files and batches, what remains of uploads that break, and when content is deleted.

The user's load: 300 tenants with many devices each on one Redis; some upload what they can, and connections break.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import anyio.lowlevel
import msgspec
import openai
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.storage.config import BatchConfig, FilesConfig, JobsConfig
from causeway_server.cloud_pool.storage.file_contents import FileStoreUnavailable, FileTooLarge
from causeway_server.cloud_pool.storage.file_store import QuotaExceeded
from causeway_server.cloud_pool.storage.redis_client import as_int, as_list, as_text
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import NotFound
from tests.cloud_pool.batches.batch_support import (
    OWNER,
    create_batch,
    create_from,
    custom_ids,
    input_file,
    process,
    rows,
    upload,
)
from tests.cloud_pool.jobs.conftest import Clock, until
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.redis_server import RedisServer
from tests.cloud_pool.jobs.test_api import TIER

MIB = 1024 * 1024
LIMITS = BatchConfig(
    max_file_bytes=8 * MIB,
    max_files=8,
    max_bytes=20 * MIB,
    max_redis_file_bytes=3 * MIB,
    max_redis_bytes=4 * MIB,
    max_redis_total_bytes=6 * MIB,
    max_open_batches=2,
    max_batches=3,
    max_open_jobs=5,
)


@pytest.fixture
def config(config: JobsConfig) -> JobsConfig:
    return msgspec.structs.replace(config, batches=LIMITS)


@pytest.fixture
def processor(stores: JobStores, config: JobsConfig) -> BatchProcessor:
    return BatchProcessor(stores, SubmissionParser(config, {"large": TIER}), config)


@pytest_asyncio.fixture
async def url(config: JobsConfig, clock: Clock) -> AsyncIterator[str]:
    gateway = JobsGateway(config, {"large": TIER}, JobCallers(identify), CollectorRegistry(), clock=clock)
    async with serving(gateway.api.handler) as found:
        yield found
    await gateway.close()


def client_of(url: str, tenant: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant, max_retries=0)


async def usage(stores: JobStores, owner: str = OWNER) -> tuple[int, int, int]:
    found = await stores.files.usage(owner)
    return found.files, found.bytes, found.store_bytes


async def content_keys(stores: JobStores) -> int:
    return len(as_list(await stores.database.command("KEYS", stores.database.key("content", "*"))))


async def test_devices_of_a_tenant_share_its_files(stores: JobStores) -> None:
    for device in range(LIMITS.max_files):
        await upload(stores, b"x", f"acme/{device}")
    with pytest.raises(QuotaExceeded, match=r"may have 8 files \(jobs.batches.max_files\).* Delete files"):
        await upload(stores, b"x", "acme/new")
    await upload(stores, b"x", "other/1")
    assert (await usage(stores))[:2] == (8, 8)


async def test_page_of_files_costs_its_files_alone(config: JobsConfig, clock: Clock, redis_server: RedisServer) -> None:
    """Of forty files one is read for a page of one; files of another purpose and deleted ones are no part of it."""
    batches = msgspec.structs.replace(LIMITS, max_files=100)
    stores = JobStores.open(msgspec.structs.replace(config, batches=batches), clock)
    files = []
    for _ in range(40):
        clock.now += 1.0
        files.append(await upload(stores, b"x"))
    newest = [file.id for file in reversed(files)]
    await stores.database.command("CONFIG", "RESETSTAT")
    assert [file.id for file in await stores.files.list_owned(OWNER, limit=1)] == newest[:1]
    stats = as_text(await stores.database.command("INFO", "commandstats"))
    calls = {
        line.partition(":")[0]: int(line.split("calls=")[1].split(",")[0]) for line in stats.split() if "=" in line
    }
    assert (calls["cmdstat_hgetall"], calls["cmdstat_hmget"]) == (1, 1)
    await stores.files.delete(files[-2])
    page = await stores.files.list_owned(OWNER, after=newest[0], limit=3)
    assert [file.id for file in page] == newest[2:5]
    assert len(await stores.files.list_owned(OWNER, after="file-nowhere", limit=50)) == 39
    assert await stores.files.list_owned(OWNER, purpose="vision") == []
    assert await stores.files.list_owned("acme/another") == []
    await stores.close()


async def test_devices_of_a_tenant_share_its_bytes(stores: JobStores) -> None:
    await upload(stores, b"x" * (2 * MIB), "acme/1")
    await upload(stores, b"x" * MIB, "acme/2")
    with pytest.raises(QuotaExceeded, match=r"exceed the limit of 4194304 \(jobs.batches.max_redis_bytes\)") as caught:
        await upload(stores, b"x" * (MIB + 1), "acme/3")
    assert (caught.value.status, caught.value.retry_after_s) == (429, 60.0)
    await upload(stores, b"x" * MIB, "acme/3")
    assert await usage(stores) == (3, 4 * MIB, 4 * MIB)


async def test_a_file_too_large_for_redis_is_413_that_names_the_ways_out(url: str) -> None:
    async with client_of(url, "acme") as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.files.create(file=("in.jsonl", b"x" * (3 * MIB + 1)), purpose="batch")
    error = caught.value
    assert (error.status_code, error.code) == (413, "file_too_large")
    for word in ("3145728 bytes", "jobs.batches.max_redis_file_bytes", "jobs.files.path", "jobs.files.s3", "Split"):
        assert word in error.message


async def test_a_shared_path_takes_larger_files(config: JobsConfig, clock: Clock, tmp_path: Path) -> None:
    stores = JobStores.open(msgspec.structs.replace(config, files=FilesConfig(path=str(tmp_path))), clock)
    file = await upload(stores, b"x" * (8 * MIB))
    assert file.store == "path"
    with pytest.raises(FileTooLarge, match=r"8388608 bytes \(jobs.batches.max_file_bytes\)"):
        await upload(stores, b"x" * (8 * MIB + 1))
    await upload(stores, b"x" * (8 * MIB))
    with pytest.raises(QuotaExceeded, match=r"jobs.batches.max_bytes"):
        await upload(stores, b"x" * (8 * MIB))
    assert as_int(await stores.database.command("EXISTS", stores.database.key("content", file.id))) == 0
    await stores.close()


async def test_files_of_all_tenants_in_redis_are_bounded(stores: JobStores) -> None:
    await upload(stores, b"x" * (3 * MIB), "a/1")
    await upload(stores, b"x" * (3 * MIB), "b/1")
    with pytest.raises(FileStoreUnavailable, match="max_redis_total_bytes") as caught:
        await upload(stores, b"x", "c/1")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 60.0)


async def test_uploads_at_once_never_exceed_a_quota(stores: JobStores) -> None:
    """Neither do those whose size is not known before they arrive."""
    refused = 0

    async def send(at: int) -> None:
        nonlocal refused
        try:
            async with stores.files.write(f"acme/{at}", 0) as writer:
                for _ in range(24):
                    await writer.write(b"x" * 64 * 1024)
                    await anyio.lowlevel.checkpoint()
                await writer.finish("in.jsonl", "batch")
        except QuotaExceeded:
            refused += 1

    async with anyio.create_task_group() as tasks:
        for at in range(6):
            tasks.start_soon(send, at)
        for _ in range(200):
            assert (await usage(stores))[2] <= LIMITS.max_redis_bytes
            await anyio.lowlevel.checkpoint()
    files, used, stored = await usage(stores)
    assert refused == 6 - files
    assert used == stored == files * 24 * 64 * 1024 <= LIMITS.max_redis_bytes
    assert await content_keys(stores) == files


async def test_an_upload_that_breaks_leaves_nothing(url: str, stores: JobStores) -> None:
    """The client disconnects amid its file, sends a wrong purpose, or no end of the body."""

    async def endless() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(24):
            yield b"x" * 64 * 1024
        await anyio.sleep_forever()

    headers = {"authorization": "Bearer acme", "content-type": "multipart/form-data; boundary=b"}
    async with aiohttp.ClientSession(url) as http:
        sending = asyncio.create_task(http.post("/v1/files", data=endless(), headers=headers))

        async def written() -> bool:
            return (await usage(stores, "acme/1"))[1] >= MIB

        await until(written)
        sending.cancel()

        async def gone() -> bool:
            return await usage(stores, "acme/1") == (0, 0, 0)

        await until(gone)
    async with client_of(url, "acme") as client:
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=("in.jsonl", b"x" * MIB), purpose="fine-tune")
    assert await usage(stores, "acme/1") == (0, 0, 0)
    assert await content_keys(stores) == 0


async def test_an_upload_that_breaks_while_redis_is_away_is_deleted_later(
    config: JobsConfig, clock: Clock, tmp_path: Path
) -> None:
    """The caller gets the error that broke it."""
    server = RedisServer(tmp_path)
    stores = JobStores.open(msgspec.structs.replace(config, redis=server.url), clock)

    async def break_off() -> None:
        async with stores.files.write(OWNER, 0) as writer:
            await writer.write(b"x" * MIB)
            server.kill()
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await break_off()
    server.start()
    assert (await usage(stores))[:2] == (1, MIB)
    assert await stores.files.stored_bytes() == {"redis": MIB}
    clock.now += 601.0
    assert await stores.files.delete_due() == 1
    assert await usage(stores) == (0, 0, 0)
    assert await content_keys(stores) == 0
    await stores.close()
    server.kill()


async def test_a_killed_gateways_upload_is_deleted(stores: JobStores, config: JobsConfig, clock: Clock) -> None:
    """Its client sees no file, and after ten minutes its bytes are given back."""
    dead = JobStores.open(config, clock)
    manager = dead.files.write(OWNER, 2 * MIB)
    writer = await manager.__aenter__()
    await writer.write(b"x" * (MIB + 1))
    assert (await usage(stores))[:2] == (1, 2 * MIB)
    assert await stores.files.list_owned(OWNER) == []
    with pytest.raises(NotFound):
        await stores.files.get(writer.id, OWNER)
    assert await stores.files.delete_due() == 0
    clock.now += 601.0
    assert await stores.files.delete_due() == 1
    assert await usage(stores) == (0, 0, 0)
    assert await content_keys(stores) == 0
    with pytest.raises(FileStoreUnavailable):  # it was only asleep
        await writer.finish("in.jsonl", "batch")
    writer.finished = True
    await manager.__aexit__(None, None, None)
    await dead.close()


async def test_expired_and_deleted_files_give_their_bytes_back(stores: JobStores, clock: Clock) -> None:
    first, _ = await upload(stores, b"x" * MIB), await upload(stores, b"y" * MIB)
    await stores.files.delete(first)
    assert await usage(stores) == (1, MIB, MIB)
    clock.now += LIMITS.file_ttl_s + 1.0
    assert await stores.files.delete_due() == 1
    assert await usage(stores) == (0, 0, 0)
    assert await content_keys(stores) == 0
    left = as_list(await stores.database.command("KEYS", stores.database.key("*")))
    assert {as_text(key).rpartition(":")[2] for key in left} <= {"content_bytes", "layout"}


async def test_a_file_whose_store_is_away_is_deleted_later(
    stores: JobStores, config: JobsConfig, clock: Clock, tmp_path: Path
) -> None:
    """The owner's request succeeds at once; the tenant is charged until the content is gone."""
    folder = tmp_path / "mount"
    folder.mkdir()
    other = JobStores.open(msgspec.structs.replace(config, files=FilesConfig(path=str(folder))), clock)
    file = await upload(other, b"x" * MIB)
    folder.rename(tmp_path / "unmounted")
    await other.files.delete(file)
    with pytest.raises(NotFound):
        await other.files.get(file.id, OWNER)
    assert (await usage(other))[1] == MIB
    (tmp_path / "unmounted").rename(folder)
    clock.now += 61.0
    assert await other.files.delete_due() == 1
    assert (await usage(other))[1] == 0
    assert not (folder / file.id).exists()
    await other.close()


async def test_a_deleted_or_expired_input_stays_until_its_batches_end(
    stores: JobStores, processor: BatchProcessor, clock: Clock
) -> None:
    file = await upload(stores, input_file(30))
    await create_from(stores, file, "batch_1")
    await create_from(stores, file, "batch_2")
    await stores.files.delete(file)
    assert await stores.files.list_owned(OWNER) == []
    with pytest.raises(NotFound):
        await create_from(stores, file, "batch_3")
    for name in ("batch_1", "batch_2"):
        assert await stores.files.lookup(file.id) is not None
        ended = await process(stores, processor, clock, name)
        assert len(await custom_ids(stores, ended, "output")) == 30
        await process(stores, processor, clock, name)
    await stores.files.delete_due()
    assert await stores.files.lookup(file.id) is None


async def test_open_and_recent_batches_of_a_tenant_are_bounded(
    stores: JobStores, processor: BatchProcessor, clock: Clock
) -> None:
    await create_batch(stores, 1, "acme/1", "batch_1")
    await create_batch(stores, 1, "acme/2", "batch_2")
    with pytest.raises(
        QuotaExceeded, match=r"2 batches in progress, which is the maximum \(jobs.batches.max_open_batches\)"
    ):
        await create_batch(stores, 1, "acme/3", "batch_3")
    await create_batch(stores, 1, "other/1", "batch_4")
    for name in ("batch_1", "batch_2"):
        await process(stores, processor, clock, name)
    file = (await stores.files.list_owned("acme/3"))[0]
    await create_from(stores, file, "batch_5")
    await process(stores, processor, clock, "batch_5")
    with pytest.raises(QuotaExceeded, match=r"jobs.batches.max_batches"):
        await create_from(stores, file, "batch_6")
    clock.now += LIMITS.file_ttl_s + 1.0
    while await stores.files.delete_due():
        pass
    await create_batch(stores, 1, "acme/1", "batch_7")


async def test_a_batch_needs_room_for_its_output_files(stores: JobStores) -> None:
    files = [await upload(stores, input_file(1)) for _ in range(LIMITS.max_files - 1)]
    with pytest.raises(QuotaExceeded, match=r"max_files"):
        await create_from(stores, files[0])
    await stores.files.delete(files[1])
    assert (await create_from(stores, files[0])).state == "validating"


async def test_lines_without_room_for_their_output_fail_and_say_so(
    stores: JobStores, processor: BatchProcessor, clock: Clock
) -> None:
    """Answers that exist are kept, and no line is lost."""
    await create_batch(stores, 20)
    await processor.step()
    await processor.step()
    await upload(stores, b"x" * (3 * MIB))
    await upload(stores, b"x" * (MIB - 3000))
    for record in (await stores.jobs.claim("w", "large", ["bulk"] * 5)).records:
        await stores.jobs.succeed(record.id, record.fence, b'"%b"' % (b"x" * 1000))
    ended = await process(stores, processor, clock)
    assert ended.state == "completed"
    assert await custom_ids(stores, ended, "output") == ["1", "2", "3", "4", "5"]
    errors = [row["error"] for row in await rows(stores, ended, "errors")]
    assert len(errors) == 15
    assert {error["code"] for error in errors} == {"quota_exceeded"}  # type: ignore[index]
    assert "jobs.batches.max_redis_bytes" in str(errors[0])


async def test_a_batch_waits_while_other_tenants_fill_redis(
    stores: JobStores, processor: BatchProcessor, clock: Clock
) -> None:
    await create_batch(stores, 20)
    await processor.step()
    full = [await upload(stores, b"x" * (3 * MIB), "a/1"), await upload(stores, b"x" * (3 * MIB - 10_000), "b/1")]
    await upload(stores, b"x" * (10_000 - (await usage(stores))[1]), "c/1")
    for _ in range(3):
        clock.now += 1.0
        await processor.step()
    waiting = await stores.batches.lookup("batch_1")
    assert waiting is not None
    assert (waiting.state, waiting.submitted, waiting.failed) == ("in_progress", 0, 0)
    await stores.files.delete(full[0])
    assert len(await custom_ids(stores, await process(stores, processor, clock), "output")) == 20


async def test_an_upload_while_redis_is_away_is_503(config: JobsConfig, clock: Clock, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    gateway = JobsGateway(
        msgspec.structs.replace(config, redis=server.url),
        {"large": TIER},
        JobCallers(identify),
        CollectorRegistry(),
        clock=clock,
    )
    async with serving(gateway.api.handler) as url, client_of(url, "acme") as client:
        file = await client.files.create(file=("in.jsonl", b"x" * MIB), purpose="batch")
        server.kill()
        with pytest.raises(openai.InternalServerError) as caught:
            await client.files.create(file=("in.jsonl", b"x" * MIB), purpose="batch")
        assert (caught.value.status_code, "retry-after" in caught.value.response.headers) == (503, True)
        server.start()
        assert len((await client.files.content(file.id)).content) == MIB
    await gateway.close()
    server.kill()
