"""Content in Redis: one hash per file. For small content, since Redis keeps it in memory."""

from __future__ import annotations

from typing import Final

from ..errors import FileContentLost
from ..redis_client import RedisClient, as_bytes
from .port import StoreName


class RedisContent:
    """A ContentStore over the job store's connections, which close with that. Raises JobStoreUnavailable."""

    name: Final[StoreName] = "redis"

    def __init__(self, database: RedisClient) -> None:
        self._db = database

    async def put(self, file: str, part: str, data: bytes) -> None:
        """Write a part."""
        await self._db.command("HSET", self._db.key("content", file), part, data)

    async def get(self, file: str, part: str) -> bytes:
        """Return a part. Raises FileContentLost."""
        data = await self._db.command("HGET", self._db.key("content", file), part)
        if data is None:
            raise FileContentLost(f"Redis has no part {part} of {file} any more.")
        return as_bytes(data)

    async def delete(self, file: str) -> None:
        """Delete all parts."""
        await self._db.command("UNLINK", self._db.key("content", file))

    async def close(self) -> None:
        """The connections are the job store's."""
