"""The stores of files' contents, behind one small interface: a file is an ordered list of parts of a few MiB.

Small contents are stored in Redis, others in a folder that gateways and workers share, or in a bucket behind the S3
API. `file_store` lists a part only after it was written completely, so a killed writer leaves no visible part.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from anyio import to_thread

from causeway_server.router.errors import BodyTooLarge, CausewayError, ConfigError, JobStoreUnavailable
from causeway_server.router.serving.folders import sync, write_atomically

from .config import FilesConfig, S3Config
from .redis_client import RedisClient, as_bytes

if TYPE_CHECKING:
    from obstore.store import S3Store

StoreName = Literal["redis", "path", "s3"]
log = logging.getLogger(__name__)
_RETRY_AFTER_S = 30.0
_MARKER = ".causeway-files"
"""The marker file. Without it the folder is not the one of the start, for example not mounted."""
T = TypeVar("T")
_CONNECT_S = 3.0
_REQUEST_S = 20.0
_RETRIES = 3
_RETRY_WITHIN_S = 15.0


class FileStoreUnavailable(JobStoreUnavailable, code="file_store_unavailable"):
    """The store of file contents does not answer, cannot write, or is full."""


class FileContentLost(CausewayError, code="file_content_lost"):
    """A file's record exists, but its content does not, because software other than Causeway deleted it."""


class FileTooLarge(BodyTooLarge, code="file_too_large"):
    """The file exceeds the limit of a single file or of all files of the tenant."""


class ContentStore(Protocol):
    """A store of file parts. Names of files and parts consist of letters, digits, `.`, `_` and `-`.

    Every method can be repeated. If the store does not answer or cannot write, it raises JobStoreUnavailable (outside
    Redis its subclass FileStoreUnavailable).
    """

    @property
    def name(self) -> StoreName:
        """Name of this store in the records of files."""

    async def put(self, file: str, part: str, data: bytes) -> None:
        """Write a part: stored completely and durably on return; after an error completely or not at all."""

    async def get(self, file: str, part: str) -> bytes:
        """Return a part. Raises FileContentLost if it does not exist."""

    async def delete(self, file: str) -> None:
        """Delete all parts of a file, including those of killed writers. Succeeds if there are none."""


class RedisContent:
    """A ContentStore over the job store's connections, in memory, so for small content: one hash per file.

    Every method raises JobStoreUnavailable.
    """

    name: Final[StoreName] = "redis"

    def __init__(self, database: RedisClient) -> None:
        self._db = database

    async def put(self, file: str, part: str, data: bytes) -> None:
        await self._db.command("HSET", self._db.key("content", file), part, data)

    async def get(self, file: str, part: str) -> bytes:
        data = await self._db.command("HGET", self._db.key("content", file), part)
        if data is None:
            raise FileContentLost(f"Redis no longer has part {part} of {file}.")
        return as_bytes(data)

    async def delete(self, file: str) -> None:
        await self._db.command("UNLINK", self._db.key("content", file))


