"""Turn lines of a batch into jobs, a window at a time: the next ones when earlier ones have ended.

The store accepts only the line after the last submitted one and advances the batch with it, so workers that expand
the same batch at once, or a worker that dies, neither lose nor repeat a line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from router.errors import InvalidRequest, JobAlreadyEnded, QueueFull, RateLimited
from router.jobs.job import encode_job_error

from ..accounts.tenants.config import TenantLimits
from ..jobs.submission import NamedFileReader, SubmissionParser
from ..storage.batch_store import Batch, batch_job_id
from ..storage.config import BatchConfig
from ..storage.file_store import QuotaExceeded, StoredFile
from ..storage.record import NewJob, tenant_of
from ..storage.stores import JobStores
from .input_file import BatchLine, InputReader, InvalidLine, RawLine, body_check, parse_line, read_custom_id

_log = logging.getLogger("causeway.cloud.batches")
MAX_UNCOLLECTED = 4
"""Windows: how far lines may run ahead of one that has not ended, since outcomes are collected in order."""


def window(batch: Batch, limits: BatchConfig) -> int:
    """Return how many lines may become jobs now."""
    open_jobs = batch.submitted - batch.ended
    uncollected = batch.submitted - batch.collected
    return min(
        limits.max_open_jobs - open_jobs,
        MAX_UNCOLLECTED * limits.max_open_jobs - uncollected,
        batch.total - batch.submitted,
    )


class BatchExpansion:
    """Submits lines."""

    def __init__(
        self,
        stores: JobStores,
        parser: SubmissionParser,
        limits: BatchConfig,
        tenant_limits: Callable[[str], TenantLimits],
        max_body_bytes: int,
    ) -> None:
        """`max_body_bytes`: of a line's body with its uploaded files in base64."""
        self._jobs = stores.jobs
        self._batches = stores.batches
        self._files = stores.files
        self._named = NamedFileReader(stores.files)
        self._parser = parser
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._tenant_limits = tenant_limits

    async def submit(self, batch: Batch, file: StoredFile, reader: InputReader) -> None:
        """Submit the lines of the window, or as many of them as the queues accept.

        Raises JobStoreUnavailable or FileContentLost.
        """
        batch = msgspec.structs.replace(batch, tags=",".join(filter(None, (batch.tags, file.tags))))
        last = batch.submitted + window(batch, self._limits)
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
        except (JobAlreadyEnded, QueueFull, RateLimited, _StoreFull):
            return  # cancelled, or there is no room: the next step sees that

    async def _quota_error(self, batch: Batch) -> QuotaExceeded | None:
        """Return why lines would have no room for their output. Raises _StoreFull if that is no fault of the tenant."""
        limits, usage = self._limits, await self._files.usage(batch.owner)
        max_bytes, key = limits.max_bytes, "max_bytes"
        if self._files.in_redis:
            max_bytes, key = limits.max_redis_bytes, "max_redis_bytes"
            if usage.store_bytes >= limits.max_redis_total_bytes:
                _log.warning("batches wait: the files in Redis have jobs.batches.max_redis_total_bytes")
                raise _StoreFull
        if usage.bytes < max_bytes:
            return None
        return QuotaExceeded(
            f"Your tenant's files have {usage.bytes} of {max_bytes} bytes (jobs.batches.{key}): there is no room for "
            "more output. Delete files, then send this line again."
        )

    async def _submit(self, batch: Batch, number: int, line: RawLine, full: QuotaExceeded | None) -> None:
        """Make a line a job, or a failed one where it cannot run."""
        if full is not None:
            await self._refuse(batch, number, line, encode_job_error(full))
            return
        limit = self._limits.max_line_bytes
        try:
            parsed = parse_line(line.data, batch.endpoint, body_check(self._parser, batch), limit)
        except InvalidLine as error:
            where = "" if read_custom_id(line.data) else f"Request {number} of the file: "
            fault = {"code": error.code, "message": where + error.message}
            await self._refuse(batch, number, line, msgspec.json.encode(fault))
            return
        tenant_limits = self._tenant_limits(tenant_of(batch.owner))
        try:
            body = await self._named.inline(parsed.body, batch.owner, tenant_limits.body_bytes(self._max_body_bytes))
        except InvalidRequest as error:  # a file is gone, or too large
            await self._refuse(batch, number, line, encode_job_error(error))
            return
        parsed = msgspec.structs.replace(parsed, body=body)
        await self._jobs.accept(self._new_job(batch, parsed, number, line.end), tenant_limits)

    async def _refuse(self, batch: Batch, number: int, line: RawLine, error: bytes) -> None:
        if not await self._batches.refuse_line(batch, number, line.end, read_custom_id(line.data), error):
            raise JobAlreadyEnded(f"The batch {batch.id} accepts no more lines here.")

    def _new_job(self, batch: Batch, line: BatchLine, number: int, offset: int) -> NewJob:
        return NewJob(
            id=batch_job_id(batch.id, number),
            owner=batch.owner,
            tier=line.tier,
            priority="bulk",
            window=batch.window or self._parser.window("", self._tenant_limits(tenant_of(batch.owner))),
            endpoint=batch.endpoint,
            body=line.body,
            deadline_ms=batch.expires,
            tokens=line.tokens,
            batch=batch.id,
            line=number,
            offset=offset,
            custom_id=line.custom_id,
            tags=tuple(batch.tags.split(",")) if batch.tags else (),
            traceparent=batch.traceparent,
            token_id=batch.token_id,
            token_issued=batch.token_issued,
            ttl_ms=int((self._limits.file_ttl_s + self._limits.completion_window_s) * 1000),
        )


class _StoreFull(Exception):
    """The content store has no room, for any tenant."""
