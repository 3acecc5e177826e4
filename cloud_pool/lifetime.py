"""The life of a gateway or background process: its tasks, steps that wait for servers, what is closed after the tasks.

A background task that fails ends the process: its error leaves `run_with_tasks`, the log gets a line, the status is 1.
`keep_running` runs one that goes on after a fault that nothing expected.
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
_log = logging.getLogger(__name__)
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


async def keep_running(
    name: str, run: Callable[[], Awaitable[None]], *, sleep: Callable[[float], Awaitable[None]] = anyio.sleep
) -> None:
    """Run a loop until it returns or is cancelled. After an exception, which is logged, it begins again.

    One loop that fails would else end its task group, and with it all others of the process.

    Args:
        name: in the log
        run: the loop; what it holds has to survive a new beginning
    """
    while True:
        try:
            return await run()
        except Exception as error:
            _log.error("%s failed unexpectedly and begins again in %g s: %s", name, RESTART_S, redacted(error))
        await sleep(RESTART_S)
