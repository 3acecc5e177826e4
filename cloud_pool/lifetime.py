"""The lifecycle of a gateway or background process: tasks, start steps that wait for servers, and the final closing.

A background task that fails ends the process: its error leaves `run_with_tasks`, the log gets a line, and the exit
status is 1. `keep_running` restarts a loop after an unexpected fault.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.logs import redacted

RESTART_S: Final = 5.0
log = logging.getLogger(__name__)
Closing = Callable[[], Awaitable[None]]


class StopSignal(Protocol):
    """An event of anyio or asyncio."""

    async def wait(self) -> object: ...


async def run_with_tasks(work: Callable[[TaskGroup, list[Closing]], Awaitable[None]]) -> None:
    """Run `work` with a group for background tasks and a list of closings for their end. Raises ConfigError."""
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
    """Run the start steps. Return False if `stop` was set first. Raises ConfigError."""
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


async def keep_running(
    name: str, run: Callable[[], Awaitable[None]], *, sleep: Callable[[float], Awaitable[None]] = anyio.sleep
) -> None:
    """Run a loop until it returns or is cancelled; after an exception, which would end all tasks, log it and run it
    again.

    The loop's state has to survive its restart.
    """
    while True:
        try:
            return await run()
        except Exception as error:
            log.error("%s failed unexpectedly and starts again in %g s: %s", name, RESTART_S, redacted(error))
        await sleep(RESTART_S)
