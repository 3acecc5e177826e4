"""Write the outcomes of lines to the output files, in the input's order, and delete their jobs.

1. Outcomes become parts of the output and the error file, which no reader sees yet.
2. One script lists the parts in these files, moves the batch on and deletes the jobs. If another worker has collected
   the same lines, it changes nothing, and the parts are deleted with the file.
"""

from __future__ import annotations

import secrets
from contextlib import aclosing

import msgspec

from router.errors import CausewayError
from router.jobs.job import JobState

from ..storage.batch_store import Batch, CollectedLines, LineOutcome, ResultPart, batch_job_id, output_file_id
from ..storage.file_store import PART_BYTES, FilePart, StoredFile
from ..storage.stores import JobStores
from .input_file import InputReader, read_custom_id

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
        return _LineError(not_run, "This request was not completed before the batch ended.")
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


class BatchCollection:
    """Collects outcomes. Every method raises JobStoreUnavailable."""

    def __init__(self, stores: JobStores) -> None:
        self._batches = stores.batches
        self._files = stores.files

    async def collect(self, batch: Batch) -> Batch:
        """Collect the lines that have ended, up to the first that has not. Returns the batch as it is then."""
        while batch.collected < batch.submitted:
            rows = _Rows(batch)
            while not rows.full and rows.last < batch.submitted:
                page = range(rows.last + 1, min(rows.last + _PAGE, batch.submitted) + 1)
                outcomes = await self._batches.line_outcomes(batch.id, batch.owner, page, PART_BYTES)
                for outcome in outcomes:
                    rows.add(outcome)
                if len(outcomes) < len(page) and not rows.full:
                    break
            if rows.last == batch.collected:
                return batch
            batch = await self._write(batch, rows, None)
        return batch

    async def collect_unsubmitted(self, batch: Batch, file: StoredFile, reader: InputReader) -> Batch:
        """Collect the next lines of those that will never become jobs. Raises FileContentLost."""
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
        """(1), (2)"""
        parts: list[tuple[ResultPart, FilePart]] = []
        # Another worker may write the same lines at the same time: no two parts have the same name.
        name = f"{rows.last}-{secrets.token_hex(6)}"
        for kind, data in rows.data.items():
            if data:
                await self._files.write_part(output_file_id(batch.id, kind), batch.owner, name, bytes(data))
                parts.append((kind, FilePart(name, len(data))))
        collected = CollectedLines(last=rows.last, parts=parts, expired=rows.expired, never_ran_until=never_ran_until)
        await self._batches.record_collected(batch, collected, self._files.store_name)
        return await self._batches.lookup(batch.id) or msgspec.structs.replace(batch, collected=rows.last)
