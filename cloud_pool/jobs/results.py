"""What became of a batch's lines, in OpenAI's shape, read from its jobs whenever it is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from .batches import Batch, Batches, Ended, job_name
from .files import Part
from .states import State

_PAGE = 50


class Results:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def lines(self, batch: Batch, part: Part) -> AsyncIterator[bytes]:
        """The lines of a file of results."""
        async for at, ended in self.ended(batch, part):
            yield _result(batch, at, ended) + b"\n"

    async def ended(self, batch: Batch, part: Part) -> AsyncIterator[tuple[int, Ended]]:
        for first in range(1, batch.total + 1, _PAGE):
            page = range(first, min(first + _PAGE, batch.total + 1))
            for at, became in zip(page, await self._batches.ended(batch.id, page), strict=True):
                if (became.state is State.SUCCEEDED) == (part == "output"):
                    yield at, became


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Fault(msgspec.Struct):
    code: str
    message: str


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Fault | None


_NEVER = {State.CANCELLED: "batch_cancelled", State.EXPIRED: "batch_expired", None: "batch_expired"}


def _result(batch: Batch, at: int, ended: Ended) -> bytes:
    """A line of OpenAI's output or error file."""
    job = job_of(batch, at)
    if ended.state is State.SUCCEEDED:
        return msgspec.json.encode(
            _Result(f"batch_req_{job}", ended.custom_id, _Response(200, job, msgspec.Raw(ended.result)), None)
        )
    never = _NEVER.get(ended.state)
    if never is not None:
        if ended.state is None and batch.cancelling_at is not None:
            never = "batch_cancelled"
        fault = _Fault(never, "This request was not completed before the batch ended.")
    else:
        fault = msgspec.json.decode(ended.error or b'{"code":"internal_error","message":""}', type=_Fault)
    return msgspec.json.encode(_Result(f"batch_req_{job}", ended.custom_id, None, fault))


def job_of(batch: Batch, at: int) -> str:
    """The job of the file's request number `at`, from 1: always the same, so that feeding can be repeated."""
    return job_name(batch.id, at)
