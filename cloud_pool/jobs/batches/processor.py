"""Advance batches. Every worker runs this; one worker at a time advances a batch, and each step can be repeated.

1. validating: read the file. An error in any line fails the batch, with all errors listed; else it is in_progress.
2. in_progress: lines become jobs of priority bulk, as many as the queues accept. Line 7 is always the same job.
3. cancelling: cancel its jobs.
4. All its jobs have ended: add the output files; the batch is completed, expired or cancelled.

Lines that never became jobs, because the batch was cancelled or expired before, are in the error file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import anyio
import msgspec

from router.errors import NotFound, QueueFull, RateLimited

from ...accounts.identity.principal import Grants
from ...accounts.tenants.config import TenantLimits
from ..config import JobsConfig
from ..errors import JobAlreadyEnded, JobStoreUnavailable, RecordUnreadable
from ..record import NewJob, parse_request
from ..states import JobState
from ..stores import JobStores
from ..submission import SubmissionParser
from .batch_store import Batch, batch_job_id
from .file_store import ResultPart
from .input_file import BatchLine, BatchLineError, read_lines
from .output_file import BatchResults
from .states import BatchState

_log = logging.getLogger("causeway.cloud.batches")
_LEASE_S = 30.0
_STEP_INTERVAL_S = 0.5


class BatchProcessor:
    """Advances due batches step by step."""

    def __init__(
        self,
        stores: JobStores,
        parser: SubmissionParser,
        config: JobsConfig,
        limits: Callable[[str], TenantLimits] = lambda _: TenantLimits(),
    ) -> None:
        """`limits` are those of a tenant."""
        self._batches = stores.batches
        self._files = stores.files
        self._jobs = stores.jobs
        self._results = BatchResults(stores.batches)
        self._parser = parser
        self._config = config
        self._limits = limits
        self._parsed: tuple[str, list[BatchLine]] = ("", [])  # the batch whose lines were submitted last

    async def run(self) -> None:
        """Advance batches until cancelled."""
        while True:
            try:
                advanced = await self.step()
            except (JobStoreUnavailable, RecordUnreadable) as error:  # an unreadable batch is due after its lease
                _log.warning("%s", error.message)
                advanced = False
            if not advanced:
                await anyio.sleep(_STEP_INTERVAL_S)

    async def step(self) -> bool:
        """Advance one batch. Returns False if none is due. Raises JobStoreUnavailable or RecordUnreadable."""
        batch = await self._batches.claim(_LEASE_S)
        if batch is None:
            return False
        if batch.state == "validating":
            await self._validate(batch)  # (1)
        elif batch.state == "cancelling":
            await self._cancel(batch)  # (3)
        elif batch.state == "finalizing" or await self._all_lines_ended(batch):
            await self._finish(batch)  # (4)
        return True

    # --- (1), (2), (3) ---------------------------------------------------------------------------------------------

    async def _validate(self, batch: Batch) -> None:
        lines, errors = await self._read(batch)
        if errors:
            await self._batches.transition(batch.id, "failed", "line_errors", msgspec.json.encode(errors))
            return
        await self._batches.set_custom_ids(batch.id, [line.custom_id for line in lines])
        await self._batches.transition(batch.id, "in_progress", "total", len(lines))

    async def _read(self, batch: Batch) -> tuple[list[BatchLine], list[BatchLineError]]:
        content = await self._batches.read_input(batch.id, self._files)
        limits = self._config.batches

        grants = msgspec.json.decode(batch.grants, type=Grants)
        allowed = None if grants.models is None else frozenset(grants.models)

        def resolve_tier(body: bytes) -> str:
            request = self._parser.validate(batch.endpoint, body, batch.owner, allowed=allowed)
            grants.require_modalities(request)
            return self._parser.tier_name(request)

        def read() -> tuple[list[BatchLine], list[BatchLineError]]:
            return read_lines(
                content,
                batch.endpoint,
                resolve_tier,
                max_lines=limits.max_lines,
                max_line_bytes=limits.max_line_bytes,
            )

        # On a thread: ten thousand bodies take a while, and jobs run on this event loop.
        return await anyio.to_thread.run_sync(read)

    async def _all_lines_ended(self, batch: Batch) -> bool:
        """(2)"""
        late = await self._jobs.now_ms() >= batch.expires
        if batch.submitted < batch.total and not late:
            await self._submit_lines(batch)
            return False
        ended = batch.ended >= batch.submitted
        if not ended:
            await self._batches.schedule_step(batch.id, _STEP_INTERVAL_S)
        return ended

    async def _submit_lines(self, batch: Batch) -> None:
        if self._parsed[0] != batch.id:
            self._parsed = batch.id, (await self._read(batch))[0]
        lines, submitted = self._parsed[1], batch.submitted
        limits = self._limits(batch.owner.partition("/")[0])
        try:
            for line in lines[submitted : submitted + self._config.batches.lines_per_step]:
                await self._jobs.accept(self._new_job(batch, line, submitted + 1), limits)
                submitted += 1
        except JobAlreadyEnded:
            pass  # cancelled in the meantime: the next step sees that
        except (QueueFull, RateLimited):
            await self._batches.schedule_step(batch.id, _STEP_INTERVAL_S)
        else:
            await self._batches.schedule_step(batch.id, 0.0)
        finally:
            await self._batches.record_submitted_lines(batch.id, submitted)

    def _new_job(self, batch: Batch, line: BatchLine, number: int) -> NewJob:
        return NewJob(
            id=batch_job_id(batch.id, number),
            owner=batch.owner,
            tier=line.tier,
            priority="bulk",
            endpoint=batch.endpoint,
            body=line.body,
            deadline_ms=batch.expires,
            tokens=self._parser.tokens(parse_request(batch.endpoint, line.body, batch.owner), line.body),
            batch=batch.id,
            tags=tuple(batch.tags.split(",")) if batch.tags else (),
            traceparent=batch.traceparent,
            ttl_ms=int((self._config.batches.file_ttl_s + self._config.batches.completion_window_s) * 1000),
        )

    async def _cancel(self, batch: Batch) -> None:
        # One step more than recorded: a worker may have died between submitting lines and recording them.
        for line in range(1, batch.submitted + self._config.batches.lines_per_step + 1):
            with suppress(JobAlreadyEnded, NotFound):
                await self._jobs.cancel(batch_job_id(batch.id, line), batch.owner)
        await self._publish(batch, "cancelled")

    # --- (4) -------------------------------------------------------------------------------------------------------

    async def _finish(self, batch: Batch) -> None:
        if batch.state != "finalizing" and not await self._batches.transition(batch.id, "finalizing"):
            return  # cancelled in the meantime: the next step sees that
        expired = batch.submitted < batch.total
        async for _, outcome in self._results.outcomes(batch, "errors"):
            expired = expired or outcome.state is JobState.EXPIRED
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
        await self._batches.transition(
            batch.id, state, "completed", counts["output"], "failed", counts["errors"], *fields
        )
