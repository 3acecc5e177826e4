"""The store of files: records, quotas and expiry in Redis, and content in a content store.

1. A writer reserves bytes before it writes them, so that no quota is exceeded. The file is visible once it is complete.
2. A file is deleted by its owner, or when it expires, or when its writer dies. Batches that read it keep its content.
3. `delete_due`, which every worker repeats, deletes the content; the tenant is charged for the file until then.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import anyio
import msgspec

from causeway_server.router.errors import JobStoreUnavailable, NotFound, RateLimited, RecordUnreadable
from causeway_server.router.parts.uploads import PART_PURPOSES

from .config import BatchConfig
from .encryption import NO_CIPHER, ContentCipher
from .file_contents import ContentStores, FileContentLost, FileStoreUnavailable, FileTooLarge, StoreName
from .redis_client import RedisClient, as_fields, as_int, as_list, as_text

Purpose = Literal["batch", "batch_output", "user_data", "vision", "assistants"]
PART_BYTES = 1024 * 1024
log = logging.getLogger(__name__)
_WRITER_LEASE_MS = 600_000  # a writer that wrote nothing for so long is taken for dead
_DELETE_LEASE_MS = 60_000
_DELETE_S = 10.0
_DUE_LIMIT = 20
_RETRY_AFTER_S = 60.0


class QuotaExceeded(RateLimited, code="quota_exceeded"):
    """The tenant has reached its limit of files, bytes or batches."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file's record, times in Unix ms. `tags`: of the upload, with commas between; users of the file inherit them."""

    id: str
    owner: str
    store: str
    filename: str = ""
    purpose: Purpose = "batch"
    bytes: int = 0
    created: int
    expires: int = 0
    state: Literal["writing", "ready", "deleted"]
    tags: str = ""


class FilePart(msgspec.Struct, frozen=True):
    """A part of a file's content."""

    name: str
    bytes: int


class FileUsage(msgspec.Struct, frozen=True):
    """Size of a tenant's files, and of all files in the current content store."""

    files: int
    bytes: int
    store_bytes: int


