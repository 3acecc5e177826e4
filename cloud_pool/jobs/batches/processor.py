"""What moves batches on, in every worker; one worker at a time looks at a batch, and each step can be repeated.

1. validating    read the file; a fault in any line fails the batch, with each fault named; else in_progress
2. in_progress   lines become jobs of priority bulk, as many as the queues take; line 7 is always the same job
3. cancelling    its jobs are cancelled
4. all its jobs have ended: the results get their files, and the batch is completed, expired or cancelled

Lines that never became a job, because the batch was cancelled or expired first, stand in the file of errors.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import anyio
import msgspec

from router.errors import NotFound, QueueFull, RateLimited

from ..config import JobsConfig
from ..errors import JobAlreadyEnded, JobStoreUnavailable
from ..record import NewJob
from ..states import JobState
from ..store.job_store import JobStore
from ..submission import SubmissionParser
from .batch_store import Batch, BatchStore
from .file_store import FileStore, ResultPart
from .input_file import BatchLine, BatchLineError, read_lines
from .output_file import BatchResults, line_job_id
from .states import BatchState

_log = logging.getLogger("causeway.cloud.batches")
_LEASE_S = 30.0
_CHECK_INTERVAL_S = 0.5


class BatchProcessor:
    def __init__(
        self, batches: BatchStore, files: FileStore, store: JobStore, intake: SubmissionParser, config: JobsConfig
    ) -> None:
        self._batches = batches
        self._results = BatchResults(batches)
        self._parsed: tuple[str, list[BatchLine]] = ("", [])  # of the batch that is being fed
        self._files = files
        self._store = store
        self._intake = intake
        self._config = config

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                busy = await self.step()
            except JobStoreUnavailable as error:
                _log.warning("%s", error.message)
                busy = False
            if not busy:
                await anyio.sleep(_CHECK_INTERVAL_S)

    async def step(self) -> bool:
        """Looks at one batch, if any is due. Raises StoreUnavailable."""
        batch = await self._batches.claim(_LEASE_S)
        if batch is None:
            return False
        if batch.state == "validating":
            await self._validate(batch)  # (1)
        elif batch.state == "cancelling":
            await self._cancel(batch)  # (3)
        elif batch.state == "finalizing" or await self._fed(batch):
            await self._finish(batch)  # (4)
        return True

    # --- (1), (2), (3) ---------------------------------------------------------------------------------------------

    async def _validate(self, batch: Batch) -> None:
        content = await self._batches.content(batch.id, self._files)
        # On a thread: ten thousand bodies take a while, and jobs run on this loop.
        lines, faults = await anyio.to_thread.run_sync(self._read, batch, content)
        if faults:
            await self._batches.move(batch.id, "failed", "faults", msgspec.json.encode(faults))
            return
        await self._batches.set_custom_ids(batch.id, [line.custom_id for line in lines])
        await self._batches.move(batch.id, "in_progress", "total", len(lines))

    def _read(self, batch: Batch, content: bytes) -> tuple[list[BatchLine], list[BatchLineError]]:
        bounds = self._config.batches

        def check(body: bytes) -> str:
            return self._intake.tier(self._intake.checked(batch.endpoint, body, batch.owner))

        return read_lines(
            content, batch.endpoint, check, max_lines=bounds.max_lines, max_line_bytes=bounds.max_line_bytes
        )

    async def _fed(self, batch: Batch) -> bool:
        """(2) Whether all that shall run has run."""
        late = self._store.now_ms >= batch.expires
        if batch.submitted < batch.total and not late:
            await self._feed(batch)
            return False
        over = batch.ended >= batch.submitted
        if not over:
            await self._batches.schedule_check(batch.id, _CHECK_INTERVAL_S)
        return over

    async def _feed(self, batch: Batch) -> None:
        if self._parsed[0] != batch.id:
            content = await self._batches.content(batch.id, self._files)
            self._parsed = batch.id, (await anyio.to_thread.run_sync(self._read, batch, content))[0]
        lines, fed = self._parsed[1], batch.submitted
        try:
            for line in lines[fed : fed + self._config.batches.lines_per_step]:
                await self._store.accept(self._offer(batch, line, fed + 1))
                fed += 1
        except JobAlreadyEnded:
            pass  # it was cancelled meanwhile: the next look sees that
        except (QueueFull, RateLimited):
            await self._batches.schedule_check(batch.id, _CHECK_INTERVAL_S)
        else:
            await self._batches.schedule_check(batch.id, 0.0)
        finally:
            await self._batches.fed(batch.id, fed)

    def _offer(self, batch: Batch, line: BatchLine, at: int) -> NewJob:
        return NewJob(
            id=line_job_id(batch, at),
            owner=batch.owner,
            tier=line.tier,
            priority="bulk",
            endpoint=batch.endpoint,
            body=line.body,
            deadline_ms=batch.expires,
            batch=batch.id,
            tags=tuple(batch.tags.split(",")) if batch.tags else (),
            traceparent=batch.traceparent,
            ttl_ms=int((self._config.batches.file_ttl_s + self._config.batches.completion_window_s) * 1000),
        )

    async def _cancel(self, batch: Batch) -> None:
        for at in range(
            1, batch.submitted + self._config.batches.lines_per_step + 1
        ):  # a feeder may have died before it said so
            with suppress(JobAlreadyEnded, NotFound):
                await self._store.cancel(line_job_id(batch, at), batch.owner)
        await self._publish(batch, "cancelled")

    # --- (4) -------------------------------------------------------------------------------------------------------

    async def _finish(self, batch: Batch) -> None:
        if batch.state != "finalizing" and not await self._batches.move(batch.id, "finalizing"):
            return  # it was cancelled meanwhile: the next look sees that
        expired = batch.submitted < batch.total
        async for _, line in self._results.ended(batch, "errors"):
            expired = expired or line.state is JobState.EXPIRED
        await self._publish(batch, "expired" if expired else "completed")

    async def _publish(self, batch: Batch, state: BatchState) -> None:
        fields: list[str | int] = []
        counts: dict[ResultPart, int] = {}
        for part in ("output", "errors"):
            size = 0
            counts[part] = 0
            async for data in self._results.lines(batch, part):
                size += len(data)
                counts[part] += 1
            if counts[part]:
                name = f"file-{batch.id.removeprefix('batch_')}-{part}"
                await self._files.add_results(name, batch.owner, size, batch.id, part)
                fields += [part, name]
        await self._batches.move(batch.id, state, "completed", counts["output"], "failed", counts["errors"], *fields)
