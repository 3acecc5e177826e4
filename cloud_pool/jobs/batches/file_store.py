"""Files of batches: uploaded ones are kept in Redis, results are read from the jobs when they are asked for."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import msgspec

from router.errors import NotFound, RateLimited

from ..config import BatchConfig
from ..store.redis_client import RedisClient, items, number, pairs, text
from ..store.redis_client import data as as_data

Purpose = Literal["batch", "batch_output"]
ResultPart = Literal["", "output", "errors"]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    filename: str
    purpose: Purpose
    bytes: int
    created: int  # unix ms
    expires: int  # unix ms
    batch: str = ""  # of results: whose; and which part of them
    part: ResultPart = ""


class FileView(msgspec.Struct, frozen=True):
    """OpenAI's file object; times in unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    object: str = "file"
    status: str = "processed"


def file_view(file: StoredFile) -> FileView:
    return FileView(file.id, file.bytes, file.created // 1000, file.expires // 1000, file.filename, file.purpose)


class FileStore:
    """Raises StoreUnavailable, everywhere, when Redis does not answer."""

    def __init__(self, database: RedisClient, config: BatchConfig, *, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._config = config
        self._clock = clock

    async def upload(self, owner: str, filename: str, pieces: Sequence[bytes]) -> StoredFile:
        """Raises RateLimited when the owner has too many."""
        name = f"file-{secrets.token_hex(12)}"
        size = sum(len(piece) for piece in pieces)
        if not await self._put(name, owner, self._config.max_files, pieces, filename, "batch", size):
            raise RateLimited(f"You have {self._config.max_files} files: delete one first.")
        return await self.get(name, owner)

    async def add_results(self, name: str, owner: str, size: int, batch: str, part: ResultPart) -> None:
        """A file whose bytes are made of the batch's jobs. Repeatable."""
        filename = f"{batch}_{part}.jsonl"
        await self._put(name, owner, 0, (), filename, "batch_output", size, "batch", batch, "part", part)

    async def get(self, name: str, owner: str) -> StoredFile:
        """Raises NotFound, also for what belongs to another."""
        fields = pairs(await self._db.command("HGETALL", self._db.key("file", name)))
        if not fields or fields["owner"].decode() != owner:
            raise NotFound(f"There is no file {name[:80]!r} of yours.")
        return msgspec.convert({key: value.decode() for key, value in fields.items()}, StoredFile, strict=False)

    async def owned(self, owner: str) -> list[StoredFile]:
        """Newest first."""
        found = []
        for name in items(await self._db.command("ZREVRANGE", self._db.key("files", owner), 0, -1)):
            try:
                found.append(await self.get(text(name), owner))
            except NotFound:
                await self._db.command("ZREM", self._db.key("files", owner), as_data(name))
        return found

    async def delete(self, file: StoredFile) -> None:
        await self._db.command("DEL", self._db.key("file", file.id), self._db.key("file", file.id, "parts"))
        await self._db.command("ZREM", self._db.key("files", file.owner), file.id)

    async def content(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Of an uploaded file."""
        async for piece in self.pieces(self._db.key("file", file.id, "parts")):
            yield piece

    async def pieces(self, key: str) -> AsyncIterator[bytes]:
        at = 0
        while found := items(await self._db.command("LRANGE", key, at, at)):
            yield as_data(found[0])
            at += 1

    async def _put(
        self,
        name: str,
        owner: str,
        most: int,
        pieces: Sequence[bytes],
        filename: str,
        purpose: Purpose,
        size: int,
        *more: str,
    ) -> bool:
        now, ttl = int(self._clock() * 1000), int(self._config.file_ttl_s * 1000)
        fields = ("filename", filename, "purpose", purpose, "bytes", size, *more)
        return number(await self._db.run("file_put", now, name, owner, most, ttl, len(pieces), *pieces, *fields)) > 0
