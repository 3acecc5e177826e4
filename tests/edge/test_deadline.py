"""The deadline around awaits: it ends what takes too long, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from edge_node.deadline import Deadline


def soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_it_ends_what_takes_too_long() -> None:
    """The body is cancelled at the deadline, and the caller told."""
    with pytest.raises(asyncio.TimeoutError), Deadline(soon(0.01)):
        await asyncio.sleep(60)
    await asyncio.sleep(0)  # the task itself is not cancelled


async def test_it_leaves_alone_what_is_in_time() -> None:
    """Nothing is left of a bound that was not needed."""
    with Deadline(soon(0.005)):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)


async def test_it_can_be_moved_both_ways() -> None:
    """Later lets go on, earlier ends."""

    async def wait(first_s: float, then_s: float, work_s: float) -> None:
        with Deadline(soon(first_s)) as bound:
            bound.move(soon(then_s))
            await asyncio.sleep(work_s)

    await wait(0.01, 60, 0.03)
    with pytest.raises(asyncio.TimeoutError):
        await wait(60, 0.005, 60)


async def test_a_deadline_that_has_passed_ends_at_the_first_await() -> None:
    """What is late already does not wait."""
    with pytest.raises(asyncio.TimeoutError), Deadline(soon(-1)):
        await asyncio.sleep(60)


async def test_an_error_of_the_body_passes() -> None:
    """The body's own failure is not a timeout."""
    with pytest.raises(ValueError, match="mine"), Deadline(soon(60)):
        raise ValueError("mine")


@pytest.mark.parametrize("deadline_s", [60.0, 0.0], ids=["alone", "at once"])
async def test_a_cancellation_from_elsewhere_stays_one(deadline_s: float) -> None:
    """The caller who leaves is not mistaken for a deadline, even if both come in the same turn."""
    entered = asyncio.Event()

    async def work() -> None:
        with Deadline(soon(deadline_s)):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_inner_of_two_ends_only_itself() -> None:
    """Nested bounds: the one that expires tells, and the outer one still holds afterwards."""
    told = []

    async def work() -> None:
        with Deadline(soon(0.05)):
            try:
                with Deadline(soon(0.005)):
                    await asyncio.sleep(60)
            except asyncio.TimeoutError:
                told.append("inner")
            await asyncio.sleep(60)

    with pytest.raises(asyncio.TimeoutError):
        await work()
    assert told == ["inner"]


async def test_the_outer_of_two_ends_both() -> None:
    """The inner bound does not take the outer one's end for its own."""
    told = []

    async def work() -> None:
        with Deadline(soon(0.005)):
            try:
                with Deadline(soon(60)):
                    await asyncio.sleep(60)
            except asyncio.TimeoutError:
                told.append("inner")

    with pytest.raises(asyncio.TimeoutError):
        await work()
    assert told == []
