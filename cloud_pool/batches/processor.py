"""Advance batches. Every worker runs this; one worker at a time advances a batch, and each step can be repeated.

1. validating: check the file. If it has no valid line, or two with one id, the batch fails with all errors listed; else
   it is in_progress, and a line with an error fails alone.
2. in_progress: lines become jobs of priority bulk, at most `max_open_jobs` at once. As these end, their outcomes go to
   the output files, and the next lines become jobs. Line 7 is always the same job.
3. cancelling: cancel its open jobs.
4. Cancelled or past its window: lines that never became jobs go to the error file.
5. All lines are in the output files: the batch is completed, expired or cancelled.

A lease keeps other workers from repeating the work; that no line is lost or repeated does not depend on it
(see `expansion` and `collection`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import anyio
import msgspec

from router.errors import JobAlreadyEnded, JobStoreUnavailable, NotFound, RecordUnreadable
from router.serving.logs import redacted

from ..accounts.tenants.config import TenantLimits
from ..jobs.submission import SubmissionParser
from ..storage.batch_store import Batch, BatchState, batch_job_id
from ..storage.config import JobsConfig
from ..storage.file_contents import FileContentLost, FileStoreUnavailable
from ..storage.file_store import StoredFile
from ..storage.stores import JobStores
from .collection import BatchCollection
from .expansion import BatchExpansion
from .input_file import BatchLineError, InputReader, check_input

_log = logging.getLogger("causeway.cloud.batches")
_STEP_INTERVAL_S = 0.5
_STORE_DELAY_S = 5.0
_FAULT_DELAY_S = 60.0
_FILES_INTERVAL_S = 10.0
_STEPS_AT_ONCE = 4  # a large file that is being checked does not hold up other batches


class BatchProcessor:
    """Advances due batches step by step, and deletes files that are due."""

    def __init__(
        self,
        stores: JobStores,
        parser: SubmissionParser,
        config: JobsConfig,
        limits: Callable[[str], TenantLimits] = lambda _: TenantLimits(),
    ) -> None:
        """`limits` are those of a tenant."""
        self._db = stores.database
        self._batches = stores.batches
        self._files = stores.files
        self._jobs = stores.jobs
        self._parser = parser
        self._limits = config.batches
        self._lease_s = config.lease_s
        self._reader = InputReader(stores.files, config.batches.max_line_bytes)
        self._expansion = BatchExpansion(stores, parser, config.batches, limits, config.max_body_bytes)
        self._collection = BatchCollection(stores)

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
        batch = await self._batches.claim(self._lease_s)
        if batch is not None:
            await self._advance(batch)
        return batch is not None

    async def _claim(self) -> Batch | None:
        try:
            return await self._batches.claim(self._lease_s)
        except (JobStoreUnavailable, RecordUnreadable) as error:  # an unreadable batch is due after its lease
            _log.warning("%s", error.message)
            return None

    async def _advance_and_release(self, batch: Batch, free: anyio.Semaphore) -> None:
        try:
            await self._advance(batch)
        except (JobStoreUnavailable, RecordUnreadable) as error:
            _log.warning("%s: %s", batch.id, error.message)
            if isinstance(error, FileStoreUnavailable):
                with suppress(JobStoreUnavailable):
                    await self._batches.schedule_step(batch.id, _STORE_DELAY_S)
        except Exception as error:  # of one batch, which the others survive
            _log.error("%s waits for a minute after an unexpected fault: %s", batch.id, redacted(error))
            with suppress(JobStoreUnavailable):
                await self._batches.schedule_step(batch.id, _FAULT_DELAY_S)
        finally:
            free.release()

    async def _delete_files(self) -> None:
        while True:
            deleted = 0
            try:
                deleted = await self._files.delete_due()
            except JobStoreUnavailable as error:
                _log.warning("files are not deleted: %s", error.message)
            if not deleted:
                await anyio.sleep(_FILES_INTERVAL_S)

    async def _advance(self, batch: Batch) -> None:
        try:
            file = await self._files.lookup(batch.input)
            if file is None:
                raise FileContentLost(f"The file {batch.input} is gone.")
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
            await self._batches.schedule_step(batch.id, self._lease_s)

        check = await check_input(batch, file, self._reader, self._parser, self._limits, renew_lease)
        if check.refused:
            await self._batches.transition(batch.id, "failed", "line_errors", msgspec.json.encode(check.errors))
        else:
            await self._batches.transition(batch.id, "in_progress", "total", check.lines)

    # --- (2), (3), (4) ---------------------------------------------------------------------------------------------

    async def _run_lines(self, batch: Batch, file: StoredFile) -> None:
        over = batch.state == "cancelling" or await self._db.now_ms() >= batch.expires
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
            await self._batches.schedule_step(batch.id, 0.0 if more else _STEP_INTERVAL_S)

    def _worth_collecting(self, batch: Batch, *, over: bool) -> bool:
        """Whether a window of lines has ended, or the last ones: parts are few, and not small."""
        if batch.ended - batch.collected >= self._limits.max_open_jobs:
            return True
        return batch.ended == batch.submitted and (over or batch.submitted == batch.total)

    async def _cancel_jobs(self, batch: Batch) -> Batch:
        for line in range(batch.collected + 1, batch.submitted + 1):
            with suppress(JobAlreadyEnded, NotFound):
                await self._jobs.cancel(batch_job_id(batch.id, line), batch.owner)
        return await self._batches.lookup(batch.id) or batch

    # --- (5) -------------------------------------------------------------------------------------------------------

    async def _finish(self, batch: Batch) -> None:
        state: BatchState = "expired" if batch.late else "completed"
        if batch.state == "cancelling":
            state = "cancelled"
        elif not await self._batches.transition(batch.id, "finalizing"):
            return  # cancelled in the meantime: the next step sees that
        await self._batches.transition(batch.id, state)

    async def _fail(self, batch: Batch, error: FileContentLost) -> None:
        """End a batch whose lines cannot be read any more, and keep the answers that exist."""
        _log.error("%s failed: %s", batch.id, error.message)
        await self._collection.collect(await self._cancel_jobs(batch))
        fault = BatchLineError(error.code, f"{error.message} Upload it again.")
        await self._batches.transition(batch.id, "failed", "line_errors", msgspec.json.encode([fault]))
