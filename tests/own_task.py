"""A context that is entered and left in one task, as its task groups need it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def in_own_task(context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """For fixtures: pytest's set-up and tear-down are two tasks."""
    started: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def host() -> None:
        try:
            async with context as entered:
                started.set_result(entered)
                await stop.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    task = asyncio.create_task(host())
    yield await started
    stop.set()
    await task