@dataclass(eq=False, repr=False)
class FileStore:
    """Files. Every method raises JobStoreUnavailable while Redis or the content store does not answer."""

    db: RedisClient
    config: BatchConfig
    contents: ContentStores
    cipher: ContentCipher = NO_CIPHER

    @property
    def store_name(self) -> StoreName:
        """The content store of new files."""
        return self.contents.current.name

    @property
    def in_redis(self) -> bool:
        """Whether new content goes to Redis."""
        return self.store_name == "redis"

    @property
    def max_file_bytes(self) -> int:
        """Size of the largest file that can be uploaded, in bytes."""
        config = self.config
        bounds = (config.max_redis_file_bytes, config.max_redis_bytes) if self.in_redis else (config.max_bytes,)
        return min(config.max_file_bytes, *bounds)

    # --- files of callers ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def write(self, owner: str, expected_bytes: int) -> AsyncIterator[FileWriter]:
        """Open a writer for a new file. Unless the writer finishes it, no part of it remains.

        A file of `expected_bytes` (0: unknown) that does not fit is refused before it is read. Raises FileTooLarge for
        a single file's limit, QuotaExceeded for the tenant's, and FileStoreUnavailable if the content store is full.
        """
        writer = FileWriter(self, f"file-{secrets.token_hex(12)}", owner)
        await self.reserve(writer.id, owner, expected_bytes, begin=True)
        try:
            yield writer
        finally:
            if not writer.finished:
                # If Redis is away, the file is due once its writer counts as dead.
                with anyio.CancelScope(shield=True), anyio.move_on_after(_DELETE_S), suppress(JobStoreUnavailable):
                    await self._retire(writer.id, self.store_name)

    async def get(self, name: str, owner: str) -> StoredFile:
        """Return a file of `owner`. Raises NotFound, also for a file of another owner."""
        file = await self.lookup(name)
        if file is None or file.owner != owner or file.state != "ready" or await self._is_over(file):
            raise NotFound(f"You have no file {name[:80]!r}.")
        return file

    async def _is_over(self, file: StoredFile) -> bool:
        """Return whether a file with an explicit expiry time has expired; `delete_due` may notice this later."""
        return file.purpose in PART_PURPOSES and file.expires <= await self.db.now_ms()

    async def lookup(self, name: str) -> StoredFile | None:
        """Return a file of any owner and in any state."""
        fields = as_fields(await self.db.command("HGETALL", self.db.key("file", name)))
        return self._stored_file(fields) if fields else None

    def _stored_file(self, fields: dict[str, bytes]) -> StoredFile:
        """Return a file by its record. A name that cannot be opened is empty: the file can be deleted all the same."""
        with suppress(JobStoreUnavailable, RecordUnreadable):
            name = self.cipher.open(fields.pop("filename", b""), "file", "", fields["id"].decode(), "filename")
            fields["filename"] = name
        plain = {key: value.decode("utf-8", "replace") for key, value in fields.items()}
        return msgspec.convert(plain, StoredFile, strict=False)

    async def list_owned(self, owner: str, *, after: str = "", limit: int = 20, purpose: str = "") -> list[StoredFile]:
        """Return files of `owner`, newest first, from `after` on; an unknown one starts at the newest."""
        rows = as_list(await self.db.run("file_page", self.db.time, owner, after, limit, purpose))
        return [self._stored_file(as_fields(row)) for row in rows]

    async def delete(self, file: StoredFile) -> None:
        """Delete a file. Batches that read it continue."""
        await self._retire(file.id, file.store)

    async def erase(self, name: str) -> bool:
        """Delete a file of any owner in any state, with its content; return False if it was gone."""
        file = await self.lookup(name)
        if file is None:
            return False
        await self.db.run("file_retire", self.db.time, name, _DELETE_LEASE_MS)
        await self._delete_content(name, file.store)
        return True

    # --- content ---------------------------------------------------------------------------------------------------

    async def parts(self, name: str) -> list[FilePart]:
        """Return the parts of a file in order."""
        rows = as_list(await self.db.command("LRANGE", self.db.key("file", name, "parts"), 0, -1))
        split = (as_text(row).rpartition(":") for row in rows)
        return [FilePart(part, int(size)) for part, _, size in split]

    async def read_part(self, file: StoredFile, part: FilePart) -> bytes:
        """Return the bytes of a part. Raises FileContentLost."""
        stored = await self.contents.named(file.store).get(file.id, part.name)
        try:
            return self.cipher.open(stored, "file", file.owner, file.id, part.name)
        except RecordUnreadable as error:
            raise FileContentLost(f"Part {part.name} of {file.id}: {error.message}") from error

    async def read(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield the bytes of a file. Raises FileContentLost."""
        for part in await self.parts(file.id):
            yield await self.read_part(file, part)

    async def write_part(self, name: str, owner: str, part: str, data: bytes) -> None:
        """Write a part that no reader sees before it is listed."""
        await self.contents.current.put(name, part, self.cipher.seal(data, "file", owner, name, part))

    # --- records ---------------------------------------------------------------------------------------------------

    async def reserve(self, name: str, owner: str, size: int, *, begin: bool) -> None:
        """Charge the tenant with `size` bytes for a file that is being written. Raises like `write`."""
        config = self.config
        if size > self.max_file_bytes:
            raise self._too_large()
        max_bytes = config.max_redis_bytes if self.in_redis else config.max_bytes
        max_total = config.max_redis_total_bytes if self.in_redis else 0
        lease, store = _WRITER_LEASE_MS, self.store_name
        quotas = (config.max_files, max_bytes, max_total)
        reply = await self.db.run("file_reserve", self.db.time, name, owner, store, size, int(begin), lease, *quotas)
        verdict, count = as_list(reply)
        key = "max_redis_bytes" if self.in_redis else "max_bytes"
        used = as_int(count)
        match as_text(verdict):
            case "files":
                raise too_many_files(config)
            case "bytes":
                raise QuotaExceeded(
                    f"Your tenant's files take {used} bytes, and {size} more bytes would exceed the limit of "
                    f"{max_bytes} (jobs.batches.{key}). Delete files, or wait until some expire.",
                    retry_after_s=_RETRY_AFTER_S,
                )
            case "total":
                raise FileStoreUnavailable(
                    f"The files in Redis take {used} bytes, and {size} more bytes would exceed the limit of "
                    f"{max_total} (jobs.batches.max_redis_total_bytes). Try again later; the operator can set "
                    "jobs.files.path or jobs.files.s3.",
                    retry_after_s=_RETRY_AFTER_S,
                )
            case "gone":
                raise FileStoreUnavailable("The upload took too long. Send the file again.", retry_after_s=1.0)

    async def publish(
        self,
        name: str,
        filename: str,
        purpose: Purpose,
        parts: list[FilePart],
        ttl_s: float | None = None,
        tags: tuple[str, ...] = (),
    ) -> bool:
        """Make a written file visible, for at most `file_ttl_s`. Returns False if its writer was presumed dead."""
        ttl, size = int((ttl_s or self.config.file_ttl_s) * 1000), sum(part.bytes for part in parts)
        rows = (f"{part.name}:{part.bytes}" for part in parts)
        sealed = self.cipher.seal(filename.encode(), "file", "", name, "filename")
        fields = (sealed, purpose, size, ",".join(tags))
        return as_int(await self.db.run("file_ready", self.db.time, name, ttl, *fields, *rows)) > 0

    async def usage(self, owner: str) -> FileUsage:
        """Return the usage of the tenant of `owner` and of the content store."""
        reply = await self.db.run("file_usage", owner, self.store_name)
        return FileUsage(*(as_int(number) for number in as_list(reply)))

    async def stored_bytes(self) -> dict[str, int]:
        """Return the bytes charged to tenants, by content store."""
        fields = as_fields(await self.db.command("HGETALL", self.db.key("content_bytes")))
        return {store: int(count) for store, count in fields.items()}

    async def delete_due(self) -> int:
        """Delete the content of some due files, and return how many there were."""
        rows = as_list(await self.db.run("files_due", self.db.time, _DELETE_LEASE_MS, _DUE_LIMIT))
        for row in rows:
            name, store = (as_text(value) for value in as_list(row))
            try:
                await self._delete_content(name, store)
            except JobStoreUnavailable as error:  # it is due again after the lease
                log.warning("The content of %s is not deleted yet: %s", name, error.message)
        return len(rows)

    async def _retire(self, name: str, store: str) -> None:
        if as_int(await self.db.run("file_retire", self.db.time, name, _DELETE_LEASE_MS)):
            with suppress(JobStoreUnavailable):  # `delete_due` repeats it
                await self._delete_content(name, store)

    async def _delete_content(self, name: str, store: str) -> None:
        await self.contents.named(store).delete(name)
        await self.db.run("file_forget", name)

    def _too_large(self) -> FileTooLarge:
        """Return the error that names the lowest limit, and how to raise it."""
        bound = self.max_file_bytes
        if self.in_redis and bound < self.config.max_file_bytes:
            return FileTooLarge(
                f"The file has more than {bound} bytes, the maximum in Redis (jobs.batches.max_redis_file_bytes and "
                "max_redis_bytes). Split it. For larger files, the operator must set jobs.files.path or jobs.files.s3."
            )
        return FileTooLarge(f"The file has more than {bound} bytes (jobs.batches.max_file_bytes). Split it.")


class FileWriter:
    """Writes one file in parts of PART_BYTES, with one part in memory."""

    def __init__(self, files: FileStore, name: str, owner: str) -> None:
        self.id = name
        self.finished = False
        self._files = files
        self._owner = owner
        self._buffer = bytearray()
        self._parts: list[FilePart] = []
        self._written = 0

    async def write(self, data: bytes) -> None:
        """Append `data`. Raises like FileStore.write."""
        self._buffer += data
        while len(self._buffer) >= PART_BYTES:
            await self._write_part(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    async def finish(
        self, filename: str, purpose: Purpose, ttl_s: float | None = None, tags: tuple[str, ...] = ()
    ) -> StoredFile:
        """Make the file visible and return it. `ttl_s`: time for which the file is kept, if shorter than usual."""
        if self._buffer:
            await self._write_part(bytes(self._buffer))
        if not await self._files.publish(self.id, filename, purpose, self._parts, ttl_s, tags):
            raise FileStoreUnavailable("The upload took too long. Send the file again.", retry_after_s=1.0)
        self.finished = True
        return await self._files.get(self.id, self._owner)

    async def _write_part(self, data: bytes) -> None:
        self._written += len(data)
        await self._files.reserve(self.id, self._owner, self._written, begin=False)
        part = FilePart(str(len(self._parts) + 1), len(data))
        await self._files.write_part(self.id, self._owner, part.name, data)
        self._parts.append(part)


def too_many_files(config: BatchConfig) -> QuotaExceeded:
    """Return the error for a tenant that may have no more files."""
    return QuotaExceeded(
        f"Your tenant may have {config.max_files} files (jobs.batches.max_files), including output and "
        "error files of batches. Delete files, or wait until they expire.",
        retry_after_s=_RETRY_AFTER_S,
    )
