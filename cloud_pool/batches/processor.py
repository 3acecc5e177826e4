"""Processing of batches. Every worker runs it; one worker at a time advances a batch, and each step can be repeated.

1. validating: check the file. If it has no valid line, or two lines with the same id, the batch fails with all errors
listed. Otherwise it is in_progress, and lines with errors fail alone.
2. in_progress: lines become jobs of priority bulk, at most `max_open_jobs` at once. As these end, their outcomes go to
   the output files, and the next lines become jobs. A given line is always the same job.
3. cancelling: cancel its open jobs.
4. Cancelled or past its window: lines that never became jobs go to the error file.
5. All lines are in the output files: the batch is completed, expired or cancelled.

A lease keeps other workers from repeating the work, but correctness does not depend on it: no line is lost or repeated
without it either (see `BatchExpansion` and `BatchCollection`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import anyio
import msgspec

from causeway_server.router.errors import (
    CausewayError,
    InvalidRequest,
    JobAlreadyEnded,
    JobStoreUnavailable,
    NoRoute,
    NotFound,
    QueueFull,
    RateLimited,
    RecordUnreadable,
)
from causeway_server.router.jobs.job import JobState, encode_job_error
from causeway_server.router.jobs.submission import parse_job_request
from causeway_server.router.residency import region_tags
from causeway_server.router.serving.logs import redacted
from causeway_server.router.types import RoutingHints, folded_tags

from ..accounts.tenants.config import TenantLimits
from ..jobs.submission import NamedFileReader, SubmissionParser
from ..storage.batch_store import Batch, BatchState, LineOutcome, ResultPart, batch_job_id, output_file_id
from ..storage.config import BatchConfig, JobsConfig
from ..storage.file_contents import FileContentLost, FileStoreUnavailable
from ..storage.file_store import PART_BYTES, FilePart, QuotaExceeded, StoredFile
from ..storage.record import NewJob, tenant_of
from ..storage.stores import JobStores
from .input_file import (
    BatchLine,
    BatchLineError,
    InputReader,
    InvalidLine,
    RawLine,
    body_check,
    check_input,
    grants_of,
    parse_line,
    read_custom_id,
)

log = logging.getLogger(__name__)
MAX_UNCOLLECTED = 4
"""Maximum lead of submitted lines over the first uncollected one, in windows. Outcomes are collected in order."""


def window(batch: Batch, limits: BatchConfig) -> int:
    """Return the number of lines that may become jobs now."""
    open_jobs = batch.submitted - batch.ended
    uncollected = batch.submitted - batch.collected
    return min(
        limits.max_open_jobs - open_jobs,
        MAX_UNCOLLECTED * limits.max_open_jobs - uncollected,
        batch.total - batch.submitted,
    )


@dataclass(eq=False, repr=False)
class BatchExpansion:
    """Expands a batch into jobs, a window of lines at a time. Further lines follow when earlier ones have ended.

    The store accepts only the line after the last submitted one and advances the batch with it, so workers that expand
    the same batch at once, or a worker that dies, neither lose nor repeat a line.
    """

    stores: JobStores
    parser: SubmissionParser
    config: JobsConfig
    tenant_limits: Callable[[str], TenantLimits]

    async def submit(self, batch: Batch, file: StoredFile, reader: InputReader) -> None:
        """Submit the window's lines, or as many as the queues accept. Raises JobStoreUnavailable or FileContentLost."""
        batch = msgspec.structs.replace(batch, tags=",".join(filter(None, (batch.tags, file.tags))))
        last = batch.submitted + window(batch, self.config.batches)
        if last <= batch.submitted:
            return
        number = batch.submitted
        try:
            full = await self._quota_error(batch)
            async with aclosing(reader.lines(file, batch.offset)) as lines:
                async for line in lines:
                    number += 1
                    await self._submit(batch, number, line, full)
                    if number >= last:
                        return
        except (JobAlreadyEnded, QueueFull, RateLimited):
            return  # cancelled, or there is no room: the next step sees that

    async def _quota_error(self, batch: Batch) -> QuotaExceeded | None:
        """Return why there is no room for the lines' output. Raises QueueFull if the tenant is not the cause."""
        limits, usage = self.config.batches, await self.stores.files.usage(batch.owner)
        max_bytes, key = limits.max_bytes, "max_bytes"
        if self.stores.files.in_redis:
            max_bytes, key = limits.max_redis_bytes, "max_redis_bytes"
            if usage.store_bytes >= limits.max_redis_total_bytes:
                log.warning(
                    "Batches wait, because the files in Redis have reached the limit "
                    "jobs.batches.max_redis_total_bytes."
                )
                raise QueueFull("The file store has no room for the files of any tenant now.")
        if usage.bytes < max_bytes:
            return None
        return QuotaExceeded(
            f"Your tenant's files take {usage.bytes} of {max_bytes} bytes (jobs.batches.{key}), so there "
            "is no room for more output. Delete files, then send this line again."
        )

    async def _submit(self, batch: Batch, number: int, line: RawLine, full: QuotaExceeded | None) -> None:
        """Turn a line into a job, or record its failure if it cannot run."""
        if full is not None:
            await self._refuse(batch, number, line, encode_job_error(full))
            return
        check = body_check(self.parser, batch)
        try:
            parsed = parse_line(line.data, batch.endpoint, check, self.config.batches.max_line_bytes)
        except InvalidLine as error:
            where = "" if read_custom_id(line.data) else f"Request {number} of the file: "
            fault = {"code": error.code, "message": where + error.message}
            await self._refuse(batch, number, line, msgspec.json.encode(fault))
            return
        tenant_limits = self.tenant_limits(tenant_of(batch.owner))
        try:
            max_bytes = tenant_limits.body_bytes(self.config.max_body_bytes)  # with its files in base64
            body = await NamedFileReader(self.stores.files).inline(parsed.body, batch.owner, max_bytes)
            hints = RoutingHints(client=batch.owner, tags=tuple(filter(None, batch.tags.split(","))))
            request, (_, allowed) = parse_job_request(batch.endpoint, body, hints), grants_of(batch)
            request = await self.parser.placed(request, tenant_of(batch.owner), allowed)
            regions = self.parser.check_store(request.hints.tags, tenant_limits)
        except (InvalidRequest, NoRoute) as error:  # a file is gone, or too large; its session's tier is gone
            await self._refuse(batch, number, line, encode_job_error(error))
            return
        parsed = msgspec.structs.replace(parsed, body=body, tier=self.parser.tier_name(request))
        job = self._new_job(batch, parsed, number, line.end)
        job = msgspec.structs.replace(job, tags=folded_tags((*hints.tags, *region_tags(regions))))
        await self.stores.jobs.accept(job, tenant_limits)

    async def _refuse(self, batch: Batch, number: int, line: RawLine, error: bytes) -> None:
        if not await self.stores.batches.refuse_line(batch, number, line.end, read_custom_id(line.data), error):
            raise JobAlreadyEnded(f"The batch {batch.id} has moved on, so it does not accept this line.")

    def _new_job(self, batch: Batch, line: BatchLine, number: int, offset: int) -> NewJob:
        return NewJob(
            id=batch_job_id(batch.id, number),
            owner=batch.owner,
            tier=line.tier,
            priority="bulk",
            endpoint=batch.endpoint,
            body=line.body,
            deadline_ms=batch.expires,
            tokens=line.tokens,
            batch=batch.id,
            line=number,
            offset=offset,
            custom_id=line.custom_id,
            traceparent=batch.traceparent,
            token_id=batch.token_id,
            token_issued=batch.token_issued,
            ttl_ms=int((self.config.batches.file_ttl_s + self.config.batches.completion_window_s) * 1000),
        )


