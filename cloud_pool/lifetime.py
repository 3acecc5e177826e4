"""The life of a gateway or background process: its tasks, steps that wait for servers, what is closed after the tasks.

A background task that fails ends the process: its error leaves `run_with_tasks`, the log gets a line, the status is 1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from router.errors import ConfigError

Closing = Callable[[], Awaitable[None]]


class StopSignal(Protocol):
    """An event of anyio or asyncio."""

    async def wait(self) -> object: ...


async def run_with_tasks(work: Callable[[TaskGroup, list[Closing]], Awaitable[None]]) -> None:
    """Give `work` a group for background tasks, and a list of what is closed after their end. Raises ConfigError."""
    errors = []
    closing: list[Closing] = []
    async with anyio.create_task_group() as tasks:
        try:
            await work(tasks, closing)
        except ConfigError as error:
            errors.append(error)  # Raised below: a task group would wrap it.
        tasks.cancel_scope.cancel()
    for close in closing:
        await close()
    for config_error in errors:
        raise config_error


async def open_all(stop: StopSignal, *steps: Callable[[], Awaitable[None]]) -> bool:
    """Take the steps. Returns False if `stop` came first. Raises ConfigError."""
    errors: list[ConfigError] = []
    async with anyio.create_task_group() as tasks:

        async def take() -> None:
            try:
                for step in steps:
                    await step()
            except ConfigError as error:
                errors.append(error)  # Raised below: a task group would wrap it.
            tasks.cancel_scope.cancel()

        tasks.start_soon(take)
        await stop.wait()
        tasks.cancel_scope.cancel()
        return False
    for error in errors:
        raise error
    return True
