"""Output and error files in OpenAI's format, read from the batch's jobs on each download."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from ..states import JobState
from .batch_store import Batch, BatchStore, LineOutcome, batch_job_id
from .file_store import ResultPart

_PAGE = 50


class BatchResults:
    """Reads results."""

    def __init__(self, batches: BatchStore) -> None:
        self._batches = batches

    async def lines(self, batch: Batch, part: ResultPart) -> AsyncIterator[bytes]:
        """Yield the lines of an output file (succeeded jobs) or an error file (all others)."""
        async for line, outcome in self.outcomes(batch, part):
            yield _output_line(batch, line, outcome) + b"\n"

    async def outcomes(self, batch: Batch, part: ResultPart) -> AsyncIterator[tuple[int, LineOutcome]]:
        """Yield the lines of a part, from 1, with their outcomes."""
        for first in range(1, batch.total + 1, _PAGE):
            page = range(first, min(first + _PAGE, batch.total + 1))
            for line, outcome in zip(page, await self._batches.line_outcomes(batch.id, page), strict=True):
                if (outcome.state is JobState.SUCCEEDED) == (part == "output"):
                    yield line, outcome


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


_NOT_RUN_CODES = {JobState.CANCELLED: "batch_cancelled", JobState.EXPIRED: "batch_expired", None: "batch_expired"}


def _output_line(batch: Batch, line: int, outcome: LineOutcome) -> bytes:
    job = batch_job_id(batch.id, line)
    if outcome.state is JobState.SUCCEEDED:
        response = _LineResponse(200, job, msgspec.Raw(outcome.result))
        return msgspec.json.encode(_OutputLine(f"batch_req_{job}", outcome.custom_id, response, None))
    not_run = _NOT_RUN_CODES.get(outcome.state)
    if not_run is not None:
        if outcome.state is None and batch.cancelling_at is not None:
            not_run = "batch_cancelled"
        error = _LineError(not_run, "This request was not completed before the batch ended.")
    else:
        error = msgspec.json.decode(outcome.error or b'{"code":"internal_error","message":""}', type=_LineError)
    return msgspec.json.encode(_OutputLine(f"batch_req_{job}", outcome.custom_id, None, error))
