"""The store of batches in Redis. `processor` advances them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from causeway_server.router.errors import (
    CausewayError,
    IdempotencyConflict,
    JobAlreadyEnded,
    NotFound,
    RecordUnreadable,
)
from causeway_server.router.jobs.job import JobState, encode_job_error
from causeway_server.router.jobs.submission import Endpoint

from ..core.principal import NO_GRANTS, Grants
from .config import BatchConfig
from .encryption import NO_CIPHER, ContentCipher
from .file_store import FilePart, QuotaExceeded, too_many_files
from .redis_client import Argument, RedisClient, Reply, as_bytes, as_fields, as_int, as_list, as_text, list_newest

BatchState = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]

BATCH_TRANSITIONS: Final[dict[BatchState, frozenset[BatchState]]] = {
    "validating": frozenset({"failed", "in_progress", "cancelling"}),
    # It fails when something other than Causeway has deleted its input file's content.
    "in_progress": frozenset({"finalizing", "cancelling", "failed"}),
    # All its jobs have ended: it is too late to cancel.
    "finalizing": frozenset({"completed", "expired"}),
    "cancelling": frozenset({"cancelled", "failed"}),
    "failed": frozenset(),
    "completed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}
COMPLETION_WINDOW = "24h"
_RETRY_AFTER_S = 60.0
ResultPart = Literal["output", "errors"]


def source_states(state: BatchState) -> tuple[BatchState, ...]:
    """Return the states from which `state` can be entered."""
    return tuple(source for source, targets in BATCH_TRANSITIONS.items() if state in targets)


def is_final(state: BatchState) -> bool:
    """Return whether `state` is final."""
    return not BATCH_TRANSITIONS[state]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are Unix time in milliseconds."""

    id: str
    owner: str
    input: str  # id of the input file
    endpoint: Endpoint
    state: BatchState
    created: int
    expires: int
    metadata: str = "null"  # metadata as JSON
    grants: str = "{}"  # grants of its lines, as JSON of Grants
    token_id: str = ""  # id of the signed token that created it
    token_issued: float = 0.0  # Unix seconds
    tags: str = ""  # tags of each line, separated by commas
    traceparent: str = ""  # traceparent of the span that created it
    total: int = 0
    submitted: int = 0  # number of lines that have become jobs
    offset: int = 0  # offset of the next line in the input file, bytes
    ended: int = 0  # number of submitted lines that have ended
    collected: int = 0  # number of lines whose outcome is in the output files
    completed: int = 0
    failed: int = 0
    late: int = 0  # 1 if a line has expired
    output: str = ""  # id of the output file
    errors: str = ""  # id of the error file
    line_errors: str = ""  # errors of an invalid input file, as JSON
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None


class LineOutcome(msgspec.Struct, frozen=True):
    """Outcome of a line; `state` is None if the line never became a job."""

    custom_id: str
    state: JobState | None
    error: bytes = b""  # error as JSON
    result: bytes = b""


