"""Several answers read as one: the prompts of a list run in Triton side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

import anyio

from router.errors import CausewayError, CloudFailed

T = TypeVar("T")


async def merge_streams(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What the streams say as it comes, each with its stream's number. The first error ends all, closing does too."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    # At most one item waits for each stream, so a slow reader slows Triton's streams down.
    ready: asyncio.Queue[tuple[int, T] | CausewayError | None] = asyncio.Queue(len(streams))
    failure: CausewayError | None = None
    async with anyio.create_task_group() as tasks:
        for number, stream in enumerate(streams):
            tasks.start_soon(_pump, number, stream, ready)
        try:
            left = len(streams)
            while left and failure is None:
                found = await ready.get()
                if isinstance(found, CausewayError):
                    failure = found  # Raised below: out of a task group it would come wrapped.
                elif found is None:
                    left -= 1
                else:
                    yield found
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _pump(
    number: int, stream: AsyncGenerator[T, None], ready: asyncio.Queue[tuple[int, T] | CausewayError | None]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await ready.put((number, item))
    except CausewayError as error:
        await ready.put(error)
    except Exception as error:  # The reader must hear of it, or it would wait for ever.
        await ready.put(CloudFailed(f"an answer failed: {type(error).__name__}", phase="stream"))
    else:
        await ready.put(None)
