"""A request that gives its place back before its first token: its caller notices nothing but the time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from router.errors import CausewayError, DeadlineExceeded, EngineUnavailable

from .scripted import WORDS, Bed, Hung, Triton, text_of


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


async def hung() -> tuple[Bed, Triton, asyncio.Task[str]]:
    """One place, and a tenant's request in it to which Triton says nothing."""
    triton = Triton(Hung)
    bed = Bed({"large": triton}, permits=1, max_queued=4)
    flood = asyncio.ensure_future(answered(bed, "flood"))
    await triton.hangs.wait()
    return bed, triton, flood


async def answered(bed: Bed, tenant: str) -> str:
    _, chunks = await bed.ask(bed.call(tenant=tenant, priority="interactive"))
    return text_of(chunks)


async def test_both_are_answered() -> None:
    """The call to Triton is stopped and made again, and the answer is whole."""
    bed, triton, flood = await hung()
    triton.script = WORDS
    assert await answered(bed, "quiet") == "".join(WORDS)
    assert await flood == "".join(WORDS)
    assert len(triton.asked) == 3
    assert bed.is_free
    assert not bed.ladder.is_open("large")


async def test_its_caller_leaves_while_it_waits_again() -> None:
    """Nothing of it stays."""
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
async def test_it_fails_the_second_time(error: CausewayError) -> None:
    """As it would have the first time; the breaker hears of it once."""
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


async def test_what_has_spoken_is_not_stopped() -> None:
    """A stream of which a token was seen goes on to its end; the other waits for it."""
    triton = Triton()
    bed = Bed({"large": triton}, permits=1, max_queued=4)
    flood = bed.call(tenant="flood", priority="interactive")
    async with aclosing(bed.service.answer(flood)) as pieces:
        await anext(pieces)
        quiet = asyncio.ensure_future(answered(bed, "quiet"))
        await settle()
        assert (bed.doors["large"].running, bed.doors["large"].waiting) == (1, 1)
        assert [piece async for piece in pieces]
    assert await quiet == "".join(WORDS)
    assert len(triton.asked) == 2
    assert bed.is_free