@dataclass(eq=False, repr=False)
class BatchStore:
    """Batches. Every method raises JobStoreUnavailable while Redis does not answer."""

    db: RedisClient
    config: BatchConfig
    cipher: ContentCipher = NO_CIPHER

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
        token_id: str = "",
        token_issued: float = 0.0,
        tags: tuple[str, ...] = (),
        traceparent: str = "",
    ) -> Batch:
        """Create a batch, or return the existing one with this name.

        Args:
            metadata: Metadata as JSON.
            digest: Digest of the request, compared with that of an existing batch of this name.
            token_id, token_issued: Id and issue time of the signed token that creates the batch.

        Raises:
            NotFound: `file` is not an input file of the owner.
            IdempotencyConflict: The name belongs to a batch with another digest.
            QuotaExceeded: The tenant has too many batches, or too many files for the output of another one.
        """
        config = self.config
        window_ms, ttl = int(config.completion_window_s * 1000), int(config.file_ttl_s * 1000)
        quotas = (config.max_open_batches, config.max_batches, config.max_files)
        plain = ("endpoint", endpoint, "metadata", metadata, "grants", msgspec.json.encode(grants))
        token = ("token_id", token_id, "token_issued", token_issued)
        fields = (*plain, *token, "tags", ",".join(tags), "traceparent", traceparent)
        arguments = (name, owner, file, digest, window_ms, ttl, *quotas, *fields)
        verdict = as_text(await self.db.run("batch_create", self.db.time, *arguments))
        if verdict not in ("created", "known"):
            raise self._refusal(verdict, file)
        return await self.get(name, owner)

    def _refusal(self, verdict: str, file: str) -> CausewayError:
        config = self.config
        if verdict == "conflict":
            return IdempotencyConflict(
                "The Idempotency-Key was used for another batch. Send the same request, or use a new key."
            )
        if verdict == "open":
            return QuotaExceeded(
                f"Your tenant has {config.max_open_batches} batches in progress, which is the maximum "
                "(jobs.batches.max_open_batches). Wait until one ends, or cancel one.",
                retry_after_s=_RETRY_AFTER_S,
            )
        if verdict == "batches":
            return QuotaExceeded(
                f"Your tenant has had {config.max_batches} batches in the last {config.file_ttl_s / 86400:g} days, "
                "which is the maximum (jobs.batches.max_batches). Put more lines into one batch.",
                retry_after_s=_RETRY_AFTER_S,
            )
        if verdict == "files":
            return too_many_files(config)
        return NotFound(f"You have no file {file[:80]!r} with purpose batch.", param="input_file_id")

    async def get(self, name: str, owner: str) -> Batch:
        """Return a batch of `owner`. Raises NotFound, also for a batch of another owner."""
        batch = await self.lookup(name)
        if batch is None or batch.owner != owner:
            raise NotFound(f"You have no batch {name[:80]!r}.")
        return batch

    async def lookup(self, name: str) -> Batch | None:
        """Return a batch of any owner. Raises RecordUnreadable."""
        return _parse(name, await self.db.command(*self._record(name)))

    async def list_owned(self, owner: str, *, after: str, limit: int) -> list[Batch]:
        """Return batches of `owner`, newest first, from `after` on (unknown: the newest), without unreadable ones."""
        key = self.db.key("batches", owner)
        rank = await self.db.command("ZREVRANK", key, after) if after else None
        return await list_newest(self.db, key, 0 if rank is None else as_int(rank) + 1, limit, self._record, _parse)

    def _record(self, name: str) -> tuple[str, ...]:
        return "HGETALL", self.db.key("batch", name)

    async def cancel(self, batch: Batch) -> None:
        """Start cancelling a batch. Raises JobAlreadyEnded."""
        if not await self.transition(batch.id, "cancelling"):
            raise JobAlreadyEnded(f"The batch {batch.id} is {batch.state}, so it cannot be cancelled.")

    # --- the processor ---------------------------------------------------------------------------------------------

    async def claim(self, lease_s: float) -> Batch | None:
        """Return a batch that is due for a step; no other worker gets it for `lease_s`. Raises RecordUnreadable."""
        name = as_text(await self.db.run("batch_claim", self.db.time, int(lease_s * 1000)))
        return await self.lookup(name) if name else None

    async def schedule_step(self, name: str, delay_s: float) -> None:
        """Make a batch due in `delay_s`."""
        await self.db.run("batch_schedule", self.db.time, name, int(delay_s * 1000))

    async def transition(self, name: str, to: BatchState, *fields: Argument) -> bool:
        """Move a batch to a state and set `fields` (name, value, ...). False: the table has no such transition."""
        sources = source_states(to)
        ttl = int(self.config.file_ttl_s * 1000)
        arguments = (self.db.time, name, to, int(is_final(to)), ttl, len(sources), *sources, *fields)
        return as_int(await self.db.run("batch_transition", *arguments)) > 0

    async def refuse_line(self, batch: Batch, line: int, offset: int, custom_id: str, error: bytes) -> bool:
        """Record the failure of a line that never becomes a job. Returns False if the batch has moved on.

        `line` follows the last submitted one; `offset`: bytes to the next line in the input; `error`: JSON.
        """
        job, ttl = batch_job_id(batch.id, line), int(self.config.file_ttl_s * 1000)
        reply = await self.db.run("batch_refuse_line", self.db.time, batch.id, line, offset, job, custom_id, error, ttl)
        return as_int(reply) > 0

    async def line_outcomes(self, name: str, owner: str, lines: range, enough_bytes: int) -> list[LineOutcome]:
        """Return the outcomes of lines (from 1) up to the first that has not ended, or to `enough_bytes` of results.

        A line whose stored result was tampered with counts as failed. Raises ContentKeyMissing.
        """
        jobs = [batch_job_id(name, line) for line in lines]
        rows = as_list(await self.db.run("batch_line_outcomes", enough_bytes, *jobs))
        return [self._line_outcome(as_list(row), owner, job) for row, job in zip(rows, jobs, strict=False)]

    def _line_outcome(self, row: list[Reply], owner: str, job: str) -> LineOutcome:
        custom_id, state, error, stored = row
        try:
            result = self.cipher.open(as_bytes(stored), "result", owner, job)
        except RecordUnreadable as fault:
            return LineOutcome(as_text(custom_id), JobState.FAILED, encode_job_error(fault))
        return LineOutcome(as_text(custom_id), JobState(as_text(state)) if state else None, as_bytes(error), result)

    async def record_collected(
        self,
        batch: Batch,
        last: int,
        parts: Iterable[tuple[ResultPart, FilePart]],
        store: str,
        *,
        expired: bool,
        never_ran_until: int | None = None,
    ) -> bool:
        """Add parts to the output files and delete the jobs. Returns False if another worker has done that.

        Args:
            last: Last line whose outcome the parts contain, counted from 1.
            expired: Whether one of the lines has expired.
            never_ran_until: Position of the next line in the input file, in bytes, after lines that never became jobs.
        """
        lines = (batch.collected, last, int(never_ran_until is not None), never_ran_until or 0, int(expired))
        lease = int((self.config.completion_window_s + self.config.file_ttl_s) * 1000)
        written = (value for kind, part in parts for value in (kind, part.name, part.bytes))
        arguments = (batch.id, *lines, store, lease, batch_job_id(batch.id, 0)[:-1], *written)
        return as_int(await self.db.run("batch_collect", self.db.time, *arguments)) > 0


def output_file_id(batch: str, part: ResultPart) -> str:
    """Return the id of a batch's output or error file. The Lua scripts derive the same id."""
    return f"file-{batch.removeprefix('batch_')}-{part}"


def batch_job_id(batch: str, line: int) -> str:
    """Return the id of a line's job, which is always the same, so that submitting it can be repeated. Lines from 1."""
    return f"job_{batch.removeprefix('batch_')}-{line}"


def _parse(name: str, row: Reply) -> Batch | None:
    plain = {key: value.decode("utf-8", "replace") for key, value in as_fields(row).items()}
    try:
        return msgspec.convert(plain, Batch, strict=False) if plain else None
    except msgspec.ValidationError as error:
        raise RecordUnreadable(f"{name}: the stored record is damaged or of another version: {error}") from None
