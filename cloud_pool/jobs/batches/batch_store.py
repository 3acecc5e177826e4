"""Batches in Redis, in OpenAI's shape. What makes them go on is `feeder`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from router.errors import NotFound

from ..config import BatchConfig
from ..errors import IdempotencyConflict, JobAlreadyEnded
from ..record import Endpoint
from ..states import JobState
from ..store.redis_client import Argument, RedisClient, data, items, number, pairs, text
from .file_store import FileStore
from .input_file import BatchLineError
from .states import BatchState, is_final, source_states

COMPLETION_WINDOW = "24h"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    input: str
    endpoint: Endpoint
    state: BatchState
    created: int  # unix ms, as all times here
    expires: int
    metadata: str = "null"  # JSON
    tags: str = ""  # of each line, with commas
    traceparent: str = ""  # of the span that sent it
    total: int = 0
    submitted: int = 0  # lines that have become jobs
    ended: int = 0  # of those, how many ended
    completed: int = 0
    failed: int = 0
    output: str = ""  # file ids
    errors: str = ""
    faults: str = ""  # JSON, of the input's lines
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None


class LineOutcome(msgspec.Struct, frozen=True):
    """What became of a line's job; `state` is None for a line that never was one."""

    custom_id: str
    state: JobState | None
    error: bytes  # JSON
    result: bytes


class BatchStore:
    """Raises StoreUnavailable, everywhere, when Redis does not answer."""

    def __init__(self, database: RedisClient, config: BatchConfig, *, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._config = config
        self._clock = clock

    @property
    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    async def create(
        self,
        name: str,
        owner: str,
        file: str,
        endpoint: Endpoint,
        metadata: bytes,
        digest: str,
        *,
        tags: tuple[str, ...] = (),
        traceparent: str = "",
    ) -> Batch:
        """Raises NotFound for a file that is not the owner's input, or IdempotencyConflict."""
        now = self.now_ms
        expires = now + int(self._config.completion_window_s * 1000)
        plain = ("endpoint", endpoint, "metadata", metadata, "expires", expires)
        fields = (*plain, "tags", ",".join(tags), "traceparent", traceparent)
        verdict = text(await self._db.run("batch_create", now, name, owner, file, digest, *fields))
        if verdict == "absent":
            raise NotFound(f"There is no file {file[:80]!r} of yours with purpose batch.", param="input_file_id")
        if verdict == "conflict":
            raise IdempotencyConflict("The Idempotency-Key was used for another batch. Send that again, or a new key.")
        return await self.get(name, owner)

    async def get(self, name: str, owner: str) -> Batch:
        """Raises NotFound, also for what belongs to another."""
        found = await self.find(name)
        if found is None or found.owner != owner:
            raise NotFound(f"There is no batch {name[:80]!r} of yours.")
        return found

    async def find(self, name: str) -> Batch | None:
        fields = pairs(await self._db.command("HGETALL", self._db.key("batch", name)))
        plain = {key: value.decode() for key, value in fields.items()}
        return msgspec.convert(plain, Batch, strict=False) if plain else None

    async def owned(self, owner: str, *, after: str, limit: int) -> list[Batch]:
        """Newest first, from behind `after`."""
        key = self._db.key("batches", owner)
        names = [text(name) for name in items(await self._db.command("ZREVRANGE", key, 0, -1))]
        found: list[Batch] = []
        for name in names[names.index(after) + 1 if after in names else 0 :]:
            batch = await self.find(name)
            if batch is None:
                await self._db.command("ZREM", key, name)
            elif len(found) < limit:
                found.append(batch)
            else:
                break
        return found

    async def cancel(self, batch: Batch) -> None:
        """Raises JobEnded."""
        if not await self.move(batch.id, "cancelling"):
            raise JobAlreadyEnded(f"The batch {batch.id} is {batch.state}: there is nothing to cancel.")

    # --- the feeder ------------------------------------------------------------------------------------------------

    async def claim(self, lease_s: float) -> Batch | None:
        """One that is due for a look; nobody else looks at it for `lease_s`."""
        name = text(await self._db.run("batch_claim", self.now_ms, int(lease_s * 1000)))
        return await self.find(name) if name else None

    async def schedule_check(self, name: str, pause_s: float) -> None:
        await self._db.run("batch_schedule", name, self.now_ms + int(pause_s * 1000))

    async def fed(self, name: str, lines: int) -> None:
        await self._db.command("HSET", self._db.key("batch", name), "submitted", lines)

    async def move(self, name: str, to: BatchState, *fields: Argument) -> bool:
        """Also true when it is there already. False: the table has no such row."""
        sources = source_states(to)
        ttl = int(self._config.file_ttl_s * 1000)
        over = int(is_final(to))
        arguments = (self.now_ms, name, to, over, ttl, len(sources), *sources, *fields)
        return number(await self._db.run("batch_transition", *arguments)) > 0

    async def content(self, name: str, files: FileStore) -> bytes:
        return b"".join([piece async for piece in files.pieces(self._db.key("batch", name, "parts"))])

    async def set_custom_ids(self, name: str, custom_ids: Sequence[str]) -> None:
        """What the caller calls each line; also of those that never become a job."""
        await self._db.run("batch_set_custom_ids", name, *custom_ids)

    async def ended(self, name: str, lines: range) -> list[LineOutcome]:
        """What became of each of these lines, from 1."""
        found = []
        jobs = (batch_job_id(name, at) for at in lines)
        for row in items(await self._db.run("batch_line_outcomes", name, lines[0], *jobs)):
            custom_id, state, error, result = items(row)
            became = JobState(text(state)) if state else None
            found.append(LineOutcome(text(custom_id), became, data(error), data(result)))
        return found


def batch_job_id(batch: str, line: int) -> str:
    return f"job_{batch.removeprefix('batch_')}-{line}"


class _RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class _InputErrors(msgspec.Struct):
    data: list[BatchLineError]
    object: str = "list"


class BatchView(msgspec.Struct, kw_only=True):
    """OpenAI's batch object; times in unix seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: _InputErrors | None
    input_file_id: str
    completion_window: str = COMPLETION_WINDOW
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: _RequestCounts
    metadata: msgspec.Raw


def batch_view(batch: Batch) -> BatchView:
    faults = _InputErrors(msgspec.json.decode(batch.faults, type=list[BatchLineError])) if batch.faults else None
    return BatchView(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=faults,
        input_file_id=batch.input,
        status=batch.state,
        output_file_id=batch.output or None,
        error_file_id=batch.errors or None,
        created_at=batch.created // 1000,
        in_progress_at=_seconds(batch.in_progress_at),
        expires_at=batch.expires // 1000,
        finalizing_at=_seconds(batch.finalizing_at),
        completed_at=_seconds(batch.completed_at),
        failed_at=_seconds(batch.failed_at),
        expired_at=_seconds(batch.expired_at),
        cancelling_at=_seconds(batch.cancelling_at),
        cancelled_at=_seconds(batch.cancelled_at),
        request_counts=_RequestCounts(batch.total, batch.completed, batch.failed),
        metadata=msgspec.Raw(batch.metadata.encode()),
    )


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000