class PathContent:
    """A ContentStore in a folder that all gateways and workers share, such as an NFS mount: one folder per file.

    A part is written to a temporary file, flushed to disk and renamed, so that no reader sees an incomplete part.
    """

    name: Final[StoreName] = "path"

    def __init__(self, folder: str) -> None:
        """Open the folder. Raises ConfigError if it is not a folder in which this process may write."""
        self._root = Path(folder)
        try:
            (self._root / _MARKER).touch(mode=0o600)
            status = self._root.stat()
            if status.st_uid == os.geteuid():  # Prompts and answers of all tenants: not for other accounts.
                self._root.chmod(stat.S_IMODE(status.st_mode) & ~stat.S_IRWXO)
        except OSError as error:
            reason = f"{folder} must be a folder that this process may write to: {error.strerror}"
            raise ConfigError(reason, where="jobs.files.path") from error

    async def put(self, file: str, part: str, data: bytes) -> None:

        def write() -> None:
            (self._root / _MARKER).stat()
            write_atomically(self._root / file / part, data, 0o640)
            sync(self._root / file)
            sync(self._root)

        await _in_thread(write)

    async def get(self, file: str, part: str) -> bytes:

        def read() -> bytes | None:
            try:
                return (self._root / file / part).read_bytes()
            except FileNotFoundError:
                (self._root / _MARKER).stat()
                return None

        data = await _in_thread(read)
        if data is None:
            raise FileContentLost(f"The folder jobs.files.path no longer has part {part} of {file}.")
        return data

    async def delete(self, file: str) -> None:

        def remove() -> None:
            (self._root / _MARKER).stat()
            if (self._root / file).is_dir():
                shutil.rmtree(self._root / file)

        await _in_thread(remove)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread. Raises FileStoreUnavailable."""
    try:
        return await to_thread.run_sync(work)
    except OSError as error:
        log.warning("The folder jobs.files.path failed: %s", error)
        reason = error.strerror or type(error).__name__
        raise FileStoreUnavailable(
            f"The folder of files failed ({reason}). Try again later.", retry_after_s=_RETRY_AFTER_S
        ) from error


class S3Content:
    """A ContentStore in a bucket behind the S3 API, by obstore: one object per part.

    Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a web identity or the machine's
    role. A part fits into one request, so no multipart upload can be left behind.
    """

    name: Final[StoreName] = "s3"

    def __init__(self, config: S3Config) -> None:
        """Open the bucket. Raises ConfigError for settings that cannot be used."""
        self._store = _open(config)

    async def put(self, file: str, part: str, data: bytes) -> None:
        await _call(self._store.put_async(f"{file}/{part}", data, use_multipart=False))

    async def get(self, file: str, part: str) -> bytes:

        async def read() -> bytes:
            reply = await self._store.get_async(f"{file}/{part}")
            return bytes(await reply.bytes_async())

        return await _call(read(), FileContentLost(f"The bucket of jobs.files.s3 no longer has part {part} of {file}."))

    async def delete(self, file: str) -> None:

        async def remove() -> None:
            async for objects in self._store.list(file):
                await self._store.delete_async([item["path"] for item in objects])

        await _call(remove())


def _open(config: S3Config) -> S3Store:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    if config.endpoint and not config.endpoint.startswith(("http://", "https://")):
        raise ConfigError("The value must be a URL such as https://s3.example.com.", where="jobs.files.s3.endpoint")
    try:
        return S3Store(
            config.bucket,
            prefix=config.prefix or None,
            config={"endpoint": config.endpoint} if config.endpoint else None,
            region=config.region,
            client_options={
                "allow_http": config.endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "timeout": timedelta(seconds=_REQUEST_S),
            },
            retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_WITHIN_S)},
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(str(error), where="jobs.files.s3") from error


async def _call(request: Coroutine[Any, Any, T], lost: FileContentLost | None = None) -> T:
    """Return the result of `request`. Raises FileStoreUnavailable, or `lost` for an object missing in the bucket."""
    from obstore.exceptions import BaseError

    try:
        return await request
    except (BaseError, OSError, ValueError) as error:
        if lost is not None and isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
            raise lost from None
        # The reason names bucket and endpoint: for the operator's log, not for clients.
        log.warning("The bucket of jobs.files.s3 failed: %s", str(error).strip()[:500])
        raise FileStoreUnavailable(
            f"The store of files does not answer, or refuses access ({type(error).__name__}). Try again later.",
            retry_after_s=_RETRY_AFTER_S,
        ) from error


class ContentStores:
    """The store for new files (`current`), and Redis, where older files may be."""

    def __init__(self, config: FilesConfig, database: RedisClient) -> None:
        """Open the stores. Raises ConfigError for settings that cannot be used."""
        if config.path and config.s3.bucket:
            raise ConfigError("Set either path or s3.bucket, not both.", where="jobs.files")
        self.current: ContentStore = RedisContent(database)
        self._by_name: dict[str, ContentStore] = {"redis": self.current}
        if config.path:
            self.current = PathContent(config.path)
        elif config.s3.bucket:
            self.current = S3Content(config.s3)
        self._by_name[self.current.name] = self.current

    def named(self, name: str) -> ContentStore:
        """Return the store with this name. Raises FileStoreUnavailable if it is no longer configured."""
        store = self._by_name.get(name)
        if store is None:
            raise FileStoreUnavailable(f"This file is in a store ({name}) that jobs.files no longer names.")
        return store
