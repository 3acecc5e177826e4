"""What became of a batch's lines, in OpenAI's shape, read from its jobs whenever it is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from ..states import JobState
from .batch_store import Batch, BatchStore, LineOutcome, batch_job_id
from .file_store import ResultPart

_PAGE = 50


class BatchResults:
    def __init__(self, batches: BatchStore) -> None:
        self._batches = batches

    async def lines(self, batch: Batch, part: ResultPart) -> AsyncIterator[bytes]:
        """The lines of a file of results."""
        async for at, ended in self.ended(batch, part):
            yield _result(batch, at, ended) + b"\n"

    async def ended(self, batch: Batch, part: ResultPart) -> AsyncIterator[tuple[int, LineOutcome]]:
        for first in range(1, batch.total + 1, _PAGE):
            page = range(first, min(first + _PAGE, batch.total + 1))
            for at, became in zip(page, await self._batches.ended(batch.id, page), strict=True):
                if (became.state is JobState.SUCCEEDED) == (part == "output"):
                    yield at, became


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


def _result(batch: Batch, at: int, ended: LineOutcome) -> bytes:
    """A line of OpenAI's output or error file."""
    job = line_job_id(batch, at)
    if ended.state is JobState.SUCCEEDED:
        return msgspec.json.encode(
            _OutputLine(f"batch_req_{job}", ended.custom_id, _LineResponse(200, job, msgspec.Raw(ended.result)), None)
        )
    never = _NOT_RUN_CODES.get(ended.state)
    if never is not None:
        if ended.state is None and batch.cancelling_at is not None:
            never = "batch_cancelled"
        fault = _LineError(never, "This request was not completed before the batch ended.")
    else:
        fault = msgspec.json.decode(ended.error or b'{"code":"internal_error","message":""}', type=_LineError)
    return msgspec.json.encode(_OutputLine(f"batch_req_{job}", ended.custom_id, None, fault))


def line_job_id(batch: Batch, at: int) -> str:
    """The job of the file's request number `at`, from 1: always the same, so that feeding can be repeated."""
    return batch_job_id(batch.id, at)
