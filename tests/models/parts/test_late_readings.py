"""Readings that outlast their request."""

from __future__ import annotations

import asyncio

import pytest

from causeway_server.models.parts.graph.branch import ContinuedReadings, PartKey, ReadPart
from causeway_server.models.parts.process.messages import Found
from causeway_server.models.parts.process.parent import WorkerFailed, WorkerTimeout
from causeway_server.router.types import Fact

KEY: PartKey = ("audio", "0" * 64)
READ = ReadPart(Found(Fact("hello", 1.0)))


class Encoder:
    """Reads when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.runs = self.cancelled = 0

    async def run(self) -> ReadPart:
        self.runs += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return READ


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_reading_goes_on_without_its_caller_and_the_next_one_joins_it() -> None:
    late, encoder = ContinuedReadings(), Encoder()
    for _ in range(2):
        with pytest.raises(WorkerTimeout):
            await late.read(KEY, encoder.run, now() + 0.01)
    joining = asyncio.create_task(late.read(KEY, encoder.run, now() + 60.0))
    await asyncio.sleep(0.0)
    encoder.go_on.set()
    assert await joining is READ
    assert (encoder.runs, len(late)) == (1, 0)


async def test_a_reading_ends_with_the_last_caller_that_is_cancelled() -> None:
    late, encoder = ContinuedReadings(), Encoder()
    first, second = (asyncio.create_task(late.read(KEY, encoder.run, now() + 60.0)) for _ in range(2))
    await asyncio.sleep(0.0)
    first.cancel()
    await asyncio.wait([first])
    assert (encoder.cancelled, len(late)) == (0, 1)
    second.cancel()
    await asyncio.wait([second])
    await asyncio.sleep(0.0)
    assert (encoder.cancelled, len(late)) == (1, 0)


async def test_callers_get_an_error_when_readings_are_closed() -> None:
    late, encoder = ContinuedReadings(), Encoder()
    waiting = asyncio.create_task(late.read(KEY, encoder.run, now() + 60.0))
    await asyncio.sleep(0.0)
    await late.close()
    with pytest.raises(WorkerFailed):
        await waiting
