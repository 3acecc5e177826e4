"""A request that is preempted before its first token: its caller notices only the time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from causeway_server.router.errors import CausewayError, DeadlineExceeded, EngineUnavailable

from .scripted import WORDS, Bed, Hung, ScriptedTriton, text_of


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


async def hung() -> tuple[Bed, ScriptedTriton, asyncio.Task[str]]:
    """One permit, held by a tenant's request to which Triton sends nothing."""
    triton = ScriptedTriton(Hung)
    bed = Bed({"large": triton}, permits=1, max_queued=4)
    flood = asyncio.ensure_future(answered(bed, "flood"))
    await triton.hangs.wait()
    return bed, triton, flood


async def answered(bed: Bed, tenant: str) -> str:
    _, chunks = await bed.send(bed.call(tenant=tenant, priority="interactive"))
    return text_of(chunks)


async def test_a_preempted_request_and_its_successor_are_both_answered() -> None:
    bed, triton, flood = await hung()
    triton.script = WORDS
    assert await answered(bed, "quiet") == "".join(WORDS)
    assert await flood == "".join(WORDS)
    assert len(triton.requests) == 3
    assert bed.is_free
    assert not bed.fallback.is_open("large")


async def test_a_caller_that_leaves_after_preemption_leaves_nothing() -> None:
    bed, triton, flood = await hung()
    triton.hangs = type(triton.hangs)()
    quiet = asyncio.ensure_future(answered(bed, "quiet"))
    await triton.hangs.wait()
    await settle()
    assert triton.open == 1
    flood.cancel()
    quiet.cancel()
    await asyncio.gather(flood, quiet, return_exceptions=True)
    assert bed.is_free


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), DeadlineExceeded("late")])
async def test_a_failure_after_preemption_is_reported_once(error: CausewayError) -> None:
    bed, triton, flood = await hung()
    triton.script = WORDS
    call = bed.call(tenant="quiet", priority="interactive")
    async with aclosing(bed.service.answer(call)) as pieces:
        await anext(pieces)
        await settle()
        triton.script = (error,)
    with pytest.raises(type(error)):
        await flood
    assert bed.is_free


async def test_a_stream_with_a_token_is_not_preempted() -> None:
    triton = ScriptedTriton()
    bed = Bed({"large": triton}, permits=1, max_queued=4)
    flood = bed.call(tenant="flood", priority="interactive")
    async with aclosing(bed.service.answer(flood)) as pieces:
        await anext(pieces)
        quiet = asyncio.ensure_future(answered(bed, "quiet"))
        await settle()
        assert (bed.admissions["large"].scheduler.running, bed.admissions["large"].scheduler.waiting) == (1, 1)
        assert [piece async for piece in pieces]
    assert await quiet == "".join(WORDS)
    assert len(triton.requests) == 2
    assert bed.is_free