_NOT_RUN_CODES = {JobState.CANCELLED: "batch_cancelled", JobState.EXPIRED: "batch_expired", None: "batch_expired"}
_PAGE = 100


class _LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _LineError(msgspec.Struct):
    code: str
    message: str


class _OutputLine(msgspec.Struct):
    id: str
    custom_id: str
    response: _LineResponse | None
    error: _LineError | None


def output_line(batch: Batch, line: int, outcome: LineOutcome) -> tuple[ResultPart, bytes]:
    """Return a line of the output file (a succeeded job) or of the error file (any other)."""
    job = batch_job_id(batch.id, line)
    if outcome.state is JobState.SUCCEEDED:
        response = _LineResponse(200, job, msgspec.Raw(outcome.result))
        row = _OutputLine(f"batch_req_{job}", outcome.custom_id, response, None)
        return "output", msgspec.json.encode(row) + b"\n"
    row = _OutputLine(f"batch_req_{job}", outcome.custom_id, None, _error(batch, outcome))
    return "errors", msgspec.json.encode(row) + b"\n"


def _error(batch: Batch, outcome: LineOutcome) -> _LineError:
    not_run = _NOT_RUN_CODES.get(outcome.state)
    # A job may also be cancelled for a reason of its own, such as a revoked token.
    own_reason = outcome.state is JobState.CANCELLED and batch.cancelling_at is None and outcome.error
    if not_run is not None and not own_reason:
        if outcome.state is None and batch.cancelling_at is not None:
            not_run = "batch_cancelled"
        return _LineError(not_run, "The batch ended before this request was completed.")
    try:
        return msgspec.json.decode(outcome.error, type=_LineError)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _LineError(CausewayError.code, "")


