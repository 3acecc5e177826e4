"""One suite over all content stores: a real Redis, a folder, and an S3 API on a real socket."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
import pytest_asyncio

from causeway_server.cloud_pool.storage.config import FilesConfig, JobsConfig, S3Config
from causeway_server.cloud_pool.storage.file_contents import (
    ContentStore,
    ContentStores,
    FileContentLost,
    FileStoreUnavailable,
)
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.storage.stores import SCRIPTS
from causeway_server.router.errors import ConfigError, JobStoreUnavailable
from tests.cloud_pool.jobs.redis_server import RedisServer

from .s3_server import S3Server

STORES = ("redis", "path", "s3")
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(params=STORES)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> FilesConfig:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        prefix = f"test-{tmp_path.name}"
        return FilesConfig(s3=msgspec.structs.replace(server.files.s3, prefix=prefix))
    return FilesConfig(path=str(tmp_path)) if request.param == "path" else FilesConfig()


@pytest_asyncio.fixture
async def stores(files: FilesConfig, config: JobsConfig) -> AsyncIterator[ContentStores]:
    database = RedisClient(config, SCRIPTS)
    yield ContentStores(files, database)
    await database.close()


@pytest.fixture
def store(stores: ContentStores) -> ContentStore:
    return stores.current


async def test_parts_come_back_as_they_were_written(store: ContentStore) -> None:
    for data in (b"", b"\x00\r\n\xff", bytes(range(256)) * 8 * 1024):
        await store.put("file-1", "1", data)
        assert await store.get("file-1", "1") == data


async def test_a_part_is_replaced_whole_also_by_many_writers(store: ContentStore) -> None:
    """Readers see one of the versions, never a mixture."""
    versions = [bytes([at]) * MIB for at in range(6)]
    await store.put("file-1", "1", versions[0])
    async with anyio.create_task_group() as tasks:
        for data in versions:
            tasks.start_soon(store.put, "file-1", "1", data)
        for _ in range(6):
            assert await store.get("file-1", "1") in versions
    assert await store.get("file-1", "1") in versions


async def test_deleting_removes_all_parts_of_one_file(store: ContentStore) -> None:
    """Also those that no record lists; it can be repeated, and a file with a longer name stays."""
    for part in ("1", "2", "9-never-listed"):
        await store.put("file-1", part, b"x")
    await store.put("file-10", "1", b"other")
    for _ in range(2):
        await store.delete("file-1")
    for part in ("1", "2", "9-never-listed"):
        with pytest.raises(FileContentLost):
            await store.get("file-1", part)
    assert await store.get("file-10", "1") == b"other"
    await store.delete("file-never-written")


async def test_a_missing_part_is_lost(store: ContentStore) -> None:
    await store.put("file-1", "1", b"x")
    for file, part in (("file-1", "2"), ("file-2", "1")):
        with pytest.raises(FileContentLost, match=part):
            await store.get(file, part)


async def test_a_cancelled_write_leaves_the_part_whole_or_absent(store: ContentStore) -> None:
    data = b"x" * (8 * MIB)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.put, "file-1", "1", data)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    with contextlib.suppress(FileContentLost):
        assert await store.get("file-1", "1") == data


async def test_a_full_disk_is_503_and_leaves_no_half_part(tmp_path: Path, config: JobsConfig) -> None:
    database = RedisClient(config, SCRIPTS)
    store = ContentStores(FilesConfig(path=str(tmp_path)), database).current
    await store.put("file-1", "1", b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, hard))  # the kernel refuses to write more
    try:
        for part in ("1", "2"):
            with pytest.raises(FileStoreUnavailable) as caught:
                await store.put("file-1", part, b"x" * MIB)
            assert (caught.value.status, caught.value.retry_after_s) == (503, 30.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await store.get("file-1", "1") == b"before"
    assert [path.name for path in (tmp_path / "file-1").iterdir()] == ["1"]
    await database.close()


async def test_a_shared_path_that_is_gone_is_no_lost_content(tmp_path: Path, config: JobsConfig) -> None:
    """An unmounted folder must not fail batches: it is mounted again."""
    folder = tmp_path / "mount"
    folder.mkdir()
    database = RedisClient(config, SCRIPTS)
    store = ContentStores(FilesConfig(path=str(folder)), database).current
    await store.put("file-1", "1", b"x")
    folder.rename(tmp_path / "unmounted")
    for call in (
        partial(store.get, "file-1", "1"),
        partial(store.put, "file-1", "2", b"x"),
        partial(store.delete, "file-1"),
    ):
        with pytest.raises(FileStoreUnavailable):
            await call()
    (tmp_path / "unmounted").rename(folder)
    assert await store.get("file-1", "1") == b"x"
    await database.close()


async def test_an_unreachable_s3_is_503_and_loses_nothing(config: JobsConfig) -> None:
    server = S3Server("bucket-that-stays")
    database = RedisClient(config, SCRIPTS)
    store = ContentStores(server.files, database).current
    await store.put("file-1", "1", b"x")
    server.stop()
    for call in (
        partial(store.get, "file-1", "1"),
        partial(store.put, "file-1", "2", b"x"),
        partial(store.delete, "file-1"),
    ):
        with pytest.raises(FileStoreUnavailable) as caught:
            await call()
        assert (caught.value.status, caught.value.retry_after_s) == (503, 30.0)
    server.start()
    assert await store.get("file-1", "1") == b"x"
    server.stop()
    await database.close()


async def test_a_bucket_that_does_not_exist_is_503(s3_server: S3Server, config: JobsConfig) -> None:
    files = FilesConfig(s3=msgspec.structs.replace(s3_server.files.s3, bucket="nowhere"))
    store = ContentStores(files, RedisClient(config, SCRIPTS)).current
    for call in (partial(store.put, "file-1", "1", b"x"), partial(store.get, "file-1", "1")):
        with pytest.raises(FileStoreUnavailable):
            await call()


async def test_an_unreachable_or_full_redis_is_503(config: JobsConfig, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    database = RedisClient(JobsConfig(redis=server.url, key_prefix=config.key_prefix), SCRIPTS)
    store = ContentStores(FilesConfig(), database).current
    await store.put("file-1", "1", b"x")
    await database.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(JobStoreUnavailable):
        await store.put("file-1", "2", b"x" * MIB)
    assert await store.get("file-1", "1") == b"x"
    server.kill()
    with pytest.raises(JobStoreUnavailable):
        await store.get("file-1", "1")
    server.start()
    assert await store.get("file-1", "1") == b"x"
    server.kill()
    await database.close()


async def test_files_stay_readable_in_redis_after_another_store_is_configured(
    tmp_path: Path, config: JobsConfig
) -> None:
    database = RedisClient(config, SCRIPTS)
    await ContentStores(FilesConfig(), database).current.put("file-1", "1", b"x")
    later = ContentStores(FilesConfig(path=str(tmp_path)), database)
    assert await later.named("redis").get("file-1", "1") == b"x"
    with pytest.raises(FileStoreUnavailable, match="s3"):
        later.named("s3")
    await database.close()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (FilesConfig(path="/nowhere/at/all"), "jobs.files.path"),
        (FilesConfig(path="/", s3=S3Config(bucket="b")), "either path or s3.bucket"),
        (FilesConfig(s3=S3Config(bucket="b", endpoint="nonsense")), "jobs.files.s3"),
    ],
)
def test_unusable_settings_are_config_errors(files: FilesConfig, message: str, config: JobsConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        ContentStores(files, RedisClient(config, SCRIPTS))
    assert message in str(caught.value)
