"""Files of batches. Uploaded ones are stored in Redis; output files are read from the jobs on each download."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import msgspec

from router.errors import NotFound, RateLimited

from ..config import BatchConfig
from ..store.redis_client import RedisClient, as_bytes, as_fields, as_int, as_list, as_text, redis_time

Purpose = Literal["batch", "batch_output"]
ResultPart = Literal["", "output", "errors"]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file's record. Times are unix, ms."""

    id: str
    owner: str
    filename: str
    purpose: Purpose
    bytes: int
    created: int
    expires: int
    batch: str = ""  # of an output file
    part: ResultPart = ""  # of an output file


class FileStore:
    """Files in Redis. Every method raises JobStoreUnavailable while Redis does not answer.

    Args:
        clock: replaces Redis's clock in tests; unix time, s
    """

    def __init__(self, database: RedisClient, config: BatchConfig, *, clock: Callable[[], float] = redis_time) -> None:
        self._db = database
        self._config = config
        self._clock = clock

    async def upload(self, owner: str, filename: str, pieces: Sequence[bytes]) -> StoredFile:
        """Store an input file. Raises RateLimited if the owner has too many files."""
        name = f"file-{secrets.token_hex(12)}"
        size = sum(len(piece) for piece in pieces)
        if not await self._put(name, owner, self._config.max_files, pieces, filename, "batch", size):
            raise RateLimited(f"You have {self._config.max_files} files: delete one first.")
        return await self.get(name, owner)

    async def add_results(self, name: str, owner: str, size: int, batch: str, part: ResultPart) -> None:
        """Add the record of an output file; its bytes come from the batch's jobs. Can be repeated."""
        filename = f"{batch}_{part}.jsonl"
        await self._put(name, owner, 0, (), filename, "batch_output", size, "batch", batch, "part", part)

    async def get(self, name: str, owner: str) -> StoredFile:
        """Return a file of `owner`. Raises NotFound, also for a file of another owner."""
        fields = as_fields(await self._db.command("HGETALL", self._db.key("file", name)))
        if not fields or fields["owner"].decode() != owner:
            raise NotFound(f"There is no file {name[:80]!r} of yours.")
        return msgspec.convert({key: value.decode() for key, value in fields.items()}, StoredFile, strict=False)

    async def list_owned(self, owner: str) -> list[StoredFile]:
        """Return all files of `owner`, newest first."""
        files = []
        for name in as_list(await self._db.command("ZREVRANGE", self._db.key("files", owner), 0, -1)):
            try:
                files.append(await self.get(as_text(name), owner))
            except NotFound:
                await self._db.command("ZREM", self._db.key("files", owner), as_bytes(name))
        return files

    async def delete(self, file: StoredFile) -> None:
        """Delete a file."""
        await self._db.command("DEL", self._db.key("file", file.id), self._db.key("file", file.id, "parts"))
        await self._db.command("ZREM", self._db.key("files", file.owner), file.id)

    async def read(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield the bytes of an uploaded file."""
        async for piece in self.pieces(self._db.key("file", file.id, "parts")):
            yield piece

    async def pieces(self, key: str) -> AsyncIterator[bytes]:
        """Yield the pieces under a Redis key, one command each."""
        index = 0
        while reply := as_list(await self._db.command("LRANGE", key, index, index)):
            yield as_bytes(reply[0])
            index += 1

    async def _put(
        self,
        name: str,
        owner: str,
        max_files: int,
        pieces: Sequence[bytes],
        filename: str,
        purpose: Purpose,
        size: int,
        *more: str,
    ) -> bool:
        now, ttl = int(self._clock() * 1000), int(self._config.file_ttl_s * 1000)
        fields = ("filename", filename, "purpose", purpose, "bytes", size, *more)
        arguments = (now, name, owner, max_files, ttl, len(pieces), *pieces, *fields)
        return as_int(await self._db.run("file_put", *arguments)) > 0
