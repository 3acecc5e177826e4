"""Several streams read as one: the sequences of one request run in Triton side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

import anyio

from router.errors import CausewayError, CloudFailed

T = TypeVar("T")


async def merge_streams(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield each stream's items as they come, with the stream's index. The first error ends all, as does closing."""
    # At most one item waits for each stream, so a slow reader slows Triton's streams down.
    ready: asyncio.Queue[tuple[int, T] | CausewayError | None] = asyncio.Queue(len(streams))
    failure: CausewayError | None = None
    async with anyio.create_task_group() as tasks:
        for index, stream in enumerate(streams):
            tasks.start_soon(_pump, index, stream, ready)
        try:
            remaining = len(streams)
            while remaining and failure is None:
                entry = await ready.get()
                if isinstance(entry, CausewayError):
                    failure = entry  # Raised below: a task group would wrap it.
                elif entry is None:
                    remaining -= 1
                else:
                    yield entry
        except GeneratorExit:
            pass  # Closed: a task group would wrap it.
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _pump(
    index: int, stream: AsyncGenerator[T, None], ready: asyncio.Queue[tuple[int, T] | CausewayError | None]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await ready.put((index, item))
    except CausewayError as error:
        await ready.put(error)
    except Exception as error:  # The reader waits for an entry, so every failure has to reach it.
        await ready.put(CloudFailed(f"an answer failed: {type(error).__name__}", phase="stream"))
    else:
        await ready.put(None)