class _Rows:
    """Rows of the output files that are not written yet."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.last = batch.collected
        self.expired = False
        self.data: dict[ResultPart, bytearray] = {"output": bytearray(), "errors": bytearray()}

    def add(self, outcome: LineOutcome) -> None:
        self.last += 1
        self.expired = self.expired or outcome.state is JobState.EXPIRED
        kind, row = output_line(self._batch, self.last, outcome)
        self.data[kind] += row

    @property
    def full(self) -> bool:
        return any(len(data) >= PART_BYTES for data in self.data.values())


@dataclass(eq=False, repr=False)
class BatchCollection:
    """Collects outcomes: they are written to the output files in the input's order, and then the jobs are deleted.

    1. Outcomes become parts of the output and the error file, which are not visible yet.
    2. One script lists the parts in these files, moves the batch on and deletes the jobs. If another worker has
       collected the same lines, it changes nothing, and the parts are deleted with the file.

    Every method raises JobStoreUnavailable.
    """

    stores: JobStores

    async def collect(self, batch: Batch) -> Batch:
        """Collect the ended lines up to the first unfinished one. Returns the resulting batch."""
        while batch.collected < batch.submitted:
            rows = _Rows(batch)
            while not rows.full and rows.last < batch.submitted:
                page = range(rows.last + 1, min(rows.last + _PAGE, batch.submitted) + 1)
                outcomes = await self.stores.batches.line_outcomes(batch.id, batch.owner, page, PART_BYTES)
                for outcome in outcomes:
                    rows.add(outcome)
                if len(outcomes) < len(page) and not rows.full:
                    break
            if rows.last == batch.collected:
                return batch
            batch = await self._write(batch, rows, None)
        return batch

    async def collect_unsubmitted(self, batch: Batch, file: StoredFile, reader: InputReader) -> Batch:
        """Collect the next lines that will never become jobs. Raises FileContentLost."""
        rows, offset = _Rows(batch), batch.offset
        rows.expired = batch.state != "cancelling"
        async with aclosing(reader.lines(file, offset)) as lines:
            async for line in lines:
                rows.add(LineOutcome(read_custom_id(line.data), None))
                offset = line.end
                if rows.full or rows.last == batch.total:
                    break
        return await self._write(batch, rows, offset)

    async def _write(self, batch: Batch, rows: _Rows, never_ran_until: int | None) -> Batch:
        """Write the rows and update the batch (1, 2)."""
        parts: list[tuple[ResultPart, FilePart]] = []
        # Another worker may write the same lines at the same time: no two parts have the same name.
        name = f"{rows.last}-{secrets.token_hex(6)}"
        for kind, data in rows.data.items():
            if data:
                await self.stores.files.write_part(output_file_id(batch.id, kind), batch.owner, name, bytes(data))
                parts.append((kind, FilePart(name, len(data))))
        await self.stores.batches.record_collected(
            batch, rows.last, parts, self.stores.files.store_name, expired=rows.expired, never_ran_until=never_ran_until
        )
        return await self.stores.batches.lookup(batch.id) or msgspec.structs.replace(batch, collected=rows.last)


_STEP_INTERVAL_S = 0.5
_STORE_DELAY_S = 5.0
_FAULT_DELAY_S = 60.0
_FILES_INTERVAL_S = 10.0
_STEPS_AT_ONCE = 4  # a large file that is being checked does not hold up other batches


@dataclass(eq=False, repr=False)
class BatchProcessor:
    """Advances due batches step by step, and deletes files that are due."""

    stores: JobStores
    parser: SubmissionParser
    config: JobsConfig
    limits: Callable[[str], TenantLimits] = lambda _: TenantLimits()  # limits of a tenant

    def __post_init__(self) -> None:
        self._reader = InputReader(self.stores.files, self.config.batches.max_line_bytes)
        self._expansion = BatchExpansion(self.stores, self.parser, self.config, self.limits)
        self._collection = BatchCollection(self.stores)

    async def run(self) -> None:
        """Advance batches until cancelled."""
        free = anyio.Semaphore(_STEPS_AT_ONCE)
        async with anyio.create_task_group() as steps:
            steps.start_soon(self._delete_files)
            while True:
                await free.acquire()
                batch = await self._claim()
                if batch is None:
                    free.release()
                    await anyio.sleep(_STEP_INTERVAL_S)
                else:
                    steps.start_soon(self._advance_and_release, batch, free)

    async def step(self) -> bool:
        """Advance one batch. Returns False if none is due. Raises JobStoreUnavailable or RecordUnreadable."""
        batch = await self.stores.batches.claim(self.config.lease_s)
        if batch is not None:
            await self._advance(batch)
        return batch is not None

    async def _claim(self) -> Batch | None:
        try:
            return await self.stores.batches.claim(self.config.lease_s)
        except (JobStoreUnavailable, RecordUnreadable) as error:  # an unreadable batch is due after its lease
            log.warning("%s", error.message)
            return None

    async def _advance_and_release(self, batch: Batch, free: anyio.Semaphore) -> None:
        try:
            await self._advance(batch)
        except (JobStoreUnavailable, RecordUnreadable) as error:
            log.warning("%s: %s", batch.id, error.message)
            if isinstance(error, FileStoreUnavailable):
                with suppress(JobStoreUnavailable):
                    await self.stores.batches.schedule_step(batch.id, _STORE_DELAY_S)
        except Exception as error:  # of one batch, which the others survive
            log.error("The batch %s waits for a minute after an unexpected error: %s", batch.id, redacted(error))
            with suppress(JobStoreUnavailable):
                await self.stores.batches.schedule_step(batch.id, _FAULT_DELAY_S)
        finally:
            free.release()

    async def _delete_files(self) -> None:
        while True:
            deleted = 0
            try:
                deleted = await self.stores.files.delete_due()
            except JobStoreUnavailable as error:
                log.warning("Files could not be deleted: %s", error.message)
            if not deleted:
                await anyio.sleep(_FILES_INTERVAL_S)

    async def _advance(self, batch: Batch) -> None:
        try:
            file = await self.stores.files.lookup(batch.input)
            if file is None:
                raise FileContentLost(f"The input file {batch.input} no longer exists.")
            if batch.state == "validating":
                await self._validate(batch, file)  # (1)
            elif batch.state == "finalizing":
                await self._finish(batch)  # (5)
            else:
                await self._run_lines(batch, file)
        except FileContentLost as error:
            await self._fail(batch, error)

    # --- (1) -------------------------------------------------------------------------------------------------------

    async def _validate(self, batch: Batch, file: StoredFile) -> None:
        async def renew_lease() -> None:
            await self.stores.batches.schedule_step(batch.id, self.config.lease_s)

        check = await check_input(batch, file, self._reader, self.parser, self.config.batches, renew_lease)
        if check.refused:
            await self.stores.batches.transition(batch.id, "failed", "line_errors", msgspec.json.encode(check.errors))
        else:
            await self.stores.batches.transition(batch.id, "in_progress", "total", check.lines)

    # --- (2), (3), (4) ---------------------------------------------------------------------------------------------

    async def _run_lines(self, batch: Batch, file: StoredFile) -> None:
        over = batch.state == "cancelling" or await self.stores.database.now_ms() >= batch.expires
        if batch.state == "cancelling" and batch.ended < batch.submitted:
            batch = await self._cancel_jobs(batch)  # (3)
        if self._worth_collecting(batch, over=over):
            batch = await self._collection.collect(batch)
        if not over:
            await self._expansion.submit(batch, file, self._reader)  # (2)
        elif batch.collected == batch.submitted < batch.total:
            batch = await self._collection.collect_unsubmitted(batch, file, self._reader)  # (4)
        if batch.collected == batch.total:
            await self._finish(batch)
        else:
            more = over and batch.collected == batch.submitted
            await self.stores.batches.schedule_step(batch.id, 0.0 if more else _STEP_INTERVAL_S)

    def _worth_collecting(self, batch: Batch, *, over: bool) -> bool:
        """Return whether enough lines have ended: a whole window, or the last ones. Parts should be few and large."""
        if batch.ended - batch.collected >= self.config.batches.max_open_jobs:
            return True
        return batch.ended == batch.submitted and (over or batch.submitted == batch.total)

    async def _cancel_jobs(self, batch: Batch) -> Batch:
        for line in range(batch.collected + 1, batch.submitted + 1):
            with suppress(JobAlreadyEnded, NotFound):
                await self.stores.jobs.cancel(batch_job_id(batch.id, line), batch.owner)
        return await self.stores.batches.lookup(batch.id) or batch

    # --- (5) -------------------------------------------------------------------------------------------------------

    async def _finish(self, batch: Batch) -> None:
        state: BatchState = "expired" if batch.late else "completed"
        if batch.state == "cancelling":
            state = "cancelled"
        elif not await self.stores.batches.transition(batch.id, "finalizing"):
            return  # cancelled in the meantime: the next step sees that
        await self.stores.batches.transition(batch.id, state)

    async def _fail(self, batch: Batch, error: FileContentLost) -> None:
        """End a batch whose lines can no longer be read, and keep the answers so far."""
        log.error("%s failed: %s", batch.id, error.message)
        await self._collection.collect(await self._cancel_jobs(batch))
        fault = BatchLineError(error.code, f"{error.message} Upload the file again.")
        await self.stores.batches.transition(batch.id, "failed", "line_errors", msgspec.json.encode([fault]))
