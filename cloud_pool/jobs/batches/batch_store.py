"""Batches in Redis. `processor` advances them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from router.errors import NotFound

from ...accounts.identity.principal import NO_GRANTS, Grants
from ..config import BatchConfig
from ..errors import IdempotencyConflict, JobAlreadyEnded, RecordUnreadable
from ..record import Endpoint
from ..states import JobState
from ..store.redis_client import Argument, RedisClient, as_bytes, as_fields, as_int, as_list, as_text, redis_time
from .file_store import FileStore
from .states import BatchState, is_final, source_states

COMPLETION_WINDOW = "24h"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are unix, ms."""

    id: str
    owner: str
    input: str  # file id
    endpoint: Endpoint
    state: BatchState
    created: int
    expires: int
    metadata: str = "null"  # JSON
    grants: str = "{}"  # JSON of Grants: what its lines may use
    tags: str = ""  # of each line, separated by commas
    traceparent: str = ""  # of the span that created it
    total: int = 0
    submitted: int = 0  # lines that have become jobs
    ended: int = 0  # of those
    completed: int = 0
    failed: int = 0
    output: str = ""  # file id
    errors: str = ""  # file id
    line_errors: str = ""  # JSON, of an invalid input file
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None


class LineOutcome(msgspec.Struct, frozen=True):
    """Outcome of a line's job; `state` is None for a line that never became a job."""

    custom_id: str
    state: JobState | None
    error: bytes  # JSON
    result: bytes


class BatchStore:
    """Batches. Every method raises JobStoreUnavailable while Redis does not answer.

    Args:
        clock: replaces Redis's clock in tests; unix time, s
    """

    def __init__(self, database: RedisClient, config: BatchConfig, *, clock: Callable[[], float] = redis_time) -> None:
        self._db = database
        self._config = config
        self._clock = clock

    @property
    def _now(self) -> int:
        """What scripts get as the time: negative for Redis's own."""
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
        grants: Grants = NO_GRANTS,
        tags: tuple[str, ...] = (),
        traceparent: str = "",
    ) -> Batch:
        """Create a batch, or return the one with this name.

        Args:
            metadata: JSON
            digest: of the request, compared with that of a batch with this name
            grants: what its lines may use

        Raises:
            NotFound: `file` is no input file of the owner
            IdempotencyConflict: the name belongs to a batch with another digest
        """
        window_ms = int(self._config.completion_window_s * 1000)
        plain = ("endpoint", endpoint, "metadata", metadata, "grants", msgspec.json.encode(grants))
        fields = (*plain, "tags", ",".join(tags), "traceparent", traceparent)
        verdict = as_text(await self._db.run("batch_create", self._now, name, owner, file, digest, window_ms, *fields))
        if verdict == "absent":
            raise NotFound(f"There is no file {file[:80]!r} of yours with purpose batch.", param="input_file_id")
        if verdict == "conflict":
            raise IdempotencyConflict("The Idempotency-Key was used for another batch. Send that again, or a new key.")
        return await self.get(name, owner)

    async def get(self, name: str, owner: str) -> Batch:
        """Return a batch of `owner`. Raises NotFound, also for a batch of another owner."""
        batch = await self.lookup(name)
        if batch is None or batch.owner != owner:
            raise NotFound(f"There is no batch {name[:80]!r} of yours.")
        return batch

    async def lookup(self, name: str) -> Batch | None:
        """Return a batch of any owner. Raises RecordUnreadable."""
        fields = as_fields(await self._db.command("HGETALL", self._db.key("batch", name)))
        plain = {key: value.decode("utf-8", "replace") for key, value in fields.items()}
        try:
            return msgspec.convert(plain, Batch, strict=False) if plain else None
        except msgspec.ValidationError as error:
            raise RecordUnreadable(f"{name}: the record is damaged or of another version: {error}") from None

    async def list_owned(self, owner: str, *, after: str, limit: int) -> list[Batch]:
        """Return batches of `owner`, newest first, from behind the batch `after`."""
        key = self._db.key("batches", owner)
        names = [as_text(name) for name in as_list(await self._db.command("ZREVRANGE", key, 0, -1))]
        batches: list[Batch] = []
        for name in names[names.index(after) + 1 if after in names else 0 :]:
            batch = await self.lookup(name)
            if batch is None:
                await self._db.command("ZREM", key, name)
            elif len(batches) < limit:
                batches.append(batch)
            else:
                break
        return batches

    async def cancel(self, batch: Batch) -> None:
        """Begin to cancel a batch. Raises JobAlreadyEnded."""
        if not await self.transition(batch.id, "cancelling"):
            raise JobAlreadyEnded(f"The batch {batch.id} is {batch.state}: there is nothing to cancel.")

    # --- the processor ---------------------------------------------------------------------------------------------

    async def claim(self, lease_s: float) -> Batch | None:
        """Return a batch that is due for a step; no other worker gets it for `lease_s`. Raises RecordUnreadable."""
        name = as_text(await self._db.run("batch_claim", self._now, int(lease_s * 1000)))
        return await self.lookup(name) if name else None

    async def schedule_step(self, name: str, delay_s: float) -> None:
        """Make a batch due in `delay_s`."""
        await self._db.run("batch_schedule", self._now, name, int(delay_s * 1000))

    async def record_submitted_lines(self, name: str, lines: int) -> None:
        """Record that the first `lines` lines have become jobs."""
        await self._db.command("HSET", self._db.key("batch", name), "submitted", lines)

    async def transition(self, name: str, to: BatchState, *fields: Argument) -> bool:
        """Move a batch to a state and set `fields` (name, value, ...).

        Returns True also if it is there already, and False if the table has no such transition.
        """
        sources = source_states(to)
        ttl = int(self._config.file_ttl_s * 1000)
        arguments = (self._now, name, to, int(is_final(to)), ttl, len(sources), *sources, *fields)
        return as_int(await self._db.run("batch_transition", *arguments)) > 0

    async def read_input(self, name: str, files: FileStore) -> bytes:
        """Return the input file as it was when the batch was created."""
        return b"".join([piece async for piece in files.pieces(self._db.key("batch", name, "parts"))])

    async def set_custom_ids(self, name: str, custom_ids: Sequence[str]) -> None:
        """Store the custom_id of every line, also of lines that will never become jobs."""
        await self._db.run("batch_set_custom_ids", name, *custom_ids)

    async def line_outcomes(self, name: str, lines: range) -> list[LineOutcome]:
        """Return the outcome of each of these lines, which count from 1."""
        jobs = (batch_job_id(name, line) for line in lines)
        outcomes = []
        for row in as_list(await self._db.run("batch_line_outcomes", name, lines[0], *jobs)):
            custom_id, state, error, result = as_list(row)
            job_state = JobState(as_text(state)) if state else None
            outcomes.append(LineOutcome(as_text(custom_id), job_state, as_bytes(error), as_bytes(result)))
        return outcomes


def batch_job_id(batch: str, line: int) -> str:
    """Return the id of a line's job: always the same, so that a line can be submitted repeatedly. Lines from 1."""
    return f"job_{batch.removeprefix('batch_')}-{line}"
