"""Content in a bucket behind the S3 API, by obstore: one object per part.

Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a web identity or the machine's role.
A part fits into one request, so no multipart upload can be left behind.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from router.errors import ConfigError

from ..config import S3Config
from ..errors import FileContentLost, FileStoreUnavailable
from .port import StoreName

if TYPE_CHECKING:
    from obstore.store import S3Store

_log = logging.getLogger("causeway.cloud.files")
_CONNECT_S = 3.0
_REQUEST_S = 20.0
_RETRIES = 3
_RETRY_WITHIN_S = 15.0
_RETRY_AFTER_S = 30.0
T = TypeVar("T")


class S3Content:
    """A ContentStore in a bucket."""

    name: Final[StoreName] = "s3"

    def __init__(self, config: S3Config) -> None:
        """Raises ConfigError for settings that cannot be used."""
        self._store = _open(config)

    async def put(self, file: str, part: str, data: bytes) -> None:
        """Write a part."""
        try:
            await _call(self._store.put_async(f"{file}/{part}", data, use_multipart=False))
        except FileNotFoundError as error:
            raise _unavailable(error) from error  # there is no such bucket

    async def get(self, file: str, part: str) -> bytes:
        """Return a part. Raises FileContentLost."""

        async def read() -> bytes:
            reply = await self._store.get_async(f"{file}/{part}")
            return bytes(await reply.bytes_async())

        try:
            return await _call(read())
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise _unavailable(error) from error
            raise FileContentLost(f"The bucket of jobs.files.s3 has no part {part} of {file} any more.") from None

    async def delete(self, file: str) -> None:
        """Delete all parts."""

        async def remove() -> None:
            async for objects in self._store.list(file):
                await self._store.delete_async([item["path"] for item in objects])

        try:
            await _call(remove())
        except FileNotFoundError as error:
            raise _unavailable(error) from error

    async def close(self) -> None:
        """The client closes with its last reference."""


def _open(config: S3Config) -> S3Store:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    if config.endpoint and not config.endpoint.startswith(("http://", "https://")):
        raise ConfigError("must be a URL as https://s3.example.com", where="jobs.files.s3.endpoint")
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


async def _call(request: Coroutine[Any, Any, T]) -> T:
    """Raises FileStoreUnavailable, and FileNotFoundError as it is."""
    from obstore.exceptions import BaseError

    try:
        return await request
    except FileNotFoundError:
        raise
    except (BaseError, OSError, ValueError) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> FileStoreUnavailable:
    # The reason names bucket and endpoint: for the operator's log, not for clients.
    _log.warning("jobs.files.s3: %s", str(error).strip()[:500])
    return FileStoreUnavailable(
        f"The store of files does not answer or refuses ({type(error).__name__}). Try again later.",
        retry_after_s=_RETRY_AFTER_S,
    )
